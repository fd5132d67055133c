"""The estimators of the policy gradient, by name: loss, bounds and normaliser.

  name              gradient of a term / (Â ∇ log π)         default normaliser
  cispo             sg(clip(r, w_min, w_max))                prompt
  grpo              r, or 0 outside of 1 ± ε                 trajectory
  dapo              r, or 0 outside of [1 − ε_low, 1 + ε_high]  token
  policy_gradient   1: exact on-policy only                  prompt
  expert_iteration  1, with Â = 1 for successes alone        prompt

r = π/π_old. `cispo` and `ppo_clip` have formulas and sources; `expert_iteration` has
its advantages. Dynamic sampling, DAPO's other half, is `rl.refill_factor` and applies
to all; DAPO's penalty of long responses is not implemented.

Axes: *M loss terms.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from m2jax.axes import Array, Float
from m2jax.checks import require
from m2jax.rl import cispo, ppo_clip, terms


@dataclasses.dataclass(frozen=True)
class Estimator:
  """An estimator with its parameters; those of the other kinds are ignored.

  Attributes:
    kind: its name.
    is_weight_max, is_weight_min: CISPO's absolute bounds of the importance weight.
    clip_low, clip_high: ε_low and ε_high of GRPO and DAPO.
    normaliser: how terms are averaged (`terms.weights`).
  """

  kind: str = 'cispo'
  is_weight_max: float = 5.0
  is_weight_min: float = 0.0
  clip_low: float = 0.2
  clip_high: float = 0.2
  normaliser: str = 'prompt'

  def __post_init__(self):
    check = functools.partial(require, self)
    check(self.kind in KINDS, 'kind', f'one of {KINDS}')
    check(self.is_weight_max >= 1, 'is_weight_max', 'at least 1, an absolute cap')
    check(0 <= self.is_weight_min <= 1, 'is_weight_min', 'in [0, 1]')
    check(0 <= self.clip_low <= 1, 'clip_low', 'in [0, 1]')
    check(self.clip_high >= 0, 'clip_high', 'at least 0')
    known = self.normaliser in terms.NORMALISERS
    check(known, 'normaliser', f'one of {terms.NORMALISERS}')

  @property
  def normalise(self) -> str:
    """The divisor of advantages in its paper (`rewards.RewardConfig.normalise`)."""
    return 'group' if self.kind in ('grpo', 'dapo') else 'none'

  @property
  def _functions(self) -> tuple[Callable, Callable]:
    """The kind's loss and metrics, with its bounds."""
    if self.kind == 'cispo':
      module: Any = cispo
      names = ('is_weight_max', 'is_weight_min')
    elif self.kind in ('grpo', 'dapo'):
      module, names = ppo_clip, ('clip_low', 'clip_high')
    else:
      return policy_gradient, lambda logp, old, _, w: terms.metrics(logp, old, w)
    of, bounds = functools.partial, {name: getattr(self, name) for name in names}
    return of(module.loss, **bounds), of(module.metrics, **bounds)

  def loss(
    self,
    logprob: Float[Array, '*M'],
    old_logprob: Float[Array, '*M'],
    advantage: Float[Array, '*M'],
    weight: Float[Array, '*M'],
  ) -> Float[Array, '*M']:
    """The loss of each term; see the kind's module."""
    return self._functions[0](logprob, old_logprob, advantage, weight)

  def metrics(
    self,
    logprob: Float[Array, '*M'],
    old_logprob: Float[Array, '*M'],
    advantage: Float[Array, '*M'],
    weight: Float[Array, '*M'],
  ) -> dict[str, jax.Array]:
    """Off-policy metrics (`terms.metrics`)."""
    return self._functions[1](logprob, old_logprob, advantage, weight)


def policy_gradient(
  logprob: Float[Array, '*M'],
  old_logprob: Float[Array, '*M'],
  advantage: Float[Array, '*M'],
  weight: Float[Array, '*M'],
) -> Float[Array, '*M']:
  """REINFORCE (Williams, 1992): −weight · Â · log π, without an importance weight."""
  del old_logprob
  logprob, advantage = terms.masked(weight, logprob, advantage)
  return -weight * advantage * logprob


_DEFAULTS: dict[str, dict[str, Any]] = {
  'cispo': dict(normaliser='prompt'),
  'grpo': dict(normaliser='trajectory', clip_low=0.2, clip_high=0.2),
  'dapo': dict(normaliser='token', clip_low=0.2, clip_high=0.28),
  'policy_gradient': dict(normaliser='prompt'),
  'expert_iteration': dict(normaliser='prompt'),
}
KINDS = tuple(_DEFAULTS)
CISPO = Estimator()


def make(kind: str, **parameters: float | str | None) -> Estimator:
  """The estimator of a kind; a field of None is the kind's default.

  Raises:
    ValueError: an unknown kind, or a parameter out of range.

  Example:
    >>> make('dapo', clip_low=0.1).clip_high
    0.28
  """
  given: dict[str, Any] = dict(_DEFAULTS.get(kind, {}))
  given |= {name: value for name, value in parameters.items() if value is not None}
  return Estimator(kind, **given)
