r"""Evolves the scaffold around a policy of the main job.

COMMAND: python -m experiments.evolve --config=configs/evolve.py \
           --workdir=workdir/evolve --config.checkpoint=workdir/forge
HARDWARE: two CPU cores.
RESULT: WORKDIR/record.jsonl, one line a phase; success of the start and of the last
  keep on the third split, which is opened once.

Tasks, engine and agent are those of configs/forge.py; proposals are those of rules that
read failing trajectories. Another proposer: `--config.proposer.kind=random_search`,
`tpe`, `gepa` or `model`; the last two take `.url` and `.model`.

Variants: `:explore` evolves around the policy of configs/explore.py, without
sandboxes, and `:demo` is that in ten rounds; `:aa` has candidates that equal the
incumbent, each with seeds of its own, and measures the rate of false keeps; `:smoke` is
two rounds on a few tasks.
"""

import dataclasses

import ml_collections

from configs import explore, forge
from experiments import fields
from m2jax import sharding
from m2jax.evolve.config import EvolveConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  exploring = variant in ('explore', 'demo')
  job = explore.get_config() if exploring else forge.get_config()
  c = ml_collections.ConfigDict()
  c.mesh = dataclasses.asdict(sharding.MeshConfig(expert=-1))  # a device per core
  c.checkpoint = 'workdir/explore' if exploring else 'workdir/forge'
  for name in ('tasks', 'engine', 'scheduler', 'gateway', 'episodes'):
    c[name] = job[name]
  c.development = dict(split='train', count=400)
  c.second = dict(split='dev', count=100)
  c.sealed = dict(split='held_out', count=300)
  c.proposer = dict(kind='analyst')
  c.loop = dict(
    budget=dict(rounds=100),
    # Effort is no gain: twice the tokens of the agent as shipped, at most.
    bounds=(
      ('max_tokens', 16, 192),
      ('observation_bytes', 64, 1024),
      ('context.tokens', 0, 768),
    ),
  )
  if variant == 'smoke':
    c.development.count, c.second.count, c.sealed.count = 8, 4, 4
    c.loop.budget.rounds = 2
    c.loop.gate = dict(looks=(4, 8))
  elif variant == 'aa':
    c.proposer.kind = 'same'
    c.loop.archive = dict(method='incumbent', allow_duplicates=True)
    c.loop.paired_seeds = False
  elif exploring:
    c.mesh.update(expert=1)
    c.tasks.places = (explore.SHOWN - 1, explore.ASKED)
    c.development.count, c.second.count, c.sealed.count = 2000, 200, 400
    c.loop.bounds = (
      ('max_tokens', 16, 192),
      ('observation_bytes', 64, 2048),
      ('context.tokens', 0, explore.CONTEXT_TOKENS),
    )
    if variant == 'demo':
      c.tasks.places = (explore.QUICK, explore.SHOWN)
      c.loop.budget.rounds = 10
      c.loop.gate = dict(looks=(32, 64, 128), alpha=0.2)
      c.second.count, c.sealed.count = 64, 128
  elif variant:
    raise ValueError(
      f'unknown variant {variant!r}: want none, explore, demo, aa or smoke'
    )
  return fields.complete(c, EvolveConfig)
