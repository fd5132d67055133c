"""Expert iteration: imitate the policy's own verified successes.

ReST-EM (arXiv:2312.06585) in the RL loop: the alternative to CISPO that uses no
baseline, no ratio and no failures. Successes are trained by maximum likelihood;
failures are discarded. It takes the same rollouts through the same loop, so that the
two differ only in the update.

Axes: B rows, M loss terms of a row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from m2jax import forest
from m2jax.rl import agreement, rewards


def credit(group: rewards.GroupCredit, threshold: float = 1.0) -> rewards.GroupCredit:
  """The group with advantage 1 for successes and no completions for failures.

  Args:
    group: from `rewards.advantages`.
    threshold: minimum success of a trajectory that is imitated.
  """
  credits_ = []
  for c in group.credits:
    if c.masked or c.trajectory.success >= threshold:
      c = dataclasses.replace(c, advantages=np.ones(len(c.completions)))
    else:
      c = dataclasses.replace(c, completions=(), advantages=np.zeros(0))
    credits_.append(c)
  if group.dropped == 'masked':
    return group
  dropped = '' if any(c.completions for c in credits_) else 'zero_advantage'
  return rewards.GroupCredit(tuple(credits_), dropped)


def objective(
  logprob: jax.Array, batch: forest.Forest
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Weighted negative log-likelihood of the terms [B, M], and `agreement`'s sums."""
  loss = -jnp.sum(batch.weight * batch.advantage * logprob)
  return loss, agreement.measure(logprob, batch)
