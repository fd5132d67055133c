r"""Evaluation suites in one table; docs/pipelines_reasoning.md.

COMMAND: python -m experiments.evaluate --suite=reasoning --workdir=workdir/evaluation \
           --url=http://127.0.0.1:8000/v1 --model=NAME
         or --checkpoint=workdir/forge in place of --url and --model
HARDWARE: two CPU cores, and the server's.
RESULT: a table by family with 95 % Wilson intervals, also in SUITE.json in the workdir;
  SUITE.jsonl there has the episodes.

`SUITES` is the protocol, a row a suite: tasks, trials, context policy, limits. The
report names scaffold, limits and trials of its own benchmarks
(docs/facts/m2-and-forge.md §7); a set of the same kind has its trials and its context
policy here. The sets are others, so numbers of tasks, tokens and seconds are ours.
Sampling is SuiteConfig's for all: temperature 1.0, top-p 0.95, top-k 40.

The variant is the suite. Those of pipelines read the held-out tasks of
workdir/PIPELINE, where the commands of docs/pipelines.md put them; `harbor` those of
any dataset: --config.suite.tasks.dataset=DIRECTORY.
"""

import copy
import dataclasses

import ml_collections

from configs import serve
from experiments import fields
from m2jax import sharding
from m2jax_pipelines.suites import SuiteConfig

# Context policies (`agents.context`). The whole conversation stays:
WHOLE = dict(policy='')
# Search: above 30 % of the context, all replies and results are dropped.
SEARCH = dict(policy='restart', threshold=0.3, max_edits=64)


def _suite(tasks, count, trials, context, *, tokens, observation, **limits):
  """A row: tokens of a completion, bytes of an observation, limits of an attempt."""
  agent = dict(kind='whitebox', max_tokens=tokens, observation_bytes=observation)
  agent['context'] = context
  return dict(tasks=tasks, count=count, trials=trials, agent=agent, **limits)


def _made(pipeline, trials, context, **limits):
  """Held-out tasks that a pipeline made."""
  tasks = dict(kind='harbor', dataset=f'workdir/{pipeline}' if pipeline else '')
  cells = dict(**_LONG, episode_s=3600.0)
  sandbox = dict(cpu_s=300, wall_s=600.0, memory_bytes=1 << 30)
  sandbox.update(workspace_bytes=256 << 20)
  return _suite(tasks, 100, trials, context, limits=sandbox, **(cells | limits))


# The agent of long tasks, with the whole conversation.
LONG = dict(kind='whitebox', max_tokens=4096, observation_bytes=16384)
_LONG = dict(tokens=LONG['max_tokens'], observation=LONG['observation_bytes'])
_SHORT = dict(tokens=1024, observation=4096)
SUITES = {
  # Drawn tasks: no dataset is needed.
  'reasoning': _suite(dict(kind='reasoning', levels=(0, 1, 2)), 100, 4, WHOLE, **_LONG),
  'humaneval': _suite(
    dict(kind='humaneval'), 164, 4, WHOLE, **_LONG, limits=dict(cpu_s=10, wall_s=20.0)
  ),
  'bfcl': _suite(dict(kind='bfcl'), 50, 4, WHOLE, **_LONG),
  'terminal': _suite(dict(kind='terminal'), 96, 4, WHOLE, **_SHORT),
  'repair': _suite(dict(kind='repair'), 96, 4, WHOLE, **_SHORT),
  'clicks': _suite(dict(kind='clicks'), 96, 3, WHOLE, **_SHORT, episode_s=300.0),
  # What pipelines made. SWE-bench and Terminal-Bench: means of four trials, apps of
  # VIBE and workbooks of MEWC: of three.
  'swe': _made('swe', 4, WHOLE),
  'terminal_gym': _made('terminal_gym', 4, WHOLE, episode_s=7200.0),
  'appdev': _made('appdev', 3, WHOLE),
  'deep_search': _made('deep_search', 4, SEARCH),
  'spreadsheets': _made('spreadsheets', 3, WHOLE),
  'slides': _made('slides', 3, WHOLE),
  'reasoning_made': _made('reasoning', 4, WHOLE, episode_s=1800.0),
  # MLE-bench: means of three trials.
  'ml': _made('ml', 3, WHOLE, episode_s=1800.0),
  'harbor': _made('', 4, WHOLE),
}
# The tasks of a suite for another agent: one that drafts, debugs and improves programs.
_AGENTS = {'ml_search': ('ml', dict(kind='m2jax_pipelines.ml.agent'))}


def get_config(variant: str = '') -> ml_collections.ConfigDict:
  name, agent = _AGENTS.get(variant, (variant, None))
  if name not in SUITES:
    known = ', '.join([*SUITES, *_AGENTS])
    raise ValueError(f'unknown suite {variant!r}: expected one of {known}')
  c = ml_collections.ConfigDict()
  row = ml_collections.ConfigDict(copy.deepcopy(SUITES[name]))
  row.agent = agent or row.agent
  c.suite = fields.complete(row, SuiteConfig)
  served = serve.get_config()
  c.mesh = dataclasses.asdict(sharding.MeshConfig(expert=-1))
  for name in ('engine', 'scheduler', 'gateway'):
    c[name] = served[name]
  return c
