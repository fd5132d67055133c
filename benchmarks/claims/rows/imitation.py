"""Advantages against imitation of successes, with binary and with graded rewards.

Expert iteration imitates episodes in which all places are right; with a lower threshold
those in which half of them are, which a binary verdict cannot say.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import Forks
from benchmarks.claims.training import Arm, Trainer

HABITS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
CONDITIONS = {
  'binary': Forks(HABITS),
  'graded': Forks(HABITS, graded=True),
}
ARMS = {
  'cispo': ('cispo', ()),
  'imitation': ('expert_iteration', ()),
  'imitation, half right': ('expert_iteration', (('threshold', 0.5),)),
}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  estimator, parameters = ARMS[arm]
  return trainer.run(Arm(CONDITIONS[condition], estimator, parameters), rate, seed)


CLAIM = Claim(
  name='imitation',
  question='Advantages learn more than imitation of successes does.',
  conditions=tuple(CONDITIONS),
  arms=tuple(ARMS),
  subject='cispo',
  measure=measure,
  at_scale='`configs/forge.py:expert_iteration` beside `configs/forge.py`, and '
  '`python -m benchmarks.forge_table`.',
)
