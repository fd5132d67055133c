"""The small jobs that faults are injected into: the project's own, with tiny settings.

  base      demonstrations, tokenizer and SFT of a tiny policy
  rl        reinforcement learning from the weights of `base` with the same seed
  whole     `base` and `rl` in one run
  sft       a short `base`, for faults that belong to fine-tuning
  pretrain  pre-training on the Python library's text

A job takes half a minute of CPU once its programs are compiled.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import ml_collections

from benchmarks.doctor_faults import task
from configs import forge as forge_config
from configs import pretrain as pretrain_config
from experiments import fields
from m2jax.forge.config import ForgeConfig

UPDATES = 80  # of RL
RL_SECONDS = 240.0  # at most
BASE_STEPS, SFT_STEPS = 800, 160
PRETRAIN_STEPS = 240
LENGTH = {'rl': UPDATES, 'sft': SFT_STEPS, 'pretrain': PRETRAIN_STEPS}


def config(
  job: str, seed: int, base: pathlib.Path | None = None
) -> ml_collections.ConfigDict:
  """The settings of a job: fields of `ForgeConfig`, or of `experiments.pretrain`.

  Args:
    job: its name.
    seed: the run's seed.
    base: workdir of `base`, for 'rl'.
  """
  if job == 'pretrain':
    return _pretrain(seed)
  c = forge_config.get_config()
  c.seed = seed
  c.model.update(num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2)
  c.model.update(head_dim=16, rotary_dim=8, num_experts=8, expert_dim=32)
  c.model.update(vocab_size=320, max_positions=512, num_mtp_modules=0)
  c.mesh.update(expert=1)
  c.tasks = dict(kind=task.KIND, hops=(1, 2))
  c.teacher = dict(kind=task.KIND)
  c.engine.update(slots=16, context_tokens=512, decode_rows=(16,), contexts=(512,))
  c.engine.update(prefill_shapes=((4, 64),))
  c.episodes.update(concurrency=16)
  c.episodes.agent = dict(kind='whitebox', max_tokens=48)
  c.eval_tasks = c.dev_tasks = 0
  c.sft.families = {}
  c.sft.update(demonstrations=800, row_tokens=512, tokens_per_step=1024)
  steps = SFT_STEPS if job == 'sft' else BASE_STEPS
  c.sft.loop.update(steps=steps, checkpoint_every=steps // 4, log_every=2)
  c.sft.step.update(micro_rows=2)
  c.sft.optimizer.schedule.update(total_steps=steps, decay_steps=steps // 3)
  c.rl.update(steps=UPDATES, seconds=RL_SECONDS)
  c.rl.update(dev_every=0, patience=0, groups_per_step=2, group_size=4)
  c.rl.update(capacity=4, checkpoint_every=10, partial_credit=0.0, refill_factor=3.0)
  c.rl.learner.update(row_tokens=1024, row_terms=1024)
  c.rl.learner.step.update(micro_rows=1, detach_mtp=False)
  c.rl.optimizer.muon.learning_rate = 5e-4
  c.rl.optimizer.adam.learning_rate = 5e-5
  c.rl.optimizer.schedule.update(kind='constant', total_steps=UPDATES, decay_steps=0)
  if job == 'rl':
    c.start = str(base)
  elif job != 'whole':
    c.rl = None
  return fields.complete(c, ForgeConfig)


def _pretrain(seed: int) -> ml_collections.ConfigDict:
  c = pretrain_config.get_config('smoke')
  c.seed = seed
  c.model.update(num_layers=2, embed_dim=48, num_heads=3, num_mtp_modules=0)
  c.mesh.update(expert=1)
  c.pretrain.update(stages=((128, 4, 0),))
  c.pretrain.loop.update(steps=PRETRAIN_STEPS, checkpoint_every=60, log_every=2)
  return c


def changed(
  c: ml_collections.ConfigDict, changes: Mapping[str, Any]
) -> ml_collections.ConfigDict:
  """The settings with others of some fields.

  Args:
    changes: dotted name → the value, or a function of the old one.
  """
  for name, value in changes.items():
    *path, last = name.split('.')
    part = c
    for step in path:
      part = part[step]
    with part.ignore_type():
      part[last] = value(part[last]) if callable(value) else value
  return c
