"""Thinking of earlier turns in the prompts against none of it.

Each turn shows a number, and the last response is to be their sum. What earlier turns
have thought, the sum so far, saves adding up all of them in one step; no number is
missing without it. Both arms have the same demonstrations, whose sums slip at times,
and begin at what SFT on them gives.
"""

from __future__ import annotations

from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import Sums
from benchmarks.claims.training import Arm, Sizes, Trainer

TURNS = {f'{n} turns': n for n in (4, 6, 8)}
ARMS = {'kept': True, 'dropped': False}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  task = Sums(TURNS[condition], kept=ARMS[arm])
  return trainer.run(Arm(task), rate, seed)


CLAIM = Claim(
  name='thinking',
  question='Agents whose prompts keep the thinking of earlier turns learn more than '
  'those without it.',
  conditions=tuple(TURNS),
  arms=tuple(ARMS),
  subject='kept',
  measure=measure,
  sizes=Sizes(updates=40, groups=4, sft_steps=200, sft_size=40, evaluated=256),
  at_scale='`--config.episodes.agent.context.thinking=drop` beside the default of '
  '`configs/forge.py`; `python -m benchmarks.thinking --workdir=DIR` (docs/agents.md).',
)
