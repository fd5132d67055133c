r"""Rejection sampling on the main job's tasks with three scaffolds, for SFT.

COMMAND: python -m experiments.sample --config=configs/sample.py \
           --workdir=workdir/sample --checkpoint=workdir/forge
         or --url=http://127.0.0.1:8000/v1 --model=NAME in place of --checkpoint
HARDWARE: two CPU cores, and the server's.
RESULT: verified.jsonl in the workdir, for --config.demonstrations of experiments.sft.

Variants: `:harbor` takes tasks that experiments.make_tasks wrote, of
`--config.sample.suite.tasks.dataset=WORKDIR`.
"""

import copy
import dataclasses

import ml_collections

from configs import forge, serve, suites
from experiments import fields
from m2jax import sharding
from m2jax_pipelines.verified import SampleConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant not in ('', 'harbor'):
    raise ValueError(f'unknown variant {variant!r}: want none or harbor')
  job = forge.get_config()
  plain = suites.LONG if variant else job.episodes.agent.to_dict()
  c = ml_collections.ConfigDict()
  c.sample = dict(
    suite=dict(
      tasks=dict(kind='harbor') if variant else job.tasks.to_dict(),
      agent=copy.deepcopy(plain),  # not used: the scaffolds are
      split='train',
      count=200,
      trials=4,
      seed=1,
      top_p=1.0,
      top_k=0,
      concurrency=64,
    ),
    scaffolds=dict(
      plain=copy.deepcopy(plain),
      bash=dict(copy.deepcopy(plain), rename=dict(sh='bash', cmd='command')),
      perturbed=dict(
        kind='perturbed',
        agent=copy.deepcopy(plain),  # each is changed alone by flags
        systems=('Use sh.', 'Work in the shell.', 'You work in a folder.'),
        instructions=('{instruction}', 'Your task: {instruction}'),
        renames=({}, dict(sh='shell'), dict(sh='run', cmd='line')),
      ),
    ),
    thinking=False,  # True: only attempts of which each message has thinking
  )
  c.sample = fields.complete(c.sample, SampleConfig)
  c.mesh = dataclasses.asdict(sharding.MeshConfig(expert=-1))
  c.engine, c.scheduler = job.engine, job.scheduler
  c.gateway = serve.get_config().gateway
  return c
