r"""A small policy that explores trees of places, for scaffold evolution.

COMMAND: python -m experiments.forge --config=configs/explore.py \
           --workdir=workdir/explore
HARDWARE: two CPU cores, 2 GB.
RESULT: a policy after SFT on trees in which a search looks at up to five places;
  configs/evolve.py:explore asks for up to eight.

Variants: `:quick` has 400 steps, on trees of up to three places; `:rl` continues with
RL from the weights of a run of this config (`--config.start=RUN`).
"""

import ml_collections

from configs import forge
from experiments import fields
from m2jax.forge.config import ForgeConfig

SHOWN, ASKED = 5, 8  # most places of a demonstration, and of a task of RL
QUICK = 3  # most places of a demonstration of :quick
CONTEXT_TOKENS = 512


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  c = forge.get_config()
  c.model.update(num_layers=2, embed_dim=96, num_heads=6, num_kv_heads=2)
  c.model.update(head_dim=16, rotary_dim=8, num_experts=4, expert_dim=96)
  c.model.update(vocab_size=384, max_positions=1024, num_mtp_modules=0)
  c.mesh.update(expert=1)
  c.tasks = dict(kind='explore', places=(2, ASKED), spare_calls=1)
  c.teacher = dict(kind='explore', mistakes=0.2)
  c.engine.update(decode_rows=(16, 64), prefill_shapes=((8, 64),))
  c.engine.update(context_tokens=CONTEXT_TOKENS, contexts=(CONTEXT_TOKENS,))
  c.episodes.agent = dict(kind='whitebox', max_tokens=96)
  c.eval_tasks = c.dev_tasks = 0
  steps, shown = (400, QUICK) if variant == 'quick' else (1500, SHOWN)
  c.sft.families = {f'places_{n}': 1.0 for n in range(2, shown + 1)}
  # As many demonstrations as SFT reads.
  c.sft.update(demonstrations=8 * steps, row_tokens=1024, tokens_per_step=4096)
  c.sft.step.update(micro_rows=1)
  c.sft.loop.update(steps=steps, checkpoint_every=steps)
  c.sft.optimizer.schedule.update(total_steps=steps, decay_steps=steps // 3)
  if variant == 'rl':
    c.rl.update(steps=16, dev_every=0, patience=0, partial_credit=0.0)
    c.rl.update(groups_per_step=8, refill_factor=3.0, checkpoint_every=16)
    c.rl.optimizer.schedule.update(total_steps=16, decay_steps=8)
  else:
    c.rl = None
    if variant not in ('', 'quick'):
      raise ValueError(f'unknown variant {variant!r}: want none, quick or rl')
  return fields.complete(c, ForgeConfig)
