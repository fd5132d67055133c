r"""The speed reward: look-ups that take time, one by one or in parallel.

COMMAND: python -m experiments.forge --config=configs/forge_speed.py \
           --workdir=workdir/speed --config.rl.learner.reward.beta=0.5
HARDWARE: two CPU cores; minutes.
RESULT: docs/rl.md, by `python -m benchmarks.speed_reward`.

Three of ten demonstrations look independent keys up in one turn, the others one by one,
and both are right. Without the speed reward (`reward.beta`, 0 here) success alone
decides between them. Chains, whose calls depend on one another, are in the same run.

Variant: `:smoke` runs every phase for seconds, as a check.
"""

import dataclasses

import ml_collections

from configs import forge
from experiments import fields
from m2jax import config as model_config
from m2jax.forge.config import ForgeConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant not in ('', 'smoke'):
    raise ValueError(f'unknown variant {variant!r}: want smoke')
  c = forge.get_config(variant)
  model = dataclasses.replace(model_config.tiny(), vocab_size=384, num_layers=2)
  c.model = dataclasses.asdict(model)
  c.mesh.expert = 1
  del c.tasks, c.teacher
  c.tasks = dict(kind='fetch', latency_s=(0.04, 0.12))  # of a call
  c.teacher = dict(kind='fetch', parallel=0.3)
  c.engine = dict(slots=32, context_tokens=320)
  c.engine.update(decode_rows=(32,), contexts=(320,), prefill_shapes=((1, 64), (8, 32)))
  c.episodes.concurrency = 32
  c.episodes.agent.update(system='Use get.', max_tokens=96)
  c.eval_tasks, c.dev_tasks = 300, 0
  c.sft.families = {}
  # With fewer, parallel calls succeed less often, and speed is paid for with success.
  c.sft.update(demonstrations=2400, tokens_per_step=2048, row_tokens=512)
  c.sft.loop.update(steps=1500, checkpoint_every=500)
  c.sft.optimizer.schedule.update(total_steps=1500, decay_steps=500)
  c.rl.update(
    steps=60, groups_per_step=6, group_size=8, capacity=8, checkpoint_every=20
  )
  c.rl.update(refill_factor=1)  # the same groups with and without the speed reward
  c.rl.update(dev_every=0, patience=0, partial_credit=0.0)
  c.rl.learner.update(row_tokens=1024, row_terms=1024)
  c.rl.optimizer.muon.learning_rate = 2e-3
  c.rl.optimizer.adam.learning_rate = 2e-4
  c.rl.optimizer.schedule.update(total_steps=60, decay_steps=20)
  if variant == 'smoke':
    c.eval_tasks = 8
    c.sft.demonstrations = 40
    c.sft.loop.update(steps=8, checkpoint_every=8)
    c.rl.update(steps=2, groups_per_step=2, group_size=4, capacity=4)
  return fields.complete(c, ForgeConfig)
