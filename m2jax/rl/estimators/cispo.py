"""CISPO: REINFORCE with a clipped, constant importance weight per token.

M1 eq. 4–5 in M2's form (facts/algorithms.md §3; facts/m2-and-forge.md §4.8):

  J = 1/Σ_i |o_i| · Σ_i Σ_t sg(clip(r_{i,t}, w_min, w_max)) · Â_{i,t} · log π(o_{i,t}),
  r = π / π_old, no KL term.

The clip bounds are absolute: w_max = 5 is the papers' ε_high = 4. Every other
implementation of CISPO defines them differently (facts/algorithms.md §3.2), so quote
the cap with every result. Σ|o_i| and the average over groups are part of `weight`
(`terms.weights`).

Axes: *M loss terms, in arrays of any shape; one is one sampled token of one sample.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float
from m2jax.rl import estimators
from m2jax.rl import terms as terms_lib


@dataclasses.dataclass(frozen=True)
class Config(estimators.EstimatorConfig):
  """CISPO.

  Attributes:
    is_weight_max, is_weight_min: absolute bounds of the importance weight; M2 has no
      lower one.
  """

  kind: str = 'cispo'
  is_weight_max: float = 5.0
  is_weight_min: float = 0.0

  def __post_init__(self):
    super().__post_init__()
    _check_bounds(*self._bounds)

  @property
  def _bounds(self) -> tuple[float, float]:
    return self.is_weight_max, self.is_weight_min

  def loss(self, terms: terms_lib.Terms) -> Float[Array, '*M']:
    most, least = self._bounds
    return loss(*terms.of_tokens, is_weight_max=most, is_weight_min=least)

  def metrics(self, terms: terms_lib.Terms) -> dict[str, Array]:
    most, least = self._bounds
    return metrics(*terms.of_tokens, is_weight_max=most, is_weight_min=least)


def loss(
  logprob: Float[Array, '*M'],
  old_logprob: Float[Array, '*M'],
  advantage: Float[Array, '*M'],
  weight: Float[Array, '*M'],
  *,
  is_weight_max: float = 5.0,
  is_weight_min: float = 0.0,
) -> Float[Array, '*M']:
  """CISPO loss of each term, −weight · sg(clip(r)) · Â · log π; minimise the sum.

  Args:
    logprob: log π of each term's token, differentiable.
    old_logprob: the log-probability it was sampled with.
    advantage: Â of the completion that the term belongs to.
    weight: the result of `terms.weights`; 0 on padding, whose other values may be
      anything.
    is_weight_max: absolute cap of the importance weight; at least 1.
    is_weight_min: its lower bound, in [0, 1]. The default has no effect.

  Returns:
    In logprob's dtype, at least float32. The gradient of a term is −weight · clip(r) ·
    Â · ∇ log π.

  Raises:
    ValueError: a bound is out of range; below 1 even on-policy terms would be scaled.

  Example:
    >>> one = jnp.ones(1)
    >>> loss(-one, -one, 2 * one, one)
    Array([2.], dtype=float32)
  """
  _check_bounds(is_weight_max, is_weight_min)
  logprob, old_logprob, advantage = terms_lib.masked(
    weight, logprob, old_logprob, advantage
  )
  ratio = jnp.exp(jax.lax.stop_gradient(logprob) - old_logprob)
  ratio = jnp.clip(ratio, is_weight_min, is_weight_max)
  return -weight * ratio * advantage * logprob


def metrics(
  logprob: Float[Array, '*M'],
  old_logprob: Float[Array, '*M'],
  advantage: Float[Array, '*M'],
  weight: Float[Array, '*M'],
  *,
  is_weight_max: float = 5.0,
  is_weight_min: float = 0.0,
) -> dict[str, Float[Array, '']]:
  """`terms.metrics`; clipped terms are those whose importance weight changes."""
  _check_bounds(is_weight_max, is_weight_min)
  del advantage
  used = lambda ratio: jnp.clip(ratio, is_weight_min, is_weight_max)
  return terms_lib.metrics(logprob, old_logprob, weight, used)


def _check_bounds(is_weight_max: float, is_weight_min: float) -> None:
  if not is_weight_max >= 1:
    raise ValueError(
      f'is_weight_max={is_weight_max}: must be at least 1. It is the absolute cap of '
      'the importance weight: for ε_high = 4 pass 5.0'
    )
  if not 0 <= is_weight_min <= 1:
    raise ValueError(f'is_weight_min={is_weight_min}: must be in [0, 1]')
