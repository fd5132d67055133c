r"""Forge on tasks that a pipeline made: SFT on solutions or recorded attempts, then RL.

COMMAND: python -m experiments.make_tasks --pipeline=reasoning --workdir=workdir/made \
           --config.count=400
         python -m experiments.forge --config=configs/forge_tasks.py \
           --config.tasks.dataset=workdir/made --workdir=workdir/forge_tasks
HARDWARE: two CPU cores, 2 GB.
RESULT: not measured.

The teacher runs the tasks' own solutions. Where these are more than one script
(swe, spreadsheets, slides, deep_search), and for thinking, learn from attempts that
experiments.sample has verified, `--config.sft.recorded=workdir/sample/verified.jsonl`,
or start from weights, `--config.init_from=DIRECTORY`. `:smoke` runs every phase for
seconds.
"""

import ml_collections

from configs import forge
from experiments import fields
from m2jax.forge.config import ForgeConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant not in ('', 'smoke'):
    raise ValueError(f'unknown variant {variant!r}: want smoke')
  c = forge.get_config(variant)
  c.tasks = dict(kind='harbor', dataset='')
  c.teacher = dict(kind='harbor')
  c.episodes.agent.max_tokens = 160
  c.rl.partial_credit = 0.0
  c.sft.families = {}
  return fields.complete(c, ForgeConfig)
