r"""Forge with several domains and scaffolds in one run: shell tasks twice, and lookups.

COMMAND: python -m experiments.forge --config=configs/forge_mixed.py --workdir=DIR
HARDWARE: two CPU cores, 2 GB.
RESULT: not measured.

Each domain has its tasks, agent and teacher, a share of the demonstrations, and a ratio
per stage of RL; curves and evaluations are by domain (`success/DOMAIN`). `:smoke` runs
every phase for seconds.
"""

import ml_collections

from configs import forge
from experiments import fields
from m2jax.forge.config import ForgeConfig


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant not in ('', 'smoke'):
    raise ValueError(f'unknown variant {variant!r}: want smoke')
  c = forge.get_config(variant)
  shell, agent, teacher = c.tasks, c.episodes.agent, c.teacher
  c.tasks = dict(
    kind='mixed',
    domains=dict(shell=shell, bash=shell, lookup=dict(kind='lookup')),
    ratios=dict(shell=(1.0, 2.0), bash=(1.0, 2.0), lookup=(2.0, 1.0)),
    stages=(16 if variant else 112,),  # work items, at which the second stage begins
    demonstrated=dict(shell=2.0, bash=2.0, lookup=1.0),
  )
  c.episodes.agent = dict(
    kind='mixed',
    domains=dict(
      shell=agent,
      bash=dict(  # the same tasks in another scaffold
        kind='whitebox',
        max_tokens=96,
        observation_bytes=400,
        system='You work in a folder.',
        instruction='Your task: {instruction}',
        rename=dict(sh='bash', cmd='command'),
      ),
      lookup=dict(kind='whitebox', max_tokens=64),
    ),
  )
  c.teacher = dict(
    kind='mixed',
    domains=dict(shell=teacher, bash=teacher, lookup=dict(kind='lookup')),
  )
  c.sft.families = {}
  return fields.complete(c, ForgeConfig)
