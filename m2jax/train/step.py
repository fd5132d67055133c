"""The train step: batch → loss terms → gradients → optimizer and router bias.

An `objective(logprob, batch) -> (loss, metrics)` is a sum over the loss terms of a
forest: `nll` for pre-training and SFT, RL's own for RL. The MTP loss is over the same
terms (facts/algorithms.md §4.1: L = main + λ/mtp · Σ_k L^k, mtp the number of modules),
and so is the top-K KL that keeps drafts close to a changing policy
(`layers.draft_loss`), with a separate weight. Losses and metrics are sums, so that a
batch in parts gives the same update (law 3): a feed yields the sums of each part, rows
of a forest (train/feeds.py) or a tree in chunks (train/chunks.py). On a mesh the model
has explicit collectives; those of loss terms, optimizer and router bias are the
compiler's, for arrays placed by `sharding`.

Axes: B rows, S tokens, M loss terms of a row, L layers, E experts; mtp modules.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from m2jax import model
from m2jax import sharding as sharding_lib
from m2jax.checks import require
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.layers import draft_loss
from m2jax.moe import router
from m2jax.optim import gnmr
from m2jax.optim import optimizer as optimizer_lib
from m2jax.sharding import ONE_DEVICE, Sharding
from m2jax.train import feeds

# (logprob [B, M], batch) → scalar loss, dict of scalar metrics; all of them sums,
# except those whose names end in _max. One whose attribute `needs_entropy` is true is
# also given the entropy [B, M]; with a teacher's words in the batch any is given
# `teacher_kl` [B, M], and of a model with a value head `value` [B, M]; where its
# attribute `detach_value` is true, the trunk has no gradient from the values.
Objective = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
Step = Callable[['TrainState', Any], tuple['TrainState', dict[str, jax.Array]]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything a step reads and writes; one pytree.

  Attributes:
    step: int32 scalar, optimizer steps taken.
    variables: {'params', 'router'} of the model.
    opt_state: the optimizer's.
    critic: the state of a critic with a trunk of its own (`rl.critic`); steps do not
      take it.
  """

  step: jax.Array
  variables: dict[str, Any]
  opt_state: Any
  critic: TrainState | None = None


