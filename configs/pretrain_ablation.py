r"""The report's ablations: coarse or fine experts, MTP, hybrid attention, the router.

COMMAND: python -m experiments.pretrain --config=configs/pretrain_ablation.py:fine \
           --workdir=DIRECTORY --config.tokenizer=PATH/tokenizer.json \
           --config.text.root=DIRECTORY
HARDWARE: a TPU v5p slice; which one is to be planned, on a pod.
TIME: to be planned: 500B tokens at 6 · 2.0B FLOPs each, attention not counted, are
  6.0e21 FLOPs a variant.
RESULT: published (facts/m2-and-forge.md §1.5), on other data than yours: MATH 19.6
  coarse, 24.1 fine, 21.3 coarse with MTP; HumanEval 29.7, 32.5, 30.1.

Variants: `:coarse` (32 experts, top 2), `:fine` (128, top 8), `:coarse_mtp`; and of
`:fine`, one change each: `:hybrid` (3 of 4 layers see a window of 4,096 positions and 4
sink tokens; to be continued at longer contexts, where the report saw its harm),
`:softmax` (scores), `:no_bias` and `:softmax_no_bias` (nothing balances the load).

Published: 17.8B parameters, 2B active, 500B tokens, the numbers of experts. Ours: the
rest of the shape (`m2jax.config.ablation`), context, batch, optimizer and schedule,
MTP's weight 0.3 throughout, and all numbers of the hybrid.
"""

import dataclasses

import ml_collections

from experiments import fields
from m2jax import config as model_config
from m2jax import sharding
from m2jax.train.stages import PretrainConfig

VARIANTS = {
  'coarse': {},
  'fine': {},
  'coarse_mtp': dict(num_mtp_modules=1),
  'hybrid': dict(window=4096, full_attention_every=4, sinks=4),
  'softmax': dict(router_scores='softmax'),
  'no_bias': {},
  'softmax_no_bias': dict(router_scores='softmax'),
}


def get_config(variant: str = 'fine') -> ml_collections.ConfigDict:
  if variant not in VARIANTS:
    raise ValueError(f'unknown variant {variant!r}: want one of {tuple(VARIANTS)}')
  c = ml_collections.ConfigDict()
  c.seed = 0
  model = model_config.ablation(fine_grained='coarse' not in variant)
  model = dataclasses.replace(model, **VARIANTS[variant])
  c.model = dataclasses.asdict(model)
  c.text = dict(
    root='data/text',
    suffixes=('.jsonl', '.parquet', '.array_record'),
    exclude_dirs=(),
    domains={},
    held_out=0.0001,
    quality='',
    mixture=dict(cap=4.0, floor=0.5, gain=4.0, epoch=1.0),
    join_from_context=0,
  )
  c.mesh = dataclasses.asdict(sharding.MeshConfig())  # several processes: all devices
  c.init_from = ''  # a run's workdir, or a directory in the released format
  c.tokenizer = 'data/tokenizer.json'
  c.tokenizer_files = 0
  tokens, context, rows = 500_000_000_000, 8_192, 512  # 4,194,304 tokens a batch
  c.pretrain = dict(
    stages=((context, rows, tokens),),
    phases=dict(
      tokens=tokens,
      warmup_tokens=8_000_000_000,
      decay_tokens=tokens // 5,
      final_fraction=0.1,
      decay_mtp_weight=0.3,
      bias_updates_until=1.0,
    ),
    streams=0,
    held_out_batches=8,
    loop=dict(
      steps=-(-tokens // (context * rows)),
      seconds=0.0,
      checkpoint_every=500,
      log_every=1,
    ),
    step=dict(
      micro_rows=64,
      mtp_weight=0.3,
      bias_update_rate=0.0 if 'no_bias' in variant else 1e-3,
    ),
    optimizer=dict(adam=dict(learning_rate=4e-4), weight_decay=0.1),
  )
  fields.complete(c.pretrain, PretrainConfig)
  return c
