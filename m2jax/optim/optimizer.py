"""From an OptimizerConfig to an optax transformation, by kind of parameter.

AdamW with MiniMax's β and ε (facts/algorithms.md §3.3), or Muon for matrices and expert
matrices with Adam for embedding, head, norms, router and biases (§1.9).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from m2jax import params as params_lib
from m2jax.checks import require
from m2jax.optim import schedules
from m2jax.optim.muon import PRECONDITIONINGS, muon
from m2jax.params import Kind

NAMES = ('adamw', 'muon')


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """What updates the parameters.

  Attributes:
    name: 'adamw' or 'muon'.
    learning_rate: base rate of AdamW, or of Muon for its matrices.
    adam_learning_rate: base rate of what Muon leaves to Adam; None is `learning_rate`.
    schedule: multiplier of both rates by step.
    b1, b2, eps: Adam's; ε = 1e-15 since most gradients of RL lie below 1e-14.
    weight_decay: decoupled, times the learning rate; on `weight_decay_kinds` only.
    weight_decay_kinds: names of kinds that decay.
    clip_norm: gradients are scaled to at most this global norm; None is off.
    muon_kinds: kinds that Muon updates; each leaf's last two axes are a matrix.
    muon_beta, muon_nesterov, muon_eps, muon_ns_steps, muon_preconditioning: see
      `muon.muon`.
    muon_consistent_rms: None scales by sqrt(max(1, out/in)).
  """

  name: str = 'adamw'
  learning_rate: float = 1e-3
  adam_learning_rate: float | None = None
  schedule: schedules.ScheduleConfig = schedules.ScheduleConfig()
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-15
  weight_decay: float = 0.0
  weight_decay_kinds: tuple[str, ...] = ('matrix', 'expert', 'head', 'embedding')
  clip_norm: float | None = 1.0
  muon_kinds: tuple[str, ...] = ('matrix', 'expert')
  muon_beta: float = 0.95
  muon_nesterov: bool = True
  muon_eps: float = 1e-15
  muon_ns_steps: int = 5
  muon_preconditioning: str = 'frobenius'
  muon_consistent_rms: float | None = None

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.name in NAMES, 'name', f'one of {NAMES}')
    check(self.learning_rate >= 0, 'learning_rate', 'at least 0')
    adam = self.adam_learning_rate
    check(adam is None or adam >= 0, 'adam_learning_rate', 'at least 0')
    for field in ('b1', 'b2', 'muon_beta'):
      check(0 <= getattr(self, field) < 1, field, 'in [0, 1)')
    for field in ('eps', 'muon_eps', 'muon_ns_steps'):
      check(getattr(self, field) > 0, field, 'positive')
    ways = PRECONDITIONINGS
    check(self.muon_preconditioning in ways, 'muon_preconditioning', f'one of {ways}')
    check(self.weight_decay >= 0, 'weight_decay', 'at least 0')
    check(self.clip_norm is None or self.clip_norm > 0, 'clip_norm', 'positive')
    known = tuple(str(kind) for kind in Kind)
    matrices = tuple(k for k in known if k != Kind.NORM)
    check(
      set(self.weight_decay_kinds) <= set(known), 'weight_decay_kinds', f'among {known}'
    )
    check(set(self.muon_kinds) <= set(matrices), 'muon_kinds', f'among {matrices}')


def make(config: OptimizerConfig) -> optax.GradientTransformation:
  """The optimizer; `init` and `update` take trees that `params.kinds` knows.

  `update` needs `params` (weight decay). Gradients are clipped before anything else.

  Example:
    >>> tx = make(OptimizerConfig(name='muon', learning_rate=0.02))
    >>> params = {'q': jnp.ones((4, 8, 8)), 'final_norm': jnp.ones(8)}
    >>> updates, state = tx.update(params, tx.init(params), params)
  """
  multiplier = schedules.multiplier(config.schedule)
  rates = _base_rates(config)

  def decays(params):
    return jax.tree.map(
      lambda kind: kind in config.weight_decay_kinds, params_lib.kinds(params)
    )

  def group(name: str, direction: optax.GradientTransformation):
    return optax.chain(
      direction,
      optax.add_decayed_weights(config.weight_decay, mask=decays),
      optax.scale_by_learning_rate(lambda step: rates[name] * multiplier(step)),
    )

  tx = group('adam', optax.scale_by_adam(config.b1, config.b2, config.eps))
  if config.name == 'muon':
    direction = muon(
      beta=config.muon_beta,
      nesterov=config.muon_nesterov,
      eps=config.muon_eps,
      ns_steps=config.muon_ns_steps,
      preconditioning=config.muon_preconditioning,
      consistent_rms=config.muon_consistent_rms,
    )
    groups = {'muon': group('muon', direction), 'adam': tx}
    tx = optax.partition(groups, lambda params: assignment(config, params))
  clip = optax.identity()
  if config.clip_norm is not None:
    clip = optax.clip_by_global_norm(config.clip_norm)
  return optax.chain(clip, tx)


def assignment(config: OptimizerConfig, params: Any) -> Any:
  """The tree of `params` with 'muon' or 'adam' for each leaf: who updates it."""
  by_muon = config.muon_kinds if config.name == 'muon' else ()
  return jax.tree.map(
    lambda kind: 'muon' if kind in by_muon else 'adam', params_lib.kinds(params)
  )


def learning_rates(
  config: OptimizerConfig, step: jax.typing.ArrayLike
) -> dict[str, jax.Array]:
  """Rates of update `step` by group ('adam', 'muon'), for the log."""
  scale = schedules.multiplier(config.schedule)(step)
  return {name: rate * scale for name, rate in _base_rates(config).items()}


def norms(name: str, tree: Any) -> dict[str, jax.Array]:
  """Global L2 norm of gradients, updates or parameters, whole and by kind, float32.

  Args:
    name: 'grad_norm', say; the norm of a kind is under 'grad_norm/expert'.
    tree: a tree of parameters' structure and names.
  """
  squares: dict[Kind, jax.Array] = {}
  leaves = zip(
    jax.tree.leaves(params_lib.kinds(tree)), jax.tree.leaves(tree), strict=True
  )
  for kind, leaf in leaves:
    square = jnp.sum(jnp.square(leaf.astype(jnp.float32)))
    squares[kind] = squares.get(kind, jnp.float32(0)) + square
  by_kind = {f'{name}/{kind}': jnp.sqrt(s) for kind, s in sorted(squares.items())}
  return {name: jnp.sqrt(sum(squares.values(), jnp.float32(0))), **by_kind}


def _base_rates(config: OptimizerConfig) -> dict[str, float]:
  if config.name == 'adamw':
    return {'adam': config.learning_rate}
  adam = config.adam_learning_rate
  adam = config.learning_rate if adam is None else adam
  return {'muon': config.learning_rate, 'adam': adam}
