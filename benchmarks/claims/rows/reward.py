"""The composite reward: speed buys parallelism, and what that costs in success.

The first token of a response chooses between looking up its places one by one and all
at once. `equal`: the policy starts with the same success in both modes; `harder`: with
less in the faster one, so that speed and success are opposed at first. Dividing by the
group's standard deviation makes the speed of equal successes as large as a difference
of success, and β has no effect among them.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import Modes
from benchmarks.claims.training import Arm, Trainer
from m2jax.rl.rewards import RewardConfig

HABITS = (0.6, 0.6, 0.6)
CONDITIONS = {'equal': Modes(HABITS), 'harder': Modes(HABITS, harder=0.4)}
ARMS = {
  'β = 0.5': RewardConfig(alpha=0.0, beta=0.5),
  'β = 0': RewardConfig(alpha=0.0),
  'β = 0.5, group std': RewardConfig(alpha=0.0, beta=0.5, normalise='group'),
}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  run = trainer.run(Arm(CONDITIONS[condition], reward=ARMS[arm]), rate, seed)
  places = len(HABITS)
  return run | {'parallel': (places - run['episode_s']) / (places - 1)}


CLAIM = Claim(
  name='reward',
  question='The speed term makes episodes parallel and does not cost success.',
  conditions=tuple(CONDITIONS),
  arms=tuple(ARMS),
  subject='β = 0.5',
  measure=measure,
  metrics={'end': 'success at the end', 'parallel': 'parallel in the last quarter'},
  at_scale='`python -m benchmarks.speed_reward --workdir=DIR` (docs/rl.md).',
)
