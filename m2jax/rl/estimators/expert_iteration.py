"""Expert iteration: imitate the policy's own verified successes.

ReST-EM (arXiv:2312.06585) in the RL loop: the alternative to CISPO that uses no
baseline, no ratio and no failures. Successes are trained by maximum likelihood: the
policy gradient with advantage 1; failures are discarded. It takes the same rollouts
through the same loop, so that the two differ only in the update.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from m2jax.rl import rewards
from m2jax.rl.estimators import policy_gradient


@dataclasses.dataclass(frozen=True)
class Config(policy_gradient.Config):
  """Expert iteration.

  Attributes:
    threshold: minimum success of a trajectory that is imitated.
  """

  kind: str = 'expert_iteration'
  threshold: float = 1.0

  def credit(self, group: rewards.GroupCredit) -> rewards.GroupCredit:
    """The group with advantage 1 for successes and no completions for failures."""
    credits_ = []
    for c in group.credits:
      if c.masked or c.trajectory.success >= self.threshold:
        c = dataclasses.replace(c, advantages=np.ones(len(c.completions)))
      else:
        c = dataclasses.replace(c, completions=(), advantages=np.zeros(0))
      credits_.append(c)
    if group.dropped == 'masked':
      return group
    dropped = '' if any(c.completions for c in credits_) else 'zero_advantage'
    return rewards.GroupCredit(tuple(credits_), dropped)
