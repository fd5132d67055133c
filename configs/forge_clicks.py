r"""Forge on web pages: MiniWoB++ in Chromium, read, operated and judged in a browser.

COMMAND: python -m experiments.forge --config=configs/forge_clicks.py \
           --workdir=workdir/clicks
HARDWARE: two CPU cores, 4 GB.
RESULT: not measured.

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
  c.model = dataclasses.asdict(dataclasses.replace(model_config.tiny(), num_layers=2))
  c.mesh.expert = 1
  del c.tasks, c.teacher
  c.tasks = dict(kind='clicks', spare_calls=2)
  c.teacher = dict(kind='clicks')
  c.engine = dict(slots=16, context_tokens=768)
  c.engine.update(
    decode_rows=(16,), contexts=(384, 768), prefill_shapes=((1, 64), (8, 32))
  )
  c.episodes.concurrency = 16  # each episode has a page, with a process of its own
  c.episodes.agent.update(system='Use the page.', max_tokens=64)
  c.sft.families = {}
  if variant == 'smoke':
    c.engine.contexts = (768,)
    c.sft.demonstrations = 40
  return fields.complete(c, ForgeConfig)
