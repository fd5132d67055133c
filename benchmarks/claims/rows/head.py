"""The head in float32 against bfloat16, in an engine of bfloat16, by the weights' age.

The learner computes in float32. `float32 engine` has no other precision than the
learner: a bound.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.rows.estimators import AGES, TASK
from benchmarks.claims.training import Arm, Sampler, Trainer

HALF = 'bfloat16'
ARMS = {
  'float32 head': Sampler(HALF),
  'bfloat16 head': Sampler(HALF, head=HALF),
  'float32 engine': Sampler(),
}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  return trainer.run(Arm(TASK, age=AGES[condition], sampler=ARMS[arm]), rate, seed)


CLAIM = Claim(
  name='head',
  question='With an engine of bfloat16, a head in float32 learns more than one in '
  'bfloat16.',
  conditions=tuple(AGES),
  arms=tuple(ARMS),
  subject='float32 head',
  bounds=('float32 engine',),
  measure=measure,
  columns={'lowest': 'lowest', 'mismatch': 'mismatch, millinats', 'lag': 'lag'},
  at_scale='`configs/forge.py` with `--config.model.dtype=bfloat16`; only this row has '
  'a head in bfloat16.',
)
