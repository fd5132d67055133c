"""Stages and phases of a pre-training run.

Stages of growing context follow each other, each with one batch shape, and with the
passes and the mesh that such a batch needs. Independently of them a run has a constant
phase and a decay phase (facts/m2-and-forge.md §1.5, §3). Both are counted in tokens
consumed, which decide the learning rate, the weight of MTP and the update rate of the
router bias.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from m2jax.checks import require
from m2jax.data import packing
from m2jax.data.stream import StateMismatch
from m2jax.optim import schedules
from m2jax.optim.optimizer import OptimizerConfig
from m2jax.optim.schedules import ScheduleConfig
from m2jax.sharding import MeshConfig
from m2jax.train.loop import LoopConfig
from m2jax.train.step import StepConfig


class Stage(NamedTuple):
  """A segment of training on batches of one shape.

  Attributes:
    context: S, tokens of a row.
    rows: B.
    tokens: consumed by the stage, rounded up to whole batches; 0, in the last stage
      only, is until the loop's budget ends.
    passes: forward and backward passes of a batch, which divide its rows; 0: passes of
      `step.micro_rows` rows.
    mesh: the stage's mesh; None: the job's.
  """

  context: int
  rows: int
  tokens: int = 0
  passes: int = 0
  mesh: MeshConfig | None = None


def _stage(number: int, values: Mapping[str, Any] | Sequence[Any]) -> Stage:
  """A stage from a config file, where it is a mapping or a plain tuple."""
  try:
    stage = Stage(**values) if isinstance(values, Mapping) else Stage(*values)
    if isinstance(stage.mesh, Mapping):
      stage = stage._replace(mesh=MeshConfig(**stage.mesh))
    return stage
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'PretrainConfig.stages[{number}]={values!r}: {error}; want the fields '
      f'{", ".join(Stage._fields)}'
    ) from error


@dataclasses.dataclass(frozen=True)
class PhasesConfig:
  """What changes with the tokens consumed.

  A change takes effect with the first batch that begins at or after its token.

  Attributes:
    tokens: tokens of constant and decay phase together; 0 is a constant phase without
      end.
    warmup_tokens: tokens over which the learning rate rises, in the constant phase.
    decay_tokens: tokens of the decay phase, in which the learning rate falls linearly.
    final_fraction: fraction of the learning rate that remains at the end and after it.
    decay_mtp_weight: λ of MTP in the decay phase; before, it is `step.mtp_weight`.
    bias_updates_until: fraction of `tokens` after which the router bias is frozen;
      before, its rate is `step.bias_update_rate`.
  """

  tokens: int = 0
  warmup_tokens: int = 0
  decay_tokens: int = 0
  final_fraction: float = 0.0
  decay_mtp_weight: float = 0.1
  bias_updates_until: float = 1.0

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.tokens >= 0, 'tokens', 'at least 0')
    check(self.warmup_tokens >= 0, 'warmup_tokens', 'at least 0')
    most = self.tokens - self.warmup_tokens if self.tokens else 0
    check(
      0 <= self.decay_tokens <= most, 'decay_tokens', f'in [0, {most}], after warm-up'
    )
    check(0 <= self.final_fraction <= 1, 'final_fraction', 'in [0, 1]')
    check(0 <= self.bias_updates_until <= 1, 'bias_updates_until', 'in [0, 1]')


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
  """Training on documents.

  Attributes:
    stages: one after the other, as (context, rows, tokens) or mappings; see `Stage`.
    phases: what changes during the run.
    streams: number of streams of documents, read side by side (`packing.DocumentRows`),
      so that a batch has at least this many documents; divides the rows of every stage.
      0: the largest number that does.
    held_out_batches: the most batches of which the held-out loss is the mean.
    loop: the budget; its `steps` may end a run before its stages do.
    step: train-step settings.
    optimizer: its schedule is made from `phases`.
  """

  stages: tuple[Stage, ...]
  held_out_batches: int
  loop: LoopConfig
  step: StepConfig
  optimizer: OptimizerConfig
  phases: PhasesConfig = PhasesConfig()
  streams: int = 0

  def __post_init__(self):
    stages = tuple(_stage(*numbered) for numbered in enumerate(self.stages))
    object.__setattr__(self, 'stages', stages)
    sizes = [size for stage in stages for size in stage[:3]][:-1]  # not the last tokens
    if not stages or min(sizes) < 1 or stages[-1].tokens < 0:
      raise ValueError(
        f'PretrainConfig.stages={self.stages!r}: want (context, rows, tokens), all '
        'positive; only the last may have 0 tokens'
      )
    for number, stage in enumerate(stages):
      if stage.passes < 0 or stage.passes and stage.rows % stage.passes:
        raise ValueError(
          f'PretrainConfig.stages[{number}].passes={stage.passes}: must divide its '
          f'{stage.rows} rows, or be 0'
        )
    if self.streams < 0 or self.streams and any(s.rows % self.streams for s in stages):
      raise ValueError(
        f'PretrainConfig.streams={self.streams}: must divide the rows of every stage'
      )
    if self.optimizer.schedule != ScheduleConfig():
      raise ValueError('PretrainConfig.optimizer.schedule: set PretrainConfig.phases')
    schedule(self)  # raises now for phases of less than a batch

  @property
  def segments(self) -> schedules.Segments:
    """(steps, tokens of a step) of each stage."""
    sizes = [stage.context * stage.rows for stage in self.stages]
    return tuple(
      (-(-stage.tokens // size), size)
      for stage, size in zip(self.stages, sizes, strict=True)
    )

  @property
  def clock(self) -> schedules.Clock:
    """Steps to tokens consumed, and back."""
    return schedules.Clock(self.segments)

  @property
  def num_streams(self) -> int:
    """Number of streams of documents; `streams` itself unless that is 0."""
    return self.streams or int(np.gcd.reduce([stage.rows for stage in self.stages]))

  def stage_at(self, step: int) -> int:
    """Index of the stage of the batch after `step` batches; at the end, the last."""
    ends = list(itertools.accumulate(steps for steps, _ in self.segments))
    return sum(end <= step for end in ends[:-1])

  def micro_rows(self, stage: Stage) -> int:
    """Rows of one pass of a stage's batch."""
    if stage.passes:
      return stage.rows // stage.passes
    return min(self.step.micro_rows, stage.rows)

  def on_any_mesh(self) -> PretrainConfig:
    """Without what may differ when the run resumes: meshes, passes, compiler options.

    The result does not depend on them (laws 3 and 6).
    """
    stages = tuple(stage._replace(passes=0, mesh=None) for stage in self.stages)
    defaults = StepConfig()
    step = dataclasses.replace(
      self.step,
      micro_rows=defaults.micro_rows,
      compiler_options=defaults.compiler_options,
    )
    return dataclasses.replace(self, stages=stages, step=step)


