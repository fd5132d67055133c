"""CISPO: REINFORCE with a clipped, constant importance weight per token.

M1 eq. 4–5 in M2's form (facts/algorithms.md §3; facts/m2-and-forge.md §4.8):

  J = 1/Σ_i |o_i| · Σ_i Σ_t sg(clip(r_{i,t}, w_min, w_max)) · Â_{i,t} · log π(o_{i,t}),
  r = π / π_old, no KL term.

The clip bounds are absolute: w_max = 5 is the papers' ε_high = 4. Every other
implementation of CISPO defines them differently (facts/algorithms.md §3.2), so quote
the cap with every result. Σ|o_i| and the average over groups are part of `weight`,
which `weights` computes once for the whole batch: sums over rows and micro-batches then
give the same loss for every split. A weight of 0 is padding.

Axes: *M loss terms, in arrays of any shape; one is one sampled token of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from m2jax.axes import Array, Float

NORMALISERS = ('prompt', 'token')


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
    weight: from `weights`; 0 on padding, whose other values may be anything.
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
  logprob, old_logprob, advantage = _masked(logprob, old_logprob, advantage, weight)
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
  """How far off-policy the terms are. Arguments as `loss`.

  Every value is a sum over terms times `weight`. Weights of a batch sum to 1, so values
  of micro-batches add up to the batch's.

  Returns:
    ratio: mean importance weight before the clip; 1 on-policy.
    clip_fraction: share of terms that the clip changes.
    clipped_mass: mean of ratio − clip(ratio): importance weight removed by the cap.
    approx_kl: mean of r − 1 − log r: estimate of KL(π_old ‖ π), never negative.
    abs_log_ratio: mean |log r|, the train-inference mismatch when on-policy.
    old_logprob: mean; minus the sampler's cross-entropy.
  """
  _check_bounds(is_weight_max, is_weight_min)
  logprob, old_logprob, _ = _masked(logprob, old_logprob, advantage, weight)
  # Bounded so that one outlier does not make a curve unreadable.
  log_ratio = jnp.clip(logprob - old_logprob, -20.0, 20.0)
  ratio = jnp.exp(log_ratio)
  cut = ratio - jnp.clip(ratio, is_weight_min, is_weight_max)
  values = dict(
    ratio=ratio,
    clip_fraction=(cut != 0).astype(ratio.dtype),
    clipped_mass=cut,
    approx_kl=ratio - 1 - log_ratio,
    abs_log_ratio=jnp.abs(log_ratio),
    old_logprob=old_logprob,
  )
  return {k: jax.lax.stop_gradient(jnp.sum(weight * v)) for k, v in values.items()}


def weights(
  group_lengths: Sequence[Sequence[int]], normaliser: str = 'prompt'
) -> list[Float[np.ndarray, '_completions']]:
  """The weight of every term of each completion: M1's normaliser.

  Pass trained groups only: masked and dropped samples are outside the normaliser. All
  terms of the batch count, in whatever row, so the loss does not depend on rows.

  Args:
    group_lengths: for each group the number of terms |o| of each of its completions.
    normaliser: 'prompt' divides by the group's own Σ|o| and averages over the groups
      that have terms, so that prompts have equal weight; 'token' divides by Σ|o| of the
      batch, so that tokens have equal weight.

  Returns:
    For each group a float64 array with one weight per completion, for each of its
    terms. Σ weight · |o| over everything is 1.

  Raises:
    ValueError: unknown normaliser.
  """
  if normaliser not in NORMALISERS:
    raise ValueError(f'normaliser={normaliser!r}: must be one of {NORMALISERS}')
  totals = np.array([sum(lengths) for lengths in group_lengths], np.float64)
  if normaliser == 'token':
    divisors = np.full(len(totals), totals.sum())
  else:
    divisors = totals * np.count_nonzero(totals)
  return [
    np.full(len(lengths), 1.0 / divisor if divisor else 0.0)
    for lengths, divisor in zip(group_lengths, divisors, strict=True)
  ]


def _masked(logprob, old_logprob, advantage, weight):
  """The inputs in at least float32, with neutral values where the weight is 0."""
  dtype = jnp.promote_types(logprob.dtype, jnp.float32)
  # Masked before any arithmetic: 0 · inf is NaN, in values and gradients.
  return (
    jnp.where(weight != 0, x, 0).astype(dtype)
    for x in (logprob, old_logprob, advantage)
  )


def _check_bounds(is_weight_max: float, is_weight_min: float) -> None:
  if not is_weight_max >= 1:
    raise ValueError(
      f'is_weight_max={is_weight_max}: must be at least 1. It is the absolute cap of '
      'the importance weight: for ε_high = 4 pass 5.0'
    )
  if not 0 <= is_weight_min <= 1:
    raise ValueError(f'is_weight_min={is_weight_min}: must be in [0, 1]')
