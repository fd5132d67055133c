r"""One MTP module to three by weight copy: frozen main model first, then jointly.

COMMAND: python -m experiments.expand_mtp --config=configs/expand_mtp.py \
           --config.init_from=workdir/pretrain --workdir=workdir/expand_mtp
HARDWARE: two CPU cores, for the tiny model of configs/pretrain.py. TIME: at most 600 +
  600 steps of 4,096 tokens and the compilations.
RESULT: workdir/expand_mtp/pretrain holds a checkpoint with three modules; prints the
  held-out loss of the main model and the mean of its modules'. Which source is better:
  `python -m benchmarks.expand_mtp`.

--config.expand.source is 'mtp' (module 1, the report's Figure 2), 'main' (the last main
block, its text) or 'random'. The rule for stable, and all numbers but the three modules
and the weight 0.1, are ours: the report gives none.

Variant `:smoke` runs for seconds.
"""

import ml_collections

from configs import pretrain
from experiments import fields
from m2jax.train.expand_mtp import ExpandConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant not in ('', 'smoke'):
    raise ValueError(f'unknown variant {variant!r}: want none or smoke')
  base = pretrain.get_config(variant or 'tiny')
  c = ml_collections.ConfigDict()
  c.seed = base.seed
  c.init_from = ''  # a run's workdir, or a directory in the released format
  c.text = base.text
  c.mesh = base.mesh
  tokens, warmup = (600 * 4096, 20 * 4096) if not variant else (6 * 128, 2 * 128)
  part = base.pretrain.to_dict()
  part['step']['mtp_weight'] = 0.1
  # A second optimizer begins in either part: a warm-up, then a fall to the end.
  part['phases'].update(tokens=tokens, warmup_tokens=warmup, bias_updates_until=1.0)
  part['phases'].update(decay_tokens=tokens - warmup)
  if not variant:
    part['loop'].update(steps=600, seconds=0.0)
  frozen = {**part, 'phases': {**part['phases'], 'decay_tokens': 0}}  # no known end
  c.expand = dict(
    modules=3,
    source='mtp',
    frozen=frozen,
    check_every=100 if not variant else 3,
    tolerance=0.01,
    joint=part,
  )
  fields.complete(c.expand, ExpandConfig)
  return c
