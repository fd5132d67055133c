r"""SFT of a tiny M2 on demonstrations of shell tasks, with the main job's settings.

COMMAND: python -m experiments.sft --config=configs/sft.py --workdir=workdir/sft
HARDWARE: two CPU cores. TIME: `sft.loop.seconds`, plus the first compilation.
RESULT: a checkpoint in workdir/sft; experiments.evaluate measures its held-out success.

The demonstrations are those of a run of experiments.forge, or any JSON lines with
OpenAI `messages` and, if tools are used, `tools`. To start from other weights:
--config.init_from=DIRECTORY, of a run or of a model in the released format.

Variants: `:smoke` runs for seconds, as a check. `:templates` shows each chat in one of
several variants of M2's template.
"""

import dataclasses

import ml_collections

from configs import forge
from m2jax import config as model_config

# Fields of `text.chat.Template`: what surrounds the assistant's tokens.
TEMPLATES = dict(
  m2=dict(),
  thinking=dict(keep_all_thinking=True),
  short=dict(
    tools_header='\n\nTools, one JSON object a line:\n<tools>\n',
    tools_footer='</tools>\n\nA call looks like this:\n\n',
  ),
  plain=dict(
    default_system='You are an assistant with tools.',
    tools_header='\n\n## Functions\n\n',
    tools_footer='\nTo call functions, write:\n\n',
  ),
)


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  job = forge.get_config()
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.demonstrations = 'workdir/forge/demonstrations.jsonl'
  c.held_out = 0.05  # share of the chats that is only measured, at the end
  c.system = job.episodes.agent.system  # for chats without; '': the model's default
  c.tools = ()  # for chats without any
  # a run's workdir or a directory in the released format; empty: random weights
  c.init_from = ''
  c.model = dataclasses.asdict(model_config.tiny())
  c.tokenizer = ''  # path of a tokenizer.json; empty trains one on the chats
  c.mesh = job.mesh
  c.sft = job.sft.to_dict()
  del c.sft.demonstrations, c.sft.families, c.sft.recorded
  if variant == 'smoke':
    c.sft.loop.update(steps=6, checkpoint_every=3, log_every=1)
  elif variant == 'templates':
    c.sft.templates = TEMPLATES
  elif variant:
    raise ValueError(f'unknown variant {variant!r}: want none, smoke or templates')
  return c
