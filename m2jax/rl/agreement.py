"""How far the learner and the engine that sampled disagree about the same weights.

Both compute the log-probability of each sampled token, by different programs: rows of
merged trees here, pages and single steps there. For responses sampled entirely by the
weights in training the difference should be rounding only; more is an error or a
difference of precision, which then enters the importance ratios
(docs/facts/rl-systems.md §5). Tokens that these weights sampled after older ones differ
for a good reason, since they attended to the older weights' keys and values: several
nats are usual. Tokens of older weights differ too; `cispo.metrics` has those. If expert
ids are replayed, the share of tokens for which the learner's router would choose others
is measured too.

Axes: B rows, M loss terms of a row.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from m2jax import forest

BOUND = 1e-4  # nats, of responses of one version, in float32; 0 if invariant

# Keys of a train step's metrics that `finish` turns into those of a record.
_COUNT, _SUM, _MAX = 'agreement/count', 'agreement/sum', 'agreement/mismatch_max'
_MIXED, _MIXED_MAX = 'agreement/mixed', 'agreement/mixed_max'
_REPLAYED, _REROUTED = 'replayed', 'rerouted'


class Disagreement(RuntimeError):
  """Learner and engine disagree about the same weights by more than rounding."""


def measure(logprob: jax.Array, batch: forest.Forest) -> dict[str, jax.Array]:
  """Sums over the terms [B, M] that these weights have sampled, and the maxima."""
  lag, live = jnp.asarray(batch.lag), jnp.asarray(batch.weight) != 0
  gap = jnp.abs(jax.lax.stop_gradient(logprob) - batch.old_logprob)
  here, mixed = (live & (lag == kind) for kind in (0, forest.OLDER_KEYS))
  return {
    _COUNT: jnp.sum(here, dtype=jnp.float32),
    _SUM: jnp.sum(jnp.where(here, gap, 0)),
    _MAX: jnp.max(jnp.where(here, gap, 0), initial=0.0),
    _MIXED: jnp.sum(mixed, dtype=jnp.float32),
    _MIXED_MAX: jnp.max(jnp.where(mixed, gap, 0), initial=0.0),
  }


def finish(sums: Mapping[str, float]) -> dict[str, float]:
  """The scalars of a metrics record, of the sums over an update.

  mismatch/tokens and mismatch/mixed_tokens, and if there are any mismatch/max and
  mismatch/mean, and mismatch/mixed_max; with a replay also replay/rerouted.
  """
  count = sums[_COUNT]
  out = {'mismatch/tokens': count, 'mismatch/mixed_tokens': sums[_MIXED]}
  if count:
    out |= {'mismatch/max': sums[_MAX], 'mismatch/mean': sums[_SUM] / count}
  if sums[_MIXED]:
    out['mismatch/mixed_max'] = sums[_MIXED_MAX]
  if sums.get(_REPLAYED):
    out['replay/rerouted'] = sums[_REROUTED] / sums[_REPLAYED]
  return out


def excess(metrics: Mapping[str, float], invariant: bool = False) -> str:
  """How an update exceeds BOUND, which float32 keeps to; '' if it does not.

  The criterion is the largest difference if all expert ids are replayed. Otherwise
  near-ties of the router may choose other experts, in one token of thousands, and the
  mean is the criterion. Responses of several versions that share a prompt share its
  replayed ids, which then come from other weights: nothing is judged.

  With invariant numerics there are no near-ties, and the largest difference is to be 0.

  Args:
    metrics: the metrics of `finish`, and replay/disagreement with a replay.
    invariant: whether the model's numerics are.
  """
  differing = metrics.get('replay/disagreement')
  of_mean = differing is None and not invariant
  name = 'mismatch/mean' if of_mean else 'mismatch/max'
  value, bound = metrics.get(name, 0.0), 0.0 if invariant else BOUND
  if differing or not value > bound:  # nan is an update that is not finite
    return ''
  return (
    f'{name} is {value:.2g} nats, above {bound:g}: engine and learner compute other '
    'log-probabilities with the same weights'
  )


def without_sums(metrics: Mapping[str, float]) -> dict[str, float]:
  """The metrics that `finish` does not turn into others."""
  used = (_COUNT, _SUM, _MAX, _MIXED, _MIXED_MAX, _REPLAYED, _REROUTED)
  return {name: value for name, value in metrics.items() if name not in used}
