"""Reward-to-go and a baseline per turn, against credit of whole trajectories.

All arms have the same returns of an episode. `trajectory` pays them at the end, so
every turn has the advantage of the whole; `to go` pays each turn when it happens, and
subtracts the group's mean of G_0 from every G_t; `to go, per turn` subtracts the mean
of G_t of the same turn. `turn alone` has γ = 0: an upper bound that is available only
because no turn here has an effect on later ones.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import Turns
from benchmarks.claims.training import Arm, Sizes, Trainer
from m2jax.rl.rewards import RewardConfig

PAID, WHOLE = Turns(16, 0.6), Turns(16, 0.6, paid=False)
ARMS = {
  'to go, per turn': (PAID, RewardConfig(alpha=0.0, baseline_over='turn')),
  'to go': (PAID, RewardConfig(alpha=0.0, baseline_over='trajectory')),
  'trajectory': (WHOLE, RewardConfig(alpha=0.0)),
  'turn alone': (PAID, RewardConfig(alpha=0.0, baseline_over='turn', gamma=0.0)),
}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  task, reward = ARMS[arm]
  return trainer.run(Arm(task, 'cispo', reward=reward), rate, seed)


CLAIM = Claim(
  name='turns',
  question='With paid turns, reward-to-go with a baseline per turn learns more than '
  'credit of whole trajectories.',
  conditions=('16 turns, p = 0.6',),
  arms=tuple(ARMS),
  subject='to go, per turn',
  bounds=('turn alone',),
  measure=measure,
  # An episode has 16 choices: fewer of them show as much.
  sizes=Sizes(updates=60, groups=4, sft_steps=60, sft_size=40, evaluated=64),
  at_scale='tasks that pay turns (docs/add_a_reward.md), '
  '`--config.rl.learner.reward.baseline_over=turn` against `trajectory`.',
)
