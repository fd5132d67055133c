"""A critic against the group's baseline, at equal episodes.

`group` subtracts the mean of the group's returns, the other arms a learned value. With
one rollout of each prompt there is no group, and an update has 16 times the prompts.
`own trunk` has twice the parameters. `token GAE` has λ = 0.9 between tokens.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import Forks, Turns
from benchmarks.claims.training import Arm, Sizes, Trainer
from m2jax.rl.critic import CriticConfig

CONDITIONS = {
  'forks': Forks(habits=(0.1, 0.5, 0.7)),
  '16 paid turns': Turns(16, 0.6),
}
SHARED = CriticConfig('shared')
# The critic, and whether each prompt has one rollout.
ARMS = {
  'one rollout': (SHARED, True),
  'one rollout, token GAE': (CriticConfig('shared', lam=0.9, steps='token'), True),
  'one rollout, own trunk': (CriticConfig('separate'), True),
  'critic of groups': (SHARED, False),
  'group': (CriticConfig(), False),
}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  critic, single = ARMS[arm]
  task = CONDITIONS[condition]
  return trainer.run(Arm(task, critic=critic, single=single), rate, seed)


CLAIM = Claim(
  name='critic',
  question='With a critic, one rollout of each prompt learns as much as groups do.',
  conditions=tuple(CONDITIONS),
  arms=tuple(ARMS),
  subject='one rollout',
  measure=measure,
  sizes=Sizes(updates=60, groups=4, sft_steps=60, sft_size=40, evaluated=256),
  columns={'lowest': 'lowest', 'explained': 'explained variance'},
  at_scale='`--config.rl.learner.critic.kind=shared --config.rl.group_size=1` and '
  '`--config.rl.groups_per_step` times the group, beside `configs/forge.py`.',
)
