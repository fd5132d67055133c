"""Expert iteration: imitate the policy's own verified successes.

ReST-EM (arXiv:2312.06585) in the RL loop: the alternative to CISPO that uses no
baseline, no ratio and no failures. Successes are trained by maximum likelihood: the
policy gradient (`estimators`) with advantage 1; failures are discarded. It takes the
same rollouts through the same loop, so that the two differ only in the update.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from m2jax.rl import rewards


def credit(group: rewards.GroupCredit, threshold: float = 1.0) -> rewards.GroupCredit:
  """The group with advantage 1 for successes and no completions for failures.

  Args:
    group: a result of `rewards.advantages`.
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
