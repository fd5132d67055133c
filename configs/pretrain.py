r"""Pre-training a tiny M2 on text files; by default the running Python's own library.

COMMAND: python -m experiments.pretrain --config=configs/pretrain.py \
           --workdir=workdir/pretrain
HARDWARE: two CPU cores. TIME: `pretrain.loop.seconds`, and the compilations: one at the
  start and one for each later phase or stage.
RESULT: prints the held-out loss in nats per token of the run's own tokenizer.

Own text: --config.text.root=DIR --config.text.suffixes="('.txt',)"; an own
tokenizer: --config.tokenizer=PATH/tokenizer.json, with --config.model.vocab_size.

Variants: `:tiny` is the default; `:smoke` runs for seconds, to see that it works;
`:stages` is a run in miniature of all that M2's has: several domains in a mixture,
three stages of growing context, the longer ones on joined files, and both phases.
"""

import dataclasses
import sysconfig

import ml_collections

from experiments import fields
from m2jax import config as model_config
from m2jax import sharding
from m2jax.train.stages import PretrainConfig

EXCLUDED = ('test', 'tests', 'site-packages', 'dist-packages')


def get_config(variant: str = 'tiny') -> ml_collections.ConfigDict:
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.model = dataclasses.asdict(model_config.tiny())
  c.model.vocab_size = 2048
  c.text = dict(
    root='',  # the running Python's standard library
    suffixes=('.py',),
    exclude_dirs=EXCLUDED,
    domains={},  # name: fields of data.corpus.DomainConfig; then root is not used
    held_out=0.05,  # share of the documents
    quality='',  # scorer: path of a data.quality.Classifier, or module:function
    mixture=dict(cap=4.0, floor=0.5, gain=4.0, epoch=1.0),
    join_from_context=0,  # stages of this context or more read joined documents
  )
  c.mesh = dataclasses.asdict(sharding.MeshConfig(expert=-1))  # a device per core
  c.init_from = ''  # a run's workdir, or a directory in the released format
  c.tokenizer = ''  # path of a tokenizer.json; empty trains one on the text
  c.tokenizer_files = 200  # that it is trained on
  c.pretrain = dict(
    stages=((512, 8, 0),),  # (context, rows, tokens); 0 tokens: until the budget ends
    phases=dict(
      tokens=2000 * 4096,  # constant and decay phase together
      warmup_tokens=50 * 4096,
      decay_tokens=400 * 4096,
      final_fraction=0.1,  # of the learning rate
      decay_mtp_weight=0.1,
      bias_updates_until=0.95,  # fraction of tokens
    ),
    streams=0,  # parallel token streams; 0: the gcd of all stages' rows
    held_out_batches=20,
    loop=dict(steps=2000, seconds=300.0, checkpoint_every=200),
    step=dict(micro_rows=4, mtp_weight=0.3, bias_update_rate=1e-3),
    optimizer=dict(
      name='muon',  # of the hidden matrices; or adam, sso, … (docs/optimizers.md)
      muon=dict(learning_rate=0.02),
      adam=dict(learning_rate=3e-3),
    ),
  )
  if variant == 'stages':
    library = sysconfig.get_path('stdlib')
    domain = dict(suffixes=('.py',), join='code')
    c.text.domains = dict(
      modules=dict(root=library, exclude_dirs=(*EXCLUDED, 'encodings'), **domain),
      codecs=dict(root=f'{library}/encodings', weight=0.1, **domain),
    )
    c.text.join_from_context = 1024
    c.model.max_positions = 2048
    # 300, 60 and 40 batches of 8,192 tokens
    c.pretrain.stages = ((256, 32, 2_457_600), (1024, 8, 491_520), (2048, 4, 327_680))
    c.pretrain.phases.update(
      tokens=400 * 8192, warmup_tokens=20 * 8192, decay_tokens=120 * 8192
    )
    c.pretrain.held_out_batches = 5
    c.pretrain.loop.update(steps=400, seconds=0.0, checkpoint_every=50)
  elif variant == 'smoke':
    c.model.update(vocab_size=512, num_layers=1, embed_dim=32, num_heads=2)
    c.model.update(num_kv_heads=1, head_dim=16, rotary_dim=8, expert_dim=16)
    c.tokenizer_files = 10
    c.pretrain.update(stages=((64, 2, 0),), held_out_batches=2)
    c.pretrain.phases.update(
      tokens=0, warmup_tokens=2 * 128, decay_tokens=0, bias_updates_until=1.0
    )
    c.pretrain.loop.update(steps=6, checkpoint_every=3, log_every=1)
    c.pretrain.step.update(micro_rows=2)
  elif variant != 'tiny':
    raise ValueError(f'unknown variant {variant!r}: want tiny, smoke or stages')
  fields.complete(c.pretrain, PretrainConfig)
  return c
