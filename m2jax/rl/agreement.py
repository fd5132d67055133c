"""How far the learner and the engine that sampled disagree about the same weights.

Both compute the log-probability of each sampled token, by different programs: rows of
merged trees here, pages and single steps there. For tokens that were sampled by exactly
the weights that are trained the difference should only be rounding, and what is more is
an error or a difference of precision that importance ratios then carry
(docs/facts/rl-systems.md §5). Tokens of older weights differ for a good reason; they
are in `cispo.metrics`. If expert ids are replayed, the share of tokens for which the
learner's router would choose others is measured too.

Axes: B rows, M loss terms of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from m2jax import forest

# Keys of a train step's metrics that `finish` turns into those of a record.
_COUNT, _SUM, _MAX = 'agreement/count', 'agreement/sum', 'agreement/mismatch_max'
_REPLAYED, _REROUTED = 'replayed', 'rerouted'


def measure(logprob: jax.Array, batch: forest.Forest) -> dict[str, jax.Array]:
  """Sums over the terms [B, M] that these weights have sampled, and the maximum."""
  here = (jnp.asarray(batch.lag) == 0) & (jnp.asarray(batch.weight) != 0)
  gap = jnp.abs(jax.lax.stop_gradient(logprob) - batch.old_logprob)
  gap = jnp.where(here, gap, 0)
  return {
    _COUNT: jnp.sum(here, dtype=jnp.float32),
    _SUM: jnp.sum(gap),
    _MAX: jnp.max(gap, initial=0.0),
  }


def finish(sums: Mapping[str, float]) -> dict[str, float]:
  """The scalars of a metrics record, of the sums over an update.

  mismatch/tokens, and if there are any mismatch/max and mismatch/mean; with a replay
  also replay/rerouted.
  """
  count = sums[_COUNT]
  out = {'mismatch/tokens': count}
  if count:
    out |= {'mismatch/max': sums[_MAX], 'mismatch/mean': sums[_SUM] / count}
  if sums.get(_REPLAYED):
    out['replay/rerouted'] = sums[_REROUTED] / sums[_REPLAYED]
  return out


def without_sums(metrics: Mapping[str, float]) -> dict[str, float]:
  """The metrics that `finish` does not turn into others."""
  used = (_COUNT, _SUM, _MAX, _REPLAYED, _REROUTED)
  return {name: value for name, value in metrics.items() if name not in used}