@dataclasses.dataclass(frozen=True)
class StepConfig:
  """How a batch becomes an update.

  Attributes:
    micro_rows: rows of one forward and backward pass; jobs round it up to whole rows
      for each device (`on`).
    mtp_weight: λ of the MTP loss.
    detach_mtp: stop the MTP loss's gradient at trunk, embedding and head.
    draft_weight: weight of the MTP modules' top-K KL from the trunk; needs detach_mtp.
    draft_top_k: K, the trunk's words to compare; 0: nothing is compared. With a
      draft_weight of 0 the comparison is only measured.
    draft_rest: the words outside these K are one more; False: both sides are
      renormalised on the K words.
    activation_max: metrics have the largest |x| that enters a block or the final norm.
    bias_update_rate: u of the router bias's sign step; 0 freezes the bias.
    compiler_options: XLA's, by name; unknown ones are errors of the backend.
  """

  micro_rows: int = 4
  mtp_weight: float = 0.3
  detach_mtp: bool = False
  draft_weight: float = 0.0
  draft_top_k: int = 0
  draft_rest: bool = True
  activation_max: bool = False
  bias_update_rate: float = 1e-3
  compiler_options: Mapping[str, Any] = dataclasses.field(
    default_factory=dict, hash=False
  )

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.draft_weight >= 0, 'draft_weight', 'at least 0')
    check(self.draft_top_k >= 0, 'draft_top_k', 'at least 0')
    if self.draft_weight:
      check(self.draft_top_k > 0, 'draft_top_k', 'at least 1 with a draft_weight')
      check(self.detach_mtp, 'detach_mtp', 'True with a draft_weight')

  def on(self, sharding: Sharding) -> StepConfig:
    """The config on a mesh: `micro_rows` is rounded up to divide over the rows' axes;
    the result of a step does not depend on it."""
    shards = sharding.size('rows')
    return dataclasses.replace(self, micro_rows=-(-self.micro_rows // shards) * shards)

  @property
  def comparison(self) -> draft_loss.Comparison | None:
    """How drafts are compared with the trunk; None: not at all."""
    if not self.draft_top_k:
      return None
    return draft_loss.Comparison(self.draft_top_k, self.draft_rest)

  def check(self, cfg: ModelConfig) -> None:
    """Raises ValueError if the model has no drafts to compare."""
    if self.draft_top_k:
      most = cfg.vocab_size if cfg.num_mtp_modules else 0
      want = f'at most {most} for num_mtp_modules={cfg.num_mtp_modules} and '
      want += f'vocab_size={cfg.vocab_size}'
      require(self, self.draft_top_k <= most, 'draft_top_k', want)

  def jit(self, function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """`jax.jit` with the compiler options, for every part of a step."""
    return jax.jit(function, compiler_options=dict(self.compiler_options), **how)


@functools.partial(jax.jit, static_argnums=0)
def init_variables(cfg: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Random {'params', 'router'} of the model."""
  variables = model.M2(cfg).init(key, jnp.zeros((1, 2), jnp.int32))
  return {name: dict(variables[name]) for name in ('params', 'router')}


def init_state(variables, optimizer: optax.GradientTransformation) -> TrainState:
  """Step 0 with a fresh optimizer; the variables are taken over."""
  opt_state = optimizer.init(variables['params'])
  return TrainState(jnp.zeros((), jnp.int32), variables, opt_state)


def state_specs(cfg: ModelConfig, optimizer: optax.GradientTransformation, rules):
  """PartitionSpecs of the TrainState under sharding rules."""
  like = jax.eval_shape(lambda key: _new_state(cfg, optimizer, key), jax.random.key(0))
  variables = sharding_lib.param_specs(cfg, rules)
  params = like.variables['params'], variables['params']
  opt_state = sharding_lib.like_params(like.opt_state, *params)
  return TrainState(jax.sharding.PartitionSpec(), variables, opt_state)


def new_state(
  cfg: ModelConfig,
  optimizer: optax.GradientTransformation,
  key: jax.Array,
  sharding: Sharding = ONE_DEVICE,
  initialize: Callable[[Any], Any] = lambda params: params,
) -> TrainState:
  """Random weights and a fresh optimizer, each shard made on its device.

  Args:
    cfg: the model.
    optimizer: the parameters' optimizer.
    key: key for the weights.
    sharding: sharding of the state.
    initialize: `optimizer.initializer`'s, for rules that start from other weights.
  """
  make = functools.partial(_new_state, cfg, optimizer, initialize=initialize)
  if sharding.mesh is None:
    return jax.jit(make)(key)
  places = sharding.named(state_specs(cfg, optimizer, sharding.rules))
  return jax.jit(make, out_shardings=places)(key)


def start_state(
  variables: dict[str, Any],
  cfg: ModelConfig,
  optimizer: optax.GradientTransformation,
  sharding: Sharding,
) -> TrainState:
  """Step 0 of given variables, placed first: an optimizer for the mesh may look at
  whole matrices when it starts."""
  variables = sharding.place(variables, sharding_lib.param_specs(cfg, sharding.rules))
  return place_state(init_state(variables, optimizer), cfg, optimizer, sharding)


def place_state(
  state: TrainState,
  cfg: ModelConfig,
  optimizer: optax.GradientTransformation,
  sharding: Sharding,
) -> TrainState:
  """The state sharded by `state_specs`; unchanged without a mesh. A separate critic's
  is left where it is."""
  if sharding.mesh is None:
    return state
  specs = state_specs(cfg, optimizer, sharding.rules)
  placed = sharding.place(dataclasses.replace(state, critic=None), specs)
  return dataclasses.replace(placed, critic=state.critic)


def _new_state(cfg, optimizer, key, initialize=lambda params: params):
  variables = init_variables(cfg, key)
  variables['params'] = initialize(variables['params'])
  return init_state(variables, optimizer)


def at_terms(values: jax.Array, batch: Forest) -> jax.Array:
  """values [B, S] at the token of each loss term: [B, M]."""
  return jnp.take_along_axis(values, jnp.asarray(batch.term_token), axis=1)


def needs_entropy(objective: Objective) -> bool:
  """Whether the objective is also given the entropy, with its gradient."""
  return getattr(objective, 'needs_entropy', False)


def forward_options(objective: Objective, config: StepConfig) -> dict[str, Any]:
  """How `model.forward` is called for the loss and its gradient."""
  return dict(
    detach_mtp=config.detach_mtp,
    comparison=config.comparison,
    entropy_gradient=needs_entropy(objective),
    detach_value=getattr(objective, 'detach_value', False),
  )


def nll(logprob: jax.Array, batch: Forest) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Negative log-likelihood: −Σ weight · log p over the terms."""
  return -jnp.sum(batch.weight * logprob), {}


class NotFinite(FloatingPointError):
  """Batch after batch has a loss or gradient that is not finite."""

  repeatable = False


class Skips:
  """Counts steps in a row that changed nothing, since their loss or gradient was not
  finite (`programs`).

  Attributes:
    in_a_row: the last steps.
    too_many: there were more in a row than may be; the run must end.
  """

  def __init__(self, most: int):
    """`most`: steps in a row that are skipped."""
    self._most, self.in_a_row, self.too_many = most, 0, False

  def add(self, skipped: bool) -> None:
    """The next step."""
    self.in_a_row = self.in_a_row + 1 if skipped else 0
    self.too_many |= self.in_a_row > self._most

  def check(self, where: str) -> None:
    """Raises NotFinite if `too_many`, after a checkpoint; `where`: the last step."""
    if self.too_many:
      raise NotFinite(
        f'{where}: loss or gradient was not finite in more than max_skipped='
        f'{self._most} steps in a row. The checkpoint of this step has the weights '
        'from before them, and goes on behind their batches: look for the cause '
        '(learning rate, precision, data), then start the same command again'
      )


def fetch(metrics: dict[str, jax.Array]) -> dict[str, float]:
  """A step's metrics as numbers on the host."""
  return {name: float(v) for name, v in jax.device_get(metrics).items()}


def loss_and_loads(
  params,
  router_state,
  batch,
  cfg,
  objective,
  config: StepConfig,
  sharding: Sharding = ONE_DEVICE,
  route: jax.Array | None = None,
):
  """Scalar loss and (metrics, expert loads) of one forest batch."""
  variables = {'params': params, 'router': router_state, 'route': route}
  options = forward_options(objective, config)
  out = model.forward(cfg, variables, batch, sharding=sharding, **options)
  loss, metrics = loss_and_metrics(out, batch, cfg, objective, config)
  return loss, (metrics, out.loads)


def loss_and_metrics(
  out: model.Outputs, batch, cfg, objective, config: StepConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Scalar loss and metrics of a batch from the model's outputs.

  Both are sums over the loss terms; `weight` is the sum of their weights. With a replay
  `replayed` is the number of tokens that have one, with multiplicity, and `rerouted` of
  those for which a router would choose other experts. With drafts compared,
  `draft_kl/k` and `draft_overlap/k` are those of module k (`layers.draft_loss`); tokens
  that it does not predict count 0.
  """
  entropy = (at_terms(out.entropy, batch),) if needs_entropy(objective) else ()
  more = {}
  if out.teacher_kl is not None:
    more['teacher_kl'] = at_terms(out.teacher_kl, batch)
  if out.value is not None:
    more['value'] = at_terms(out.value, batch)
  loss, metrics = objective(at_terms(out.logprob, batch), batch, *entropy, **more)

  def weighted(values):  # [B, S] → sum over the terms
    return jnp.sum(batch.weight * at_terms(values, batch))

  weight = jnp.sum(batch.weight.astype(loss.dtype))
  metrics = dict(metrics, loss=loss, entropy=weighted(out.entropy), weight=weight)
  if config.activation_max:
    metrics['activation_max'] = out.activation_max
  if cfg.num_mtp_modules:
    mtp_loss = -sum(weighted(lp) for lp in out.mtp_logprob) / cfg.num_mtp_modules
    metrics['mtp_loss'] = mtp_loss
    loss = loss + config.mtp_weight * mtp_loss
  if out.drafts is not None:
    kl, overlap = (list(map(weighted, x)) for x in out.drafts)
    for name, values in (('draft_kl', kl), ('draft_overlap', overlap)):
      metrics |= {f'{name}/{k}': x for k, x in enumerate(values, start=1)}
    if config.draft_weight:
      loss = loss + config.draft_weight * sum(kl) / cfg.num_mtp_modules
  if out.rerouted is not None:
    replayed = jnp.any(batch.experts[..., 0] >= 0, axis=-1)  # [B, S]
    metrics |= {
      name: jnp.sum(batch.multiplicity * tokens, dtype=loss.dtype)
      for name, tokens in (('replayed', replayed), ('rerouted', out.rerouted > 0))
    }
  return loss, metrics


class Sums(NamedTuple):
  """The sums of one part of a batch.

  Attributes:
    gradients: gradients of the parameters.
    metrics: scalars.
    loads: expert assignments, as `model.Outputs`.
  """

  gradients: Any
  metrics: dict[str, jax.Array]
  loads: dict[str, jax.Array]


def add(a: Sums, b: Sums) -> Sums:
  """Sums of both parts; of metrics whose names end in _max the larger one."""
  sums = jax.tree.map(jnp.add, a, b)
  largest = {
    name: jnp.maximum(value, b.metrics[name])
    for name, value in a.metrics.items()
    if name.endswith('_max')
  }
  return sums._replace(metrics=sums.metrics | largest)


class Programs(NamedTuple):
  """The jitted parts of a step, which can be lowered ahead of time.

  Attributes:
    micro: (variables, forest) → Sums.
    add: two Sums → their sum.
    apply: (state, Sums) → (state, metrics); donates the state.
  """

  micro: Callable[..., Sums]
  add: Callable[..., Sums]
  apply: Callable[..., Any]


# (variables, batch) → the Sums of each part of the batch
Feed = Callable[[Any, Any], Iterable[Sums]]


def make_step(
  cfg: ModelConfig,
  optimizer: optax.GradientTransformation,
  objective: Objective,
  config: StepConfig,
  sharding: Sharding = ONE_DEVICE,
  *,
  mean: bool = True,
  feed: Callable[[Programs, StepConfig, Sharding], Feed] = feeds.rows,
) -> Step:
  """`step(state, batch) -> (state, metrics)`; the state is donated.

  Metrics are scalars: those of `loss_and_metrics`, `grad_norm`, `max_violation` (router
  balance, mean over layers), `router_bias_rms`, the optimizer's, and `skipped`: 1 where
  loss or gradient is not finite. Such a step changes only counters, and the route of
  `gnmr`.

  Args:
    cfg: the model.
    optimizer: the parameters' optimizer.
    objective: what is learned.
    config: settings.
    sharding: with a mesh the state is sharded by `state_specs`, and `config.micro_rows`
      are the rows of one pass over all devices.
    mean: divide by the sum of the batch's weights.
    feed: yields the sums of each part of a batch; `feeds.rows` takes this host's rows
      of a forest.

  Raises:
    ValueError: model or micro_rows do not divide over mesh and hosts, or the model has
      no drafts to compare.
  """
  sharding.check(cfg)
  parts = programs(cfg, optimizer, objective, config, sharding, mean=mean)
  sums_of = feed(parts, config, sharding)

  def step(state: TrainState, batch):
    variables = gnmr.with_route(state.variables, state.opt_state)
    sums = functools.reduce(parts.add, sums_of(variables, batch))
    return parts.apply(state, sums)

  return step


def _where(finite: jax.Array, new: Any, old: Any) -> Any:
  """`new` if `finite`, else `old`; counters are new, since schedules go by them, and so
  is what gnmr makes of a gradient that is not finite."""

  def one(new, old):
    kept = isinstance(new, gnmr.State) or not jnp.issubdtype(new.dtype, jnp.inexact)
    return new if kept else jnp.where(finite, new, old)

  return jax.tree.map(one, new, old, is_leaf=lambda x: isinstance(x, gnmr.State))


def programs(
  cfg: ModelConfig,
  optimizer: optax.GradientTransformation,
  objective: Objective,
  config: StepConfig,
  sharding: Sharding = ONE_DEVICE,
  *,
  mean: bool = True,
) -> Programs:
  """What `make_step` runs; see there."""

  config.check(cfg)

  def micro(variables, batch):
    options = dict(cfg=cfg, objective=objective, config=config, sharding=sharding)
    loss = functools.partial(loss_and_loads, **options, route=variables.get('route'))
    grads, (metrics, loads) = jax.grad(loss, has_aux=True)(
      variables['params'], variables['router'], batch
    )
    return Sums(grads, metrics, loads)

  def apply(state: TrainState, sums: Sums):
    grads, metrics, loads = sums
    metrics = dict(metrics)
    weight = metrics.pop('weight')
    if mean:
      scale = 1 / jnp.maximum(weight, 1e-9)
      grads = jax.tree.map(lambda x: (x * scale).astype(x.dtype), grads)
      metrics = {
        name: value if name.endswith('_max') else value * scale
        for name, value in metrics.items()
      }
    params, router_state = state.variables['params'], state.variables['router']
    updates, opt_state = optimizer.update(grads, state.opt_state, params)
    biases = {
      name: router.update_bias(bias, loads[name], config.bias_update_rate)
      for name, bias in router_state.items()
    }
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(metrics['loss']) & jnp.isfinite(grad_norm)
    metrics = dict(
      metrics,
      grad_norm=grad_norm,
      skipped=1.0 - finite,
      max_violation=jnp.mean(router.max_violation(loads['layers'])),
      router_bias_rms=jnp.sqrt(jnp.mean(biases['layers'] ** 2)),
      **optimizer_lib.measure(updates, opt_state),
    )
    variables = {'params': optax.apply_updates(params, updates), 'router': biases}
    new, old = (variables, opt_state), (state.variables, state.opt_state)
    return TrainState(state.step + 1, *_where(finite, new, old)), metrics

  places = None
  if sharding.mesh is not None:
    everywhere = sharding.named(jax.sharding.PartitionSpec())
    places = (
      sharding.named(state_specs(cfg, optimizer, sharding.rules)),
      everywhere,
    )
  return Programs(
    config.jit(micro),
    config.jit(add),
    config.jit(apply, donate_argnums=0, out_shardings=places),
  )
