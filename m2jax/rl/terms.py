"""What all estimators do with loss terms: weights, masking, off-policy metrics.

A loss is a sum over terms (docs/design.md, law 2). The normaliser of the paper is part
of each term's `weight`, which `weights` computes once for the whole batch: sums over
rows and micro-batches then give the same loss for every split. A weight of 0 is
padding.

Axes: *M loss terms, in arrays of any shape; one is one sampled token of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from m2jax.axes import Array, Float
from m2jax.forest import Forest

NORMALISERS = ('prompt', 'token', 'trajectory')
KL_ESTIMATES = ('k3', 'k2')
_LARGEST_LOG_RATIO = 20.0
# Metrics of tokens, whatever a ratio is.
OF_TOKENS = ('approx_kl', 'abs_log_ratio', 'old_logprob')


class OfSequence(NamedTuple):
  """Sums over the sequence that each term belongs to, from before the gradient pass.

  Attributes:
    log_ratio: Σ log π/π_old over the terms of the sequence, without a gradient.
    length: their number.
  """

  log_ratio: Float[Array, '*M']
  length: Float[Array, '*M']

  @property
  def mean(self) -> Float[Array, '*M']:
    """The mean log-ratio; 0 on padding."""
    return self.log_ratio / jnp.maximum(self.length, 1)


class Terms(NamedTuple):
  """What an estimator is given of loss terms; None is what it does not need.

  Attributes:
    logprob: log π of each term's token, differentiable.
    old_logprob: the log-probability it was sampled with.
    advantage: Â of the completion that the term belongs to.
    weight: the result of `weights`; 0 on padding.
    entropy: that of π where the token was drawn; differentiable.
    reference_logprob: its log-probability under the weights that RL starts from.
    completion, trajectory: sums over the sequence that the term belongs to.
  """

  logprob: Float[Array, '*M']
  old_logprob: Float[Array, '*M']
  advantage: Float[Array, '*M']
  weight: Float[Array, '*M']
  entropy: Float[Array, '*M'] | None = None
  reference_logprob: Float[Array, '*M'] | None = None
  completion: OfSequence | None = None
  trajectory: OfSequence | None = None

  @property
  def of_tokens(self) -> tuple[jax.Array, ...]:
    """logprob, old_logprob, advantage and weight."""
    return self[:4]


def of(logprob: jax.Array, batch: Forest, entropy: jax.Array | None = None) -> Terms:
  """The terms of a batch, with all that it has."""

  def sequence(sums):  # [B, M, 2]
    return None if sums is None else OfSequence(sums[..., 0], sums[..., 1])

  return Terms(
    *(logprob, batch.old_logprob, batch.advantage, batch.weight, entropy),
    reference_logprob=batch.reference_logprob,
    completion=sequence(batch.completion),
    trajectory=sequence(batch.trajectory),
  )


def weights(
  group_lengths: Sequence[Sequence[int]], normaliser: str
) -> list[Float[np.ndarray, '_trajectories']]:
  """The weight of every term of each trajectory.

  Pass trained groups only: masked and dropped samples are outside the normaliser. All
  terms of the batch count, in whatever row, so the loss does not depend on rows.

  Args:
    group_lengths: for each group the number of terms |o| of each of its trajectories,
      over all of their completions.
    normaliser: 'prompt' divides by the group's own Σ|o| and averages over the groups
      that have terms, so that prompts have equal weight (M1); 'token' divides by Σ|o|
      of the batch, so that tokens have equal weight (DAPO's implementations);
      'trajectory' averages over the terms of each trajectory, then over the
      trajectories of a group that have terms, then over groups (GRPO).

  Returns:
    For each group a float64 array with one weight per trajectory, for each of its
    terms. Σ weight · |o| over everything is 1.

  Raises:
    ValueError: unknown normaliser.

  Example:
    >>> weights([[1, 3], [4]], 'trajectory')
    [array([0.25      , 0.08333333]), array([0.125])]
  """
  if normaliser not in NORMALISERS:
    raise ValueError(f'normaliser={normaliser!r}: must be one of {NORMALISERS}')
  lengths = [np.asarray(group, np.float64) for group in group_lengths]
  totals = np.array([group.sum() for group in lengths])
  groups = np.count_nonzero(totals)
  if normaliser == 'token':
    divisors = [np.full(len(group), totals.sum()) for group in lengths]
  elif normaliser == 'prompt':
    divisors = [np.full(len(group), groups * group.sum()) for group in lengths]
  else:
    divisors = [groups * np.count_nonzero(group) * group for group in lengths]
  return [np.divide(1.0, d, out=np.zeros_like(d), where=d > 0) for d in divisors]


def masked(
  weight: Float[Array, '*M'], *values: Float[Array, '*M']
) -> Iterator[Float[Array, '*M']]:
  """The values in at least float32, and 0 where the weight is 0."""
  dtype = jnp.promote_types(values[0].dtype, jnp.float32)
  # Masked before any arithmetic: 0 · inf is NaN, in values and gradients.
  return (jnp.where(weight != 0, x, 0).astype(dtype) for x in values)


def log_ratio(
  logprob: Float[Array, '*M'], old_logprob: Float[Array, '*M']
) -> Float[Array, '*M']:
  """log π/π_old, clipped to ±20: its exponential is finite, a clipped one constant."""
  return jnp.clip(logprob - old_logprob, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)


def reference_kl(terms: Terms, estimate: str) -> Float[Array, '*M']:
  """Penalty of each term for leaving the reference policy, times its weight.

  With d = log π_ref − log π of the sampled token, both are means over samples of π that
  are 0 where the policies agree and positive elsewhere (Schulman's k3 and k2):

    k3  e^d − d − 1, GRPO's (arXiv:2402.03300, eq. 4): unbiased for KL(π ‖ π_ref). Its
        gradient is (1 − e^d) ∇ log π, in the mean over π that of KL(π_ref ‖ π).
    k2  d²/2: biased. Its gradient is −d ∇ log π, in the mean that of KL(π ‖ π_ref).

  The importance ratio is left out, as in GRPO. |d| is clipped to 20, beyond which there
  is no gradient.
  """
  logprob, reference = masked(terms.weight, terms.logprob, terms.reference_logprob)
  d = log_ratio(reference, logprob)
  return terms.weight * (jnp.expm1(d) - d if estimate == 'k3' else d**2 / 2)


def metrics(
  logprob: Float[Array, '*M'],
  old_logprob: Float[Array, '*M'],
  weight: Float[Array, '*M'],
  used: Callable[[jax.Array], jax.Array] = lambda ratio: ratio,
) -> dict[str, Float[Array, '']]:
  """How far off-policy the terms are.

  Every value is a sum over terms times `weight`. Weights of a batch sum to 1, so values
  of micro-batches add up to the batch's.

  Args:
    logprob, old_logprob, weight: as for a loss.
    used: ratios -> the factor that an estimator leaves of each in the gradient.

  Returns:
    ratio: mean importance weight before the clip; 1 on-policy.
    clip_fraction: share of terms that the clip changes.
    clipped_mass: mean of ratio − used(ratio): importance weight removed by the clip.
    approx_kl: mean of r − 1 − log r: estimate of KL(π_old ‖ π), never negative.
    abs_log_ratio: mean |log r|, the train-inference mismatch when on-policy.
    old_logprob: mean; minus the sampler's cross-entropy.
  """
  logprob, old_logprob = masked(weight, logprob, old_logprob)
  log_ratios = log_ratio(logprob, old_logprob)
  ratio = jnp.exp(log_ratios)
  cut = ratio - used(ratio)
  values = dict(
    ratio=ratio,
    clip_fraction=(cut != 0).astype(ratio.dtype),
    clipped_mass=cut,
    approx_kl=ratio - 1 - log_ratios,
    abs_log_ratio=jnp.abs(log_ratios),
    old_logprob=old_logprob,
  )
  return {k: jax.lax.stop_gradient(jnp.sum(weight * v)) for k, v in values.items()}
