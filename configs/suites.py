r"""Evaluation suites in one table; docs/pipelines_reasoning.md.

COMMAND: python -m experiments.evaluate --suite=reasoning --workdir=workdir/evaluation \
           --url=http://127.0.0.1:8000/v1 --model=NAME
         or --checkpoint=workdir/forge in place of --url and --model
HARDWARE: two CPU cores, and the server's.
RESULT: a table by family with 95 % Wilson intervals, also in SUITE.json in the workdir;
  SUITE.jsonl there has the episodes.

`trials`, sampling and limits: docs/facts/m2-and-forge.md §7 gives the report's for its
own benchmarks (means of 3 or 4; temperature 1.0, top-p 0.95, top-k 40); these sets are
others, so the limits here are ours.

The variant is the suite.
"""

import dataclasses

import ml_collections

from configs import serve
from experiments import fields
from m2jax import sharding
from m2jax.pipelines.suites import SuiteConfig

LONG = dict(kind='whitebox', max_tokens=4096, observation_bytes=16384)
SUITES = {
  'reasoning': dict(
    tasks=dict(kind='reasoning', levels=(0, 1, 2)),
    agent=LONG,
    count=100,
    trials=4,
  ),
  'humaneval': dict(
    tasks=dict(kind='humaneval'),
    agent=LONG,
    count=164,
    trials=4,
    limits=dict(cpu_s=10, wall_s=20.0),
  ),
  'bfcl': dict(tasks=dict(kind='bfcl'), agent=LONG, count=50, trials=4),
  'terminal': dict(
    tasks=dict(kind='terminal'),
    agent=dict(kind='whitebox', max_tokens=1024, observation_bytes=4096),
    count=96,
    trials=4,
  ),
  # Tasks that experiments.make_tasks wrote: set --config.suite.tasks.dataset.
  'harbor': dict(
    tasks=dict(kind='harbor'), agent=LONG, count=100, trials=4, episode_s=3600.0
  ),
}


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant not in SUITES:
    raise ValueError(f'unknown suite {variant!r}: expected one of {", ".join(SUITES)}')
  c = ml_collections.ConfigDict()
  c.suite = fields.complete(ml_collections.ConfigDict(SUITES[variant]), SuiteConfig)
  served = serve.get_config()
  c.mesh = dataclasses.asdict(sharding.MeshConfig())
  for name in ('engine', 'scheduler', 'gateway'):
    c[name] = served[name]
  return c
