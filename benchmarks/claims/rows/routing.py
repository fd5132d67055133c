"""Routing in RL: replayed experts, and biases that move, by the age of the weights.

The engine computes in bfloat16 and the learner in float32, so that near-ties of the
router go either way. `moving bias` continues the sign rule of pre-training.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.rows.estimators import AGES, TASK
from benchmarks.claims.rows.head import HALF
from benchmarks.claims.training import Arm, Sampler, Trainer

ARMS = {
  'frozen bias': (Sampler(HALF), 0.0),
  'frozen bias, replay': (Sampler(HALF, record_experts=True), 0.0),
  'moving bias': (Sampler(HALF), 1e-3),
}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  sampler, bias = ARMS[arm]
  arm_ = Arm(TASK, age=AGES[condition], sampler=sampler, bias_update_rate=bias)
  return trainer.run(arm_, rate, seed)


CLAIM = Claim(
  name='routing',
  question='RL with a frozen router bias learns as much as with replayed experts, and '
  'more than with a bias that moves.',
  conditions=tuple(AGES),
  arms=tuple(ARMS),
  subject='frozen bias',
  measure=measure,
  columns={
    'lowest': 'lowest',
    'mismatch': 'mismatch, millinats',
    'rerouted': 'rerouted',
  },
  at_scale='`configs/forge.py` with `--config.model.dtype=bfloat16` and '
  '`--config.engine.record_experts`, or `--config.rl.learner.step.bias_update_rate`.',
)
