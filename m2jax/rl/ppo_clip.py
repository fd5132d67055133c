"""PPO's clipped surrogate per token, as GRPO and DAPO use it.

DAPO's objective (arXiv:2503.14476), whose bounds are decoupled:

  J = 1/Σ_i |o_i| · Σ_i Σ_t min(r Â, clip(r, 1 − ε_low, 1 + ε_high) Â),
  r = π / π_old;  ε_low = 0.2, ε_high = 0.28.

GRPO's (arXiv:2402.03300) has ε_low = ε_high and 1/G Σ_i 1/|o_i| Σ_t in place of
1/Σ|o_i|. Its KL term is left out, as in DAPO and M1. The averages are part of `weight`
(`terms.weights`): 'trajectory' for GRPO, 'token' for DAPO.

Unlike CISPO's, a clipped term has no gradient: it is clipped if Â > 0 and
r > 1 + ε_high, or if Â < 0 and r < 1 − ε_low. For Â < 0 there is no upper bound.

Axes: *M loss terms, in arrays of any shape; one is one sampled token of one sample.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from m2jax.axes import Array, Float
from m2jax.rl import estimators
from m2jax.rl import terms as terms_lib


@dataclasses.dataclass(frozen=True)
class Config(estimators.EstimatorConfig):
  """An estimator with this surrogate.

  Attributes:
    clip_low, clip_high: ε_low and ε_high.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2

  def __post_init__(self):
    super().__post_init__()
    _check_bounds(self.clip_low, self.clip_high)

  def loss(self, terms: terms_lib.Terms) -> Float[Array, '*M']:
    bounds = dict(clip_low=self.clip_low, clip_high=self.clip_high)
    return loss(*terms.of_tokens, **bounds)

  def metrics(self, terms: terms_lib.Terms) -> dict[str, Float[Array, '']]:
    bounds = dict(clip_low=self.clip_low, clip_high=self.clip_high)
    return metrics(*terms.of_tokens, **bounds)


def loss(
  logprob: Float[Array, '*M'],
  old_logprob: Float[Array, '*M'],
  advantage: Float[Array, '*M'],
  weight: Float[Array, '*M'],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> Float[Array, '*M']:
  """Clipped surrogate of each term, −weight · min(r Â, clip(r) Â); minimise the sum.

  Args:
    logprob: log π of each term's token, differentiable.
    old_logprob: the log-probability it was sampled with.
    advantage: Â of the completion that the term belongs to.
    weight: the result of `terms.weights`; 0 on padding, whose other values may be
      anything.
    clip_low: ε_low, in [0, 1].
    clip_high: ε_high, at least 0.

  Returns:
    In logprob's dtype, at least float32. The gradient of a term is −weight · r · Â ·
    ∇ log π, or 0 if it is clipped.

  Raises:
    ValueError: a bound is out of range.

  Example:
    >>> one = jnp.ones(1)
    >>> loss(-one, -2 * one, 2 * one, one)  # r = e, clipped to 1.2
    Array([-2.4], dtype=float32)
  """
  _check_bounds(clip_low, clip_high)
  logprob, old_logprob, advantage = terms_lib.masked(
    weight, logprob, old_logprob, advantage
  )
  ratio = jnp.exp(terms_lib.log_ratio(logprob, old_logprob))
  clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return -weight * jnp.minimum(ratio * advantage, clipped * advantage)


def metrics(
  logprob: Float[Array, '*M'],
  old_logprob: Float[Array, '*M'],
  advantage: Float[Array, '*M'],
  weight: Float[Array, '*M'],
  *,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
) -> dict[str, Float[Array, '']]:
  """`terms.metrics`; clipped terms are those without a gradient."""
  _check_bounds(clip_low, clip_high)
  (advantage,) = terms_lib.masked(weight, advantage)

  def used(ratio):
    above = (advantage > 0) & (ratio > 1 + clip_high)
    below = (advantage < 0) & (ratio < 1 - clip_low)
    return jnp.where(above | below, 0, ratio)

  return terms_lib.metrics(logprob, old_logprob, weight, used)


def _check_bounds(clip_low: float, clip_high: float) -> None:
  if not 0 <= clip_low <= 1:
    raise ValueError(
      f'clip_low={clip_low}: must be in [0, 1]; it is 1 − the least ratio'
    )
  if not clip_high >= 0:
    raise ValueError(
      f'clip_high={clip_high}: must be at least 0; it is the largest ratio − 1'
    )
