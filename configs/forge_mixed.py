r"""Forge with four domains in one run: shell, code repair, clicks, reasoning.

COMMAND: python -m experiments.forge --config=configs/forge_mixed.py --workdir=DIR
HARDWARE: two CPU cores, 3 GB; m2jax_pipelines, MiniWoB++ and Chromium
  (docs/pipelines_reasoning.md).
RESULT: docs/pipelines_reasoning.md, by `python -m benchmarks.mixed_domains`.

Each domain has its tasks, agent and teacher, a share of the demonstrations, and a ratio
and a context per stage of RL; curves and evaluations are by domain (`success/DOMAIN`).
`bash` has the shell tasks in another scaffold. Variants: `:DOMAIN` trains on one domain
alone after the same SFT, for the same budget, and is evaluated on all: what a single
domain forgets. `:smoke` runs every phase for seconds.
"""

import ml_collections

from configs import forge
from experiments import fields
from m2jax.forge.config import ForgeConfig

# Domain -> ratios in the stages of RL.
DOMAINS = dict(
  shell=(2.0, 1.0),
  bash=(1.0, 1.0),
  repair=(1.0, 2.0),
  clicks=(1.0, 1.0),
  reasoning=(1.0, 2.0),
)
# Domain -> tokens of an episode in the stages of RL. Of 16 episodes of the teacher each
# the longest have 453 (shell), 312, 472 and 159; evaluations have the last.
CONTEXTS = dict(
  shell=(512, 768),
  bash=(512, 768),
  repair=(384, 512),
  clicks=(512, 768),
  reasoning=(192, 256),
)
# Domain, or its families -> share of the demonstrations: what is longer is left to RL.
DEMONSTRATED = {
  **{f'shell/{name}': 2 * share for name, share in forge.DEMONSTRATED.items()},
  **{f'bash/{name}': share for name, share in forge.DEMONSTRATED.items()},
  'repair/steps_1': 1.0,
  'repair/steps_2': 1.0,
  'clicks': 1.0,
  'reasoning': 1.0,
}
PAGES = ('choose-list', 'click-button', 'click-link', 'click-option', 'enter-text')
PROBLEMS = ('aiw', 'basic_arithmetic', 'chain_sum', 'family_relationships', 'syllogism')


def _tasks(shell: dict) -> dict:
  pages, problems = dict.fromkeys(PAGES, 1.0), dict.fromkeys(PROBLEMS, 1.0)
  return dict(
    shell=shell,
    bash=shell,
    repair=dict(kind='repair', steps=(1, 4)),
    clicks=dict(kind='clicks', spare_calls=2, weights=pages),
    reasoning=dict(kind='reasoning', split_by='problem', weights=problems),
  )


def _agents(shell: dict) -> dict:
  return dict(
    shell=shell,
    bash=dict(  # the same tasks in another scaffold
      kind='whitebox',
      max_tokens=96,
      observation_bytes=400,
      system='You work in a folder.',
      instruction='Your task: {instruction}',
      rename=dict(sh='bash', cmd='command'),
    ),
    repair=dict(kind='whitebox', max_tokens=128, system='Use the tools.'),
    clicks=dict(kind='whitebox', max_tokens=64, system='Use the page.'),
    reasoning=dict(kind='whitebox', max_tokens=48),
  )


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  if variant not in ('', 'smoke', *DOMAINS):
    raise ValueError(f'unknown variant {variant!r}: want smoke or one of {(*DOMAINS,)}')
  c = forge.get_config('smoke' if variant == 'smoke' else '')
  ratios = dict(DOMAINS)
  if variant in DOMAINS:
    ratios = {name: (float(name == variant),) for name in DOMAINS}
  items = 16 if variant == 'smoke' else c.rl.steps * c.rl.groups_per_step // 2
  shell, agent, teacher = c.tasks.to_dict(), c.episodes.agent.to_dict(), c.teacher
  c.tasks = dict(
    kind='mixed',
    domains=_tasks(shell),
    ratios=ratios,
    stages=(items,),  # work items, after which the second begins
    demonstrated=dict(DEMONSTRATED),
  )
  c.episodes.agent = dict(kind='mixed', domains=_agents(agent), contexts=dict(CONTEXTS))
  c.teacher = dict(
    kind='mixed',
    domains=dict(
      shell=teacher.to_dict(),
      bash=teacher.to_dict(),
      repair=dict(kind='repair'),
      clicks=dict(kind='clicks'),
      reasoning=dict(kind='reasoning'),
    ),
  )
  c.rl.partial_credit = 0.0  # domains without it
  c.sft.families = {}
  return fields.complete(c, ForgeConfig)
