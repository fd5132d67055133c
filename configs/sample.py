r"""Rejection sampling on the main job's tasks with three scaffolds, for SFT.

COMMAND: python -m experiments.sample --config=configs/sample.py \
           --workdir=workdir/sample --checkpoint=workdir/forge
         or --url=http://127.0.0.1:8000/v1 --model=NAME in place of --checkpoint
HARDWARE: two CPU cores, and the server's.
RESULT: verified.jsonl in the workdir, for --config.demonstrations of experiments.sft.

For tasks that experiments.make_tasks wrote: --config.sample.suite.tasks.kind=harbor
--config.sample.suite.tasks.dataset=WORKDIR.
"""

import dataclasses

import ml_collections

from configs import forge, serve
from experiments import fields
from m2jax import sharding
from m2jax.pipelines.verified import SampleConfig


def get_config() -> ml_collections.ConfigDict:
  job = forge.get_config()
  tasks = job.tasks.to_dict()
  plain = job.episodes.agent.to_dict()
  c = ml_collections.ConfigDict()
  c.sample = dict(
    suite=dict(
      tasks=tasks,
      agent=plain,  # not used: the scaffolds are
      split='train',
      count=200,
      trials=4,
      seed=1,
      top_p=1.0,
      top_k=0,
      concurrency=64,
    ),
    scaffolds=dict(
      plain=plain,
      bash=dict(plain, rename=dict(sh='bash', cmd='command')),
      perturbed=dict(
        kind='perturbed',
        agent=plain,
        systems=('Use sh.', 'Work in the shell.', 'You work in a folder.'),
        instructions=('{instruction}', 'Your task: {instruction}'),
        renames=({}, dict(sh='shell'), dict(sh='run', cmd='line')),
      ),
    ),
    thinking=True,
  )
  c.sample = fields.complete(c.sample, SampleConfig)
  c.mesh = dataclasses.asdict(sharding.MeshConfig())
  c.engine, c.scheduler = job.engine, job.scheduler
  c.gateway = serve.get_config().gateway
  return c