def schedule(config: PretrainConfig) -> ScheduleConfig:
  """The learning rate's schedule, in steps."""
  phases, clock = config.phases, config.clock
  common = {
    'warmup_steps': clock.step(phases.warmup_tokens),
    'segments': config.segments,
  }
  if not phases.decay_tokens:
    return ScheduleConfig('constant', **common)
  total = clock.step(phases.tokens)
  return ScheduleConfig(
    'wsd',
    total_steps=total,
    decay_steps=total - clock.step(phases.tokens - phases.decay_tokens),
    final_fraction=phases.final_fraction,
    **common,
  )


class Settings(NamedTuple):
  """What a step is compiled for, besides the shape of its batch."""

  mtp_weight: float
  bias_update_rate: float


def settings(config: PretrainConfig, tokens: int) -> Settings:
  """Those of the batch that begins after `tokens` tokens."""
  phases, step = config.phases, config.step
  mtp, bias = [(0, step.mtp_weight)], [(0, step.bias_update_rate)]
  if phases.decay_tokens:
    mtp.append((phases.tokens - phases.decay_tokens, phases.decay_mtp_weight))
  if phases.tokens:
    bias.append((round(phases.bias_updates_until * phases.tokens), 0.0))
  return Settings(schedules.piecewise(mtp, tokens), schedules.piecewise(bias, tokens))


