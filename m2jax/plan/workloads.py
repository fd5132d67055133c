"""Settings of a plan: a model, its workloads, and the mesh of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.optim.optimizer import OptimizerConfig
from m2jax.rl.estimators import EstimatorConfig, cispo
from m2jax.sharding import MeshConfig

TRAINING = ('pretrain', 'rl')
SERVING = ('prefill', 'decode')
# The job that runs the programs planned for a kind; None: no job does yet.
JOBS = {
  'pretrain': 'experiments.pretrain',
  'rl': 'experiments.forge',
  'prefill': 'experiments.serve',
  'decode': 'experiments.serve',
}


@dataclasses.dataclass(frozen=True)
class Workload:
  """A train step, or a call of the engine.

  Attributes:
    kind: 'pretrain' or 'rl', a train step; 'prefill' or 'decode', a call of the engine.
    rows: rows of a step's batch, or sequences of a call.
    context: tokens of a row; in serving, positions of the cache that are read.
    tokens: new tokens of each row: the chunk of a prefill, 1 of a decode step; in
      training the same as context.
    terms: loss terms of a row, for 'rl'; 0 is one a token.
    meshes: one for each number of devices planned for.
    passes: forward and backward passes of a step, the same number for every mesh, or
      one for each.
    remat: remat policy in this workload; None: the model's own.
    chunk_tokens: tokens of the chunks in which the learner trains trees that do not fit
      into a row, for 'rl'; their stack has `context` tokens. 0: they are not compiled.
  """

  kind: str
  rows: int
  context: int
  tokens: int = 0
  terms: int = 0
  meshes: tuple[MeshConfig, ...] = ()
  passes: tuple[int, ...] = (1,)
  remat: str | None = None
  chunk_tokens: int = 0

  def __post_init__(self):
    require(self, self.kind in JOBS, 'kind', f'one of {list(JOBS)}')
    for field in ('rows', 'context'):
      require(self, getattr(self, field) >= 1, field, 'positive')
    if self.kind == 'prefill' and not 0 < self.tokens:
      raise ValueError("Workload.tokens: a 'prefill' needs the tokens of its chunk")
    if len(self.passes) not in (1, len(self.meshes)):
      raise ValueError(
        f'Workload.passes={self.passes}: give one number, or one for each of the '
        f'{len(self.meshes)} meshes'
      )

  def of_tokens(self, tokens: int) -> Workload:
    """The workload with this many tokens per step, in one pass; serving is unchanged.

    Raises:
      ValueError: they are no whole rows.
    """
    if self.kind not in TRAINING:
      return self
    if tokens % self.context:
      raise ValueError(f'--tokens={tokens}: not a multiple of {self.context}, a row')
    return dataclasses.replace(self, rows=tokens // self.context, passes=(1,))

  def of_gradients(self, dtype: str) -> Workload:
    """The workload with this `gradient_dtype` in all of its meshes."""
    meshes = (dataclasses.replace(mesh, gradient_dtype=dtype) for mesh in self.meshes)
    return dataclasses.replace(self, meshes=tuple(meshes))

  @property
  def new_tokens(self) -> int:
    """New tokens of each row."""
    if self.kind in TRAINING:
      return self.context
    return self.tokens or 1


@dataclasses.dataclass(frozen=True)
class PlanConfig:
  """Settings of a plan.

  Attributes:
    model: the model as it is trained.
    workloads: name → workload.
    default: names of the workloads that are planned if none is given.
    optimizer: the train step's optimizer.
    mtp_weight, bias_update_rate: see StepConfig.
    estimator: RL's, one that needs no pass of its own before the gradient's.
    weights_dtype: dtype of the served weights, which have no MTP modules.
    page_tokens: tokens per page of the served cache.
    compiler_options: XLA's options, for every program.
  """

  model: ModelConfig
  workloads: Mapping[str, Workload]
  default: tuple[str, ...] = ()
  optimizer: OptimizerConfig = OptimizerConfig()
  mtp_weight: float = 0.3
  bias_update_rate: float = 1e-3
  estimator: EstimatorConfig = cispo.Config()
  weights_dtype: str = 'bfloat16'
  page_tokens: int = 128
  compiler_options: Mapping[str, str | bool | int] = dataclasses.field(
    default_factory=dict
  )

  def __post_init__(self):
    passes = sorted(self.estimator.inputs - {'entropy'})
    want = f'an estimator without passes of its own; these are not planned: {passes}'
    require(self, not passes, 'estimator', want)


@dataclasses.dataclass(frozen=True)
class Placed:
  """A workload on one mesh.

  Attributes:
    name: the workload's name.
    workload, mesh: themselves.
    passes: passes of a step.
  """

  name: str
  workload: Workload
  mesh: MeshConfig
  passes: int = 1

  def model(self, cfg: ModelConfig) -> ModelConfig:
    """The model with the workload's remat."""
    return dataclasses.replace(cfg, remat=self.workload.remat or cfg.remat)

  @property
  def micro_rows(self) -> int:
    """Rows of one pass over all devices."""
    return self.workload.rows // self.passes


def place(name: str, workload: Workload, devices: int) -> Placed:
  """The workload on its mesh for `devices` devices.

  Raises:
    ValueError: it has none, or its rows do not divide into its passes.
  """
  sizes = [mesh.size for mesh in workload.meshes]
  if devices not in sizes:
    raise ValueError(
      f'workload {name!r} has no mesh of {devices} devices, only of '
      f'{", ".join(map(str, sizes)) or "none"}: add one to its meshes, or look for one '
      'with --search'
    )
  index = sizes.index(devices)
  passes = workload.passes[index if len(workload.passes) > 1 else 0]
  if workload.rows % passes:
    raise ValueError(
      f'workload {name!r}: {workload.rows} rows do not divide into {passes} passes'
    )
  return Placed(name, workload, workload.meshes[index], passes)


def select(config: PlanConfig, names: Sequence[str]) -> dict[str, Workload]:
  """The workloads of these names; of none the default ones, or all.

  Raises:
    ValueError: an unknown name.
  """
  every = (*names, *config.default)
  unknown = [name for name in every if name not in config.workloads]
  if unknown:
    raise ValueError(
      f'no workload {", ".join(unknown)}: there are {", ".join(config.workloads)}'
    )
  names = names or config.default or tuple(config.workloads)
  return {name: config.workloads[name] for name in names}
