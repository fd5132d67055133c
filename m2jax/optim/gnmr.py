"""GNMR: which blocks take their higher-precision path in the next step.

"GNMR: Runtime Stability Control for Low-Precision LLM Training", arXiv 2606.00539
(facts/algorithms.md §2). A controller that compares the gradient norm n of each block
with that block's own history:

  GNMR_t = n_t / mean(n_1 … n_{t−1}),  Δ_t = GNMR_t / mean(GNMR_{t−δ} … GNMR_{t−1})
  risk R = max(GNMR / α, Δ / β);  candidates: R > 1, or locked

Both ratios are 1 until their history exists. The `max_active` candidates with the
largest risk are promoted: they take the recovery path, and R > 1 locks them for
`lock_steps`. A candidate that the cap excludes loses its lock; with fewer candidates,
no other block is promoted. No step is repeated or skipped, and the gradient is
unchanged.

Norms of step t exist only after its backward pass, so they choose the route of step
t + 1. They are norms of the gradient that the optimizer gets: reduced over all devices,
divided by the weight, not clipped. A norm that is not finite counts as infinite risk;
neither it nor a norm of 0 enters the history.

Axes: L layers (decoder blocks), the monitored units.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from m2jax.axes import Array, Bool, Float, Float32, Int32
from m2jax.checks import require
from m2jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class GnmrConfig:
  """The controller. Defaults are the paper's for FP8, but for `max_active`.

  Attributes:
    max_active: blocks that may be promoted at the same time; 0: there is no controller.
      The paper's runs allow a quarter of the blocks.
    alpha: threshold of GNMR.
    first_alpha, first_steps: threshold of the first steps, in which norms fall fast;
      the paper's are the first 2.5 % of the run.
    beta: threshold of Δ-GNMR; inf: it is not used.
    delta_steps: δ, steps that Δ-GNMR looks back.
    lock_steps: steps that a promotion lasts beyond the one it is for.
    memory_steps: 0: the mean is over all history, the paper's. Extension: a norm's
      share in the mean is at least 1 / memory_steps, which forgets the large norms of
      the start.
  """

  max_active: int = 0
  alpha: float = 1.1
  first_alpha: float = 1.5
  first_steps: int = 0
  beta: float = 1.5
  delta_steps: int = 5
  lock_steps: int = 1
  memory_steps: int = 0

  def __post_init__(self):
    check = functools.partial(require, self)
    for name in ('max_active', 'first_steps', 'lock_steps', 'memory_steps'):
      check(getattr(self, name) >= 0, name, 'at least 0')
    for name in ('alpha', 'first_alpha', 'beta'):
      check(getattr(self, name) > 0, name, 'positive')
    check(math.isfinite(self.alpha), 'alpha', 'finite')
    check(self.delta_steps >= 1, 'delta_steps', 'at least 1')


class State(NamedTuple):
  """What the controller knows after a step.

  Attributes:
    steps: number of steps seen.
    entered: norms in the mean.
    mean: mean of a block's norms.
    ratios: latest GNMR first; those that do not exist yet are 0.
    lock: steps for which the block remains a candidate.
    risk: R of the last step.
    candidates: number of candidates of the last step.
    route: blocks that are promoted in the next step.
  """

  steps: Int32[Array, '']
  entered: Int32[Array, 'L']
  mean: Float32[Array, 'L']
  ratios: Float32[Array, 'delta_steps L']
  lock: Int32[Array, 'L']
  risk: Float32[Array, 'L']
  candidates: Int32[Array, '']
  route: Bool[Array, 'L']


def init(config: GnmrConfig, num_layers: int) -> State:
  """No history, and no block promoted."""
  shapes = {
    'steps': ((), jnp.int32),
    'entered': ((num_layers,), jnp.int32),
    'mean': ((num_layers,), jnp.float32),
    'ratios': ((config.delta_steps, num_layers), jnp.float32),
    'lock': ((num_layers,), jnp.int32),
    'risk': ((num_layers,), jnp.float32),
    'candidates': ((), jnp.int32),
    'route': ((num_layers,), jnp.bool_),
  }
  # a buffer for each, since steps donate them
  return State(**{name: jnp.zeros(*like) for name, like in shapes.items()})


def update(
  config: GnmrConfig, state: State, norms: Float[Array, 'L']
) -> tuple[State, Bool[Array, 'L']]:
  """Scores the norms of a step; the state after it, and the route of the next.

  Example:
    >>> config = GnmrConfig(max_active=1)
    >>> state = init(config, 3)
    >>> for norms in [1.0, 1.0, 1.0], [1.0, 1.0, 9.0]:
    ...   state, route = update(config, state, jnp.array(norms))
    >>> route.tolist()
    [False, False, True]
  """
  norms = jnp.asarray(norms, jnp.float32)
  finite = jnp.isfinite(norms)
  enters = finite & (norms > 0)
  tiny, huge = jnp.finfo(jnp.float32).tiny, jnp.finfo(jnp.float32).max

  ratio = jnp.minimum(norms / jnp.maximum(state.mean, tiny), huge)
  ratio = jnp.where(state.entered > 0, ratio, 1.0)
  recent = jnp.sum(state.ratios / config.delta_steps, axis=0)
  delta = ratio / jnp.maximum(recent, tiny)
  delta = jnp.where(state.entered >= config.delta_steps, delta, 1.0)
  alpha = jnp.where(state.steps < config.first_steps, config.first_alpha, config.alpha)
  risk = jnp.maximum(ratio / alpha, delta / config.beta)
  risk = jnp.where(enters, risk, jnp.where(finite, 0.0, jnp.inf))

  risky = risk > 1
  candidates = risky | (state.lock > 0)
  route = _largest(jnp.where(candidates, risk, -1.0), config.max_active)
  lock = jnp.where(risky, config.lock_steps, jnp.maximum(state.lock - 1, 0))

  entered = state.entered + enters
  share = jnp.minimum(entered, config.memory_steps or jnp.iinfo(jnp.int32).max)
  mean = state.mean + (norms - state.mean) / jnp.maximum(share, 1)
  ratios = jnp.concatenate([ratio[None], state.ratios[:-1]])
  state = State(
    steps=state.steps + 1,
    entered=entered,
    mean=jnp.where(enters, mean, state.mean),
    ratios=jnp.where(enters, ratios, state.ratios),
    lock=jnp.where(route, lock, 0),
    risk=risk,
    candidates=jnp.sum(candidates, dtype=jnp.int32),
    route=route,
  )
  return state, route


def _largest(values: Float[Array, 'L'], number: int) -> Bool[Array, 'L']:
  """Which are among the `number` largest and not negative; of equal ones the first."""
  top, index = lax.top_k(values, min(number, len(values)))
  return jnp.zeros(values.shape, bool).at[index].set(top >= 0)


def block_norms(layers: Any) -> Float32[Array, 'L']:
  """‖gradient‖₂ of each block, from a tree of leaves [L, …].

  Of global arrays: on a mesh the compiler adds the squares of all shards.
  """
  squares = (
    jnp.sum(jnp.square(x.astype(jnp.float32)), axis=range(1, x.ndim))
    for x in jax.tree.leaves(layers)
  )
  return jnp.sqrt(sum(squares))


def check(config: GnmrConfig, model: ModelConfig | None) -> None:
  """Raises InvalidSetting unless the model has another path than its low one."""
  recovers = model is not None and model.matmuls != model.recovery
  want = (
    '0 for a model whose ModelConfig.matmuls and ModelConfig.recovery are equal; '
    'set matmuls.kind, such as block_fp8, or recovery.kind'
  )
  require(config, recovers or not config.max_active, 'max_active', want)


def controller(config: GnmrConfig) -> optax.GradientTransformation:
  """The controller as an optax transformation, which returns gradients unchanged.

  It looks at the leaves of 'layers' and is first in a chain, before clipping. Its State
  is part of the optimizer's, and so of checkpoints.
  """

  def init_fn(params):
    return init(config, len(jax.tree.leaves(params['layers'])[0]))

  def update_fn(grads, state, params=None):
    del params
    return grads, update(config, state, block_norms(grads['layers']))[0]

  return optax.GradientTransformation(init_fn, update_fn)


def find(opt_state: Any) -> State | None:
  """The controller's State in an optimizer's; None without a controller."""
  is_state = lambda x: isinstance(x, State)  # noqa: E731
  leaves = jax.tree.leaves(opt_state, is_leaf=is_state)
  return next(filter(is_state, leaves), None)


def with_route(variables: dict[str, Any], opt_state: Any) -> dict[str, Any]:
  """The model's variables, with the controller's route if there is one."""
  state = find(opt_state)
  return variables if state is None else {**variables, 'route': state.route}


def metrics(opt_state: Any) -> dict[str, jax.Array]:
  """What a step's norms decided for the next step; none without a controller."""
  state = find(opt_state)
  if state is None:
    return {}
  promoted = jnp.sum(state.route)
  return {
    'gnmr/promoted': promoted / len(state.route),
    'gnmr/cap_hit': jnp.asarray(state.candidates > promoted, jnp.float32),
    'gnmr/max_risk': jnp.max(state.risk),
  }
