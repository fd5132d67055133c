"""CISPO's weight and cap against other estimators, by the age of the weights."""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import Forks
from benchmarks.claims.training import Arm, Trainer

AGES = {f'age {age}': age for age in (0, 5, 20)}
# Each with the scale of advantages of its paper: CISPO M2's G − B.
ARMS = ('cispo', 'grpo', 'dapo', 'gspo', 'policy_gradient', 'expert_iteration')
TASK = Forks(habits=(0.1, 0.5, 0.7))


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  return trainer.run(Arm(TASK, arm, age=AGES[condition]), rate, seed)


CLAIM = Claim(
  name='estimators',
  question='CISPO uses data of old weights better than its rivals do.',
  conditions=tuple(AGES),
  arms=ARMS,
  subject='cispo',
  measure=measure,
  at_scale='`configs/forge.py` with `--config.rl.learner.estimator.kind=NAME`, and a '
  '`--config.rl.capacity` of several updates.',
)
