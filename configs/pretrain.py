r"""Pre-training a tiny M2 on text files; by default the running Python's own library.

COMMAND: python -m experiments.pretrain --config=configs/pretrain.py \
           --workdir=workdir/pretrain
HARDWARE: two CPU cores. TIME: `pretrain.loop.seconds`, and the first compilation.
RESULT: prints the held-out loss in nats per token of the run's own tokenizer.

Own text: --config.text.root=DIR --config.text.suffixes="('.txt',)"; an own
tokenizer: --config.tokenizer=PATH/tokenizer.json, with --config.model.vocab_size.

Variants: `:tiny` is the default; `:smoke` runs for seconds, to see that it works.
"""

import dataclasses

import ml_collections

from m2jax import config as model_config


def get_config(variant: str = 'tiny') -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.model = dataclasses.asdict(model_config.tiny())
  c.model.vocab_size = 2048
  c.text = dict(
    root='',  # the running Python's standard library
    suffixes=('.py',),
    exclude_dirs=('test', 'tests', 'site-packages', 'dist-packages'),
    held_out=0.05,  # share of the files
  )
  c.tokenizer = ''  # path of a tokenizer.json; empty trains one on the text
  c.tokenizer_files = 200  # that it is trained on
  c.pretrain = dict(
    rows=8,
    row_tokens=512,
    held_out_batches=20,
    loop=dict(steps=2000, seconds=300.0, checkpoint_every=200),
    step=dict(micro_rows=4),
    optimizer=dict(name='muon', learning_rate=0.02, adam_learning_rate=3e-3),
  )
  if variant == 'smoke':
    c.model.update(vocab_size=512, num_layers=1, embed_dim=32, num_heads=2)
    c.model.update(num_kv_heads=1, head_dim=16, rotary_dim=8, expert_dim=16)
    c.tokenizer_files = 10
    c.pretrain.update(rows=2, row_tokens=64, held_out_batches=2)
    c.pretrain.loop.update(steps=6, checkpoint_every=3, log_every=1)
    c.pretrain.step.update(micro_rows=2)
  elif variant != 'tiny':
    raise ValueError(f'unknown variant {variant!r}: want tiny or smoke')
  return c
