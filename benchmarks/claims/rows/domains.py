"""Domains mixed in every update, against one after the other, and one policy for each.

The same prompt has another answer in each domain, so that what is learned in one can be
lost in the next. All arms have the same episodes; `single` divides them over four
policies, each of which is judged in its own domain: a bound for one policy.
"""

from __future__ import annotations

import numpy as np

from benchmarks.claims.claim import Claim
from benchmarks.claims.tasks import MOST_DOMAINS, Domains
from benchmarks.claims.training import Arm, Sizes, Trainer

MIXED = Domains(habits=(0.2, 0.5, 0.7))
EACH = tuple(Domains(MIXED.habits, only=d) for d in range(MOST_DOMAINS))
ARMS = {
  'mixed': Arm(MIXED, evaluated=EACH),
  'one after the other': Arm(MIXED, after=EACH, evaluated=EACH),
}


def measure(trainer: Trainer, condition: str, arm: str, rate: float, seed: int):
  if arm != 'single':
    run = trainer.run(ARMS[arm], rate, seed)
    return run | {'worst': min(run['ends'])}
  updates = trainer.sizes.updates // len(EACH)
  runs = [
    trainer.run(Arm(MIXED, after=(task,), evaluated=(task,)), rate, seed, updates)
    for task in EACH
  ]
  runs = [run | {'end': run['ends'][0]} for run in runs]
  means = 'start', 'end', 'mean', 'lag'
  mean = {k: float(np.mean([r[k] for r in runs])) for k in means}
  sums = {k: sum(r[k] for r in runs) for k in ('episodes', 'cpu_s', 'wall_s')}
  curve = np.mean([r['curve'] for r in runs], axis=0) * (len(EACH), 1)
  lowest, worst = (min(r[k] for r in runs) for k in ('lowest', 'end'))
  return {**mean, **sums, 'lowest': lowest, 'worst': worst, 'curve': curve.tolist()}


CLAIM = Claim(
  name='domains',
  question='Domains mixed in every update learn more than one after the other.',
  conditions=('four domains',),
  arms=(*ARMS, 'single'),
  subject='mixed',
  bounds=('single',),
  measure=measure,
  sizes=Sizes(updates=800, groups=4, evaluated=256),
  metrics={'end': 'mean of the domains', 'worst': 'the worst domain'},
  columns={'lowest': 'lowest', 'mean': 'over all updates'},
  at_scale='`python -m benchmarks.mixed_domains --workdir=DIR` '
  '(docs/pipelines_reasoning.md).',
)
