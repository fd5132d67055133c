"""Evaluation suites: held-out tasks, trials, limits; results with intervals.

A suite runs against any OpenAI-compatible URL. Each episode is a line of a JSON-lines
file, written when it ends, so that an interrupted suite goes on; an infrastructure
failure is no result (law 5) and is tried again by the next run.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from m2jax import agents, sandbox, tasks
from m2jax.agents.agent import AgentConfig
from m2jax.checks import require
from m2jax.observe import stats
from m2jax.records import check_verdict
from m2jax_pipelines import records


@dataclasses.dataclass(frozen=True)
class SuiteConfig:
  """One suite. The context policy is the agent's.

  Attributes:
    tasks: distribution of the tasks.
    agent: who solves them, with its limits of tokens and of observations.
    split: split of the tasks.
    count: number of tasks.
    seed: seed of their order.
    trials: attempts at each task.
    temperature, top_p, top_k: sampling parameters. `top_k` 0 is not sent, for servers
      without that field.
    concurrency: attempts at a time.
    backend, limits: settings of the sandboxes.
    episode_s: time limit of an attempt; it fails then.
  """

  tasks: tasks.TasksConfig
  agent: AgentConfig
  split: str = 'held_out'
  count: int = 100
  seed: int = 0
  trials: int = 1
  temperature: float = 1.0
  top_p: float = 0.95
  top_k: int = 40
  concurrency: int = 8
  backend: str = 'namespaces'
  limits: sandbox.Limits = sandbox.Limits()
  episode_s: float = 1800.0

  def __post_init__(self):
    for name in ('count', 'trials', 'concurrency', 'episode_s'):
      require(self, getattr(self, name) > 0, name, 'above 0')
    require(self, not self.tasks.partial_credit, 'tasks', 'without partial credit')

  @property
  def sampling(self) -> dict[str, Any]:
    """Fields of each request."""
    out = {'temperature': self.temperature, 'top_p': self.top_p}
    return {**out, 'top_k': self.top_k} if self.top_k else out

  def specs(self) -> list[str]:
    """Specs of the tasks, each once.

    A split with fewer tasks than `count` gives all of them.
    """
    found: dict[str, None] = {}
    for index in range(self.count):
      options = dict(seed=self.seed)
      found[tasks.spec(self.tasks, self.split, index, **options)] = None
    return list(found)


@dataclasses.dataclass(frozen=True)
class Row:
  """Result of a family, or of 'all'.

  Attributes:
    family: its name.
    tasks, attempts: judged.
    failures: attempts with an infrastructure failure, not judged.
    success: mean over tasks of the mean over their attempts.
    low, high: 95 % Wilson interval with a task as the unit: attempts at one task are
      not independent.
  """

  family: str
  tasks: int
  attempts: int
  failures: int
  success: float
  low: float
  high: float


async def run(
  config: SuiteConfig,
  base_url: str,
  model: str,
  path: Path,
  *,
  api_key: str = 'none',
  on_end: Callable[[Mapping[str, Any]], None] = lambda row: None,
) -> list[Row]:
  """Runs what is not in the file yet; returns the table over all of it.

  Args:
    config: the suite.
    base_url: the server's URL, including '/v1'.
    model: its name there.
    path: JSON-lines file of the episodes.
    api_key: the server's API key.
    on_end: called with each episode's record.
  """
  log = records.Records(path)
  wanted = [(spec, trial) for spec in config.specs() for trial in range(config.trials)]
  done = {(r['task'], r['trial']) for r in log.rows if r['outcome'] == 'judged'}
  agent = agents.make(config.agent)
  endpoint = agents.Endpoint(base_url, api_key, model, config.sampling)
  left = collections.deque(item for item in wanted if item not in done)

  async def work() -> None:
    while left:
      spec, trial = left.popleft()
      on_end(log.append(**await _attempt(config, agent, endpoint, spec, trial)))

  try:
    async with asyncio.TaskGroup() as group:
      for _ in range(config.concurrency):
        group.create_task(work())
  finally:
    await agent.close()
    await sandbox.shutdown()
    log.close()
  return table(log.rows, wanted)


async def _attempt(config, agent, endpoint, spec: str, trial: int) -> dict[str, Any]:
  task = await asyncio.to_thread(tasks.make, spec)
  try:
    opened = agents.open_task(agent, task, config.backend, config.limits)
    async with opened as environment:
      episode = await agent.prepare(task, environment, endpoint)
      outcome = await agents.run_within(agent, task, episode, config.episode_s)
      success = await agent.reward(task, environment, outcome)
      outcome.error = outcome.error or '\n'.join(environment.notes)
      check_verdict(spec, success)
  except (sandbox.SandboxError, OSError) as error:
    outcome = agents.Outcome(end_reason='infrastructure', error=repr(error))
    success = 0.0
  judged = outcome.end_reason != 'infrastructure'
  return {
    'task': spec,
    'trial': trial,
    'family': task.family,
    'outcome': 'judged' if judged else 'infrastructure',
    'success': float(success),
    'end_reason': outcome.end_reason,
    'error': outcome.error,
    'tool_calls': outcome.tool_calls,
    'tool_errors': outcome.tool_errors,
    'wall_s': outcome.wall_s,
    'messages': list(outcome.messages),
    'tools': list(outcome.tools),
  }


def table(
  rows: Sequence[Mapping[str, Any]], wanted: Sequence[tuple[str, int]]
) -> list[Row]:
  """The rows of a table: all, then by family.

  Args:
    rows: records of episodes.
    wanted: (spec, trial) of the suite; other records are left out.
  """
  asked, judged, failed = set(wanted), {}, {}
  for row in rows:
    key = row['task'], row['trial']
    if key in asked:
      (judged if row['outcome'] == 'judged' else failed)[key] = row
  failed = {key: row for key, row in failed.items() if key not in judged}
  families = sorted({row['family'] for row in (*judged.values(), *failed.values())})
  return [_row(name, judged, failed) for name in ('all', *families)]


def _row(family: str, judged: Mapping, failed: Mapping) -> Row:
  def ours(found: Mapping) -> list:
    return [r for r in found.values() if family in ('all', r['family'])]

  by_task: dict[str, list[float]] = collections.defaultdict(list)
  for row in ours(judged):
    by_task[row['task']].append(row['success'])
  total, n = sum(sum(s) / len(s) for s in by_task.values()), len(by_task)
  low, high = stats.wilson(total, n)
  attempts, failures = sum(map(len, by_task.values())), len(ours(failed))
  return Row(family, n, attempts, failures, total / max(n, 1), low, high)


def digest(config: SuiteConfig) -> str:
  """A canonical text of what decides the results, to refuse a changed continuation."""
  free = dataclasses.replace(config, concurrency=1, backend='namespaces', count=1)
  return json.dumps(dataclasses.asdict(free), sort_keys=True)


def keep_settings(path: Path, config: SuiteConfig, model: str, fresh: bool) -> None:
  """Writes the settings of a run beside its episodes, `path`.

  Args:
    path: the JSON lines of `run`.
    config, model: the run's config and model.
    fresh: removes the episodes first.

  Raises:
    ValueError: the file has episodes of other settings.
  """
  settings = path.with_suffix('.settings.json')
  now = json.dumps({'model': model, 'suite': json.loads(digest(config))}, indent=2)
  if fresh:
    path.unlink(missing_ok=True)
  elif path.exists() and settings.exists() and settings.read_text() != now:
    raise ValueError(
      f'{path} was made with other settings ({settings}): --fresh starts anew'
    )
  settings.write_text(now)
