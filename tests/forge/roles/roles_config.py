"""A run for the tests of the roles: a tiny model, tasks without a sandbox, an end."""

from __future__ import annotations

from configs import forge
from experiments import fields
from m2jax.forge.config import ForgeConfig

ITEMS, PER_STEP = 60, 2


def get_config(variant=''):
  c = forge.get_config('smoke')
  c.mesh.expert = 1
  c.tasks = dict(kind='tests.forge.roles.sums')
  c.teacher = dict(kind='tests.forge.roles.sums')
  c.model.update(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=1, head_dim=16)
  c.model.update(rotary_dim=8, num_experts=4, expert_dim=16)
  c.eval_tasks = c.dev_tasks = 2
  c.engine.update(slots=4, decode_rows=(4,), contexts=(384,), context_tokens=384)
  c.engine.update(prefill_shapes=((4, 64),))
  c.episodes.update(concurrency=4)
  agent = dict(kind='tests.forge.roles.parity', max_tokens=16, retries=1)
  c.episodes.agent = agent
  c.sft.families = {}
  c.sft.update(demonstrations=30, tokens_per_step=1024)
  c.sft.loop.update(steps=3, checkpoint_every=2)
  c.rl.update(
    steps=1000,
    seconds=0.0,
    max_items=ITEMS,
    groups_per_step=PER_STEP,
    group_size=2,
    capacity=6,
    checkpoint_every=7,
    refill_factor=1.0,
    dev_every=0,
    patience=0,
    item_deadline_s=600.0,
  )
  c = fields.complete(c, ForgeConfig)
  c.roles.lease_s = 4.0
  c.roles.poll_s = 0.1
  return c