class Pieces(NamedTuple):
  """A batch of documents.

  Attributes:
    arrays: tokens of this host's rows.
    stage: the stage that it belongs to.
    consumed: tokens of all hosts before it.
  """

  arrays: list[np.ndarray]
  stage: Stage
  consumed: int


Host = tuple[int, int]  # (h, H): the h-th of H parts of every batch's rows


class StagedRows(Iterator[Pieces]):
  """The batches of all stages, in order.

  A stage with the same source as the stage before continues it; another source starts
  at its beginning.
  """

  def __init__(
    self,
    config: PretrainConfig,
    sources: Sequence[Sequence[np.ndarray]],
    *,
    seed: int,
    state: Mapping[str, Any] | None = None,
    hosts: Sequence[Host | None] | None = None,
    gather: Callable[[dict[str, Any]], Sequence[dict[str, Any]]] = lambda own: [own],
  ):
    """Starts at the beginning, or at a `state()`.

    Args:
      sources: for each stage, token arrays (see `data.stream`).
      seed: order of the documents.
      state: position to continue from. The hosts may be others than those of the save.
      hosts: in each stage, the part of the rows that this host reads: all that it
        reads. None in place of a stage: the iteration ends before it.
      gather: a host's position → those of all hosts. Every host calls it at the same
        batch: for `state()`, and where a stage begins, since its hosts may be others.

    Raises:
      StateMismatch: the state is of other data.
      ValueError: not one source for each stage, or streams do not divide over hosts.
    """
    if len(sources) != len(config.stages):
      raise ValueError(f'{len(sources)} sources for {len(config.stages)} stages')
    self._config, self._sources, self._seed = config, sources, seed
    self._hosts = hosts or [(0, 1)] * len(sources)
    self._gather = gather
    self._step, self._stage, rows = 0, 0, None
    if state is not None:
      if 'step' not in state:
        raise StateMismatch('the saved data position has no step: of another version')
      self._step, self._stage, rows = state['step'], state['stage'], state['rows']
    if self._next_is_open():
      rows = self._enter(rows)
    self._rows = self._open(rows)

  def state(self) -> dict[str, Any]:
    """Batches so far, the stage of the last one, and the position in its source; of all
    hosts, all of which must call it."""
    position = {'step': self._step, 'stage': self._stage}
    return merge_states(self._gather({**position, 'rows': self._rows.state()}))

  def __next__(self) -> Pieces:
    if self._stage_is_over():
      if not self._next_is_open():
        raise StopIteration
      self._rows = self._open(self._enter(self.state()['rows']))
    consumed = self._config.clock.tokens(self._step)
    arrays = next(self._rows)
    self._step += 1
    return Pieces(arrays, self._config.stages[self._stage], consumed)

  def _stage_is_over(self) -> bool:
    steps = [number for number, _ in self._config.segments]
    return self._step == sum(steps[: self._stage + 1]) and bool(steps[self._stage])

  def _next_is_open(self) -> bool:
    """Whether the stage is over and its successor is trained here."""
    after = [*self._hosts, None][self._stage + 1]
    return after is not None and self._stage_is_over()

  def _enter(self, rows: dict[str, Any] | None) -> dict[str, Any] | None:
    """Goes to the next stage; returns the position in its source."""
    before = self._sources[self._stage]
    self._stage += 1
    return rows if self._sources[self._stage] is before else None

  def _open(self, state: dict[str, Any] | None) -> packing.DocumentRows:
    stage, host = self._config.stages[self._stage], self._hosts[self._stage]
    return packing.DocumentRows(
      self._sources[self._stage],
      row_tokens=stage.context,
      rows=stage.rows,
      streams=self._config.num_streams,
      host=host or (0, 1),
      seed=self._seed,
      state=state,
    )


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """One state of a `StagedRows` from those of its hosts, in any order.

  Raises:
    StateMismatch: they are not of one batch, or not of all hosts.
  """
  rows = packing.merge_states([state['rows'] for state in states])
  merged = {**states[0], 'rows': rows}
  if any({**state, 'rows': rows} != merged for state in states):
    raise StateMismatch('the data positions to merge are not of one batch')
  return merged
