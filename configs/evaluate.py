r"""Held-out success of a checkpoint on the terminal tasks, as the main job measures it.

COMMAND: python -m experiments.evaluate --config=configs/evaluate.py \
           --checkpoint=workdir/forge --workdir=workdir/evaluate
HARDWARE: two CPU cores.
RESULT: a table by temperature and family with 95 % Wilson intervals, also written to
  evaluation.json in the workdir; evaluation.db there has the episodes.

The model and the tokenizer are the checkpoint's. Tasks, agent and engine are those of
configs/forge.py: a policy is evaluated with the prompts it was trained with.

The engine runs on `mesh`, with --distributed in several processes (docs/rl.md).

Variants: `:smoke` evaluates 8 tasks, as a check.
"""

import dataclasses

import ml_collections

from configs import forge
from m2jax import sharding
from m2jax.forge.config import RolloutConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  job = forge.get_config()
  c = ml_collections.ConfigDict()
  c.temperatures = (1.0, 0.0)
  c.mesh = dataclasses.asdict(sharding.MeshConfig(expert=-1))  # a device per core
  for field in dataclasses.fields(RolloutConfig):
    if field.name != 'model':
      c[field.name] = job[field.name]
  if variant == 'smoke':
    c.eval_tasks = 8
  elif variant:
    raise ValueError(f'unknown variant {variant!r}: want none or smoke')
  return c
