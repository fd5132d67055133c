r"""Pre-training M2: 228.7B parameters, 29.2T tokens. A plan; nobody has run it here.

COMMAND: python -m experiments.pretrain --config=configs/pretrain_m2.py \
           --workdir=DIRECTORY --distributed --config.tokenizer=PATH/tokenizer.json \
           --config.text.domains.code.root=… (and so on)
HARDWARE: the slice TOPOLOGY, 512 chips in 128 processes, as planned: 76 GiB of each at
  8K. Every stage has the mesh and the passes of configs/m2.py for this slice; the run
  goes from one to the next by itself. A run may resume on another slice with other
  meshes and passes: --config.mesh.data=2 --config.pretrain.stages[0].passes=2 on 256
  chips until the first stage ends.
TIME: docs/plan.md has the estimate of a step of each stage, and the command that prints
  it.
RESULT: not known; the report gives no loss of its base model.

Published (facts/m2-and-forge.md §1.5, §3): the shape; 19.9T tokens of constant phase
and 9.3T of decay; contexts 8K, 32K, 192K in this order; one MTP module, its weight 0.3,
in the decay phase 0.1; sign updates of the router bias are the compatible reading.
Not published, so ours: how the tokens split over contexts; batch size (12.6M tokens in
every stage); optimizer, rates, warm-up and decay shape; the rate of the router bias and
its end (DeepSeek-V3's: 1e-3, 0 for the last 500B of 14.8T tokens); the domains and
everything about their mixture.
"""

import dataclasses

import ml_collections

from configs import m2
from experiments import fields
from m2jax import config as model_config
from m2jax.sharding import MeshConfig
from m2jax.train.stages import PretrainConfig

TOPOLOGY = 'v5p:8x8x8'  # tests/train/test_topologies.py starts every stage on it
BILLION = 10**9
CONSTANT, DECAY = 19_900 * BILLION, 9_300 * BILLION  # tokens, published


def _mesh(**sizes: int) -> dict[str, int | str]:
  return dataclasses.asdict(MeshConfig(**sizes, rules='fsdp'))


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant:
    raise ValueError(f'unknown variant {variant!r}: there is none')
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.model = dataclasses.asdict(model_config.m2())
  # ours: a domain is a directory of .jsonl, .parquet or .array_record files
  code = dict(join='code', repository_field='repository', category_field='language')
  c.text = dict(
    root='',
    suffixes=(),
    exclude_dirs=(),
    domains=dict(
      web=dict(root='data/web', weight=0.45, category_field='topic'),
      code=dict(root='data/code', weight=0.3, **code),
      books=dict(root='data/books', weight=0.15, category_field='topic'),
      mathematics=dict(root='data/mathematics', weight=0.1, category_field='topic'),
    ),
    held_out=0.0001,
    quality='data/quality.npz',
    mixture=dict(cap=4.0, floor=0.5, gain=4.0, epoch=1.0),
    join_from_context=32_768,
  )
  c.tokenizer = 'data/tokenizer.json'
  c.tokenizer_files = 0
  c.mesh = _mesh(data=4, fsdp=128)  # of stages without one of their own
  c.init_from = ''  # a run's workdir, or a directory in the released format
  stages = (  # 12,582,912 tokens a batch
    dict(context=8_192, rows=1_536, tokens=26_200 * BILLION, passes=1),
    dict(
      context=32_768,
      rows=384,
      tokens=2_000 * BILLION,
      passes=1,
      mesh=_mesh(fsdp=128, tensor=4),
    ),
    dict(
      context=196_608,
      rows=64,
      tokens=1_000 * BILLION,
      passes=2,
      mesh=_mesh(fsdp=32, context=4, tensor=4),
    ),
  )
  sizes = [(s['tokens'], s['context'] * s['rows']) for s in stages]
  steps = sum(-(-tokens // size) for tokens, size in sizes)
  c.pretrain = dict(
    stages=stages,
    phases=dict(
      tokens=CONSTANT + DECAY,
      warmup_tokens=25 * BILLION,
      decay_tokens=DECAY,
      final_fraction=0.1,
      decay_mtp_weight=0.1,
      bias_updates_until=1 - 0.5 / 14.8,
    ),
    streams=64,  # of documents; all rows of the last stage
    held_out_batches=8,
    loop=dict(steps=steps, seconds=0.0, checkpoint_every=500, log_every=1),
    step=dict(
      mtp_weight=0.3,
      bias_update_rate=1e-3,
      compiler_options=dict(m2.COMPILER_OPTIONS),
    ),
    optimizer=dict(adam=dict(learning_rate=2.4e-4), weight_decay=0.1),
  )
  fields.complete(c.pretrain, PretrainConfig)
  return c
