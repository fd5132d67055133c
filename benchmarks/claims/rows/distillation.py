"""Two teachers into one student: on-policy distillation, SFT on their samples, RL.

The teachers are trained on demonstrations of one domain each, which are nearly always
right; the student, before, on those of both, which are not. `SFT on samples` imitates
the teacher of the prompt's domain, right or wrong; its curve is the teachers' success.
"""

from __future__ import annotations

import dataclasses

from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import Domains
from benchmarks.claims.training import Arm, Sizes, Trainer
from m2jax.rl.distillation import DistillationConfig

STUDENT = Domains(habits=(0.2, 0.5, 0.7), number=2)
EACH = tuple(Domains(STUDENT.habits, number=2, only=d) for d in range(2))
TEACHERS = tuple(
  (str(d), Domains(habits=(0.95,) * 3, number=2, only=d)) for d in range(2)
)
NAMES = {domain: 'of this row' for domain, _ in TEACHERS}


def _arm(estimator: str = 'cispo', **how) -> Arm:
  taught = DistillationConfig(teachers=NAMES, **how) if how else DistillationConfig()
  return Arm(
    *(STUDENT, estimator), teachers=TEACHERS, evaluated=EACH, distillation=taught
  )


ARMS = {
  'sampled tokens': _arm(reward_weight=0.0),
  'top K': _arm(reward_weight=0.0, form='top_k', top_k=8),
  'sampled tokens and reward': _arm(weight=0.1),
  'reward': _arm(),
  'SFT on samples': dataclasses.replace(_arm('expert_iteration'), imitates=True),
}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  return (run := trainer.run(ARMS[arm], rate, seed)) | {'worst': min(run['ends'])}


CLAIM = Claim(
  name='distillation',
  question='On-policy distillation of two teachers learns more than SFT on their '
  'samples.',
  conditions=('two domains',),
  arms=tuple(ARMS),
  subject='sampled tokens',
  measure=measure,
  sizes=Sizes(updates=60, groups=4, evaluated=256),
  metrics={'end': 'mean of the domains', 'worst': 'the worst domain'},
  columns={'teacher': 'teachers'},
  at_scale='`configs/forge_mixed.py` with `--config.rl.learner.distillation.teachers`.',
)
