r"""Evolves the scaffold around a policy of the main job.

COMMAND: python -m experiments.evolve --config=configs/evolve.py \
           --workdir=workdir/evolve --config.checkpoint=workdir/forge
HARDWARE: two CPU cores.
RESULT: WORKDIR/record.jsonl, one line a phase; success of the start and of the last
  keep on the third split, which is opened once.

Tasks, engine and agent are those of configs/forge.py; proposals are random search.

Variants: `:tpe`, `:analyst` and `:model` are other proposers at the same budget,
`:model` takes `--config.proposer.url=…` and `.model=…`; `:aa` has candidates that equal
the incumbent, each with seeds of its own, and measures the rate of false keeps;
`:smoke` is two rounds on a few tasks.
"""

import dataclasses

import ml_collections

from configs import forge
from experiments import fields
from m2jax import sharding
from m2jax.evolve.config import EvolveConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  job = forge.get_config()
  c = ml_collections.ConfigDict()
  c.mesh = dataclasses.asdict(sharding.MeshConfig(expert=-1))  # a device per core
  c.checkpoint = 'workdir/forge'
  for name in ('tasks', 'engine', 'scheduler', 'gateway', 'episodes'):
    c[name] = job[name]
  c.development = dict(split='train', count=400)
  c.second = dict(split='dev', count=100)
  c.sealed = dict(split='held_out', count=300)
  c.proposer = dict(kind='random_search')
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
  elif variant in ('tpe', 'analyst', 'model'):
    c.proposer.kind = variant
  elif variant:
    raise ValueError(
      f'unknown variant {variant!r}: want none, tpe, analyst, model, aa or smoke'
    )
  return fields.complete(c, EvolveConfig)
