"""A black-box agent: any command that finds a model API in its environment.

The command runs unmodified in the task's sandbox, in its workspace, without a network.
Its only way out is a port on 127.0.0.1 that leads to the gateway as this episode
(`relay`); the key in its environment is a dummy. The trajectory is what the gateway saw
(docs/facts/m2-and-forge.md §4.4). The answer is what the command prints.

How an episode ends; the first that applies:

  max_turns       more requests than `relay.requests`
  limit           another limit of `relay.Limits` for the whole episode
  infrastructure  the gateway failed the last request, or the command never got a
                  completion, so that nothing was sampled: masked from the loss (law 5)
  timeout         killed after `sandbox.Limits.wall_s`
  exit            a status other than 0, or killed for its output or memory
  answer          status 0

The task judges 'answer'; the others have success 0, except for 'infrastructure'.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import itertools
import re
import shlex
import string
import time
from collections.abc import Mapping
from pathlib import Path

from m2jax import kinds, sandbox, tasks
from m2jax.agents import http, relay, transcript
from m2jax.agents.agent import Agent, AgentConfig, AuthorConfig, Endpoint, Outcome
from m2jax.checks import require
from m2jax.tasks import Environment, Task

DUMMY_KEY = 'the-relay-has-the-key'
# What clients of the two APIs read; `{url}` is the root, without /v1.
ENVIRONMENT = {
  'OPENAI_BASE_URL': '{url}/v1',
  'OPENAI_API_BASE': '{url}/v1',
  'OPENAI_API_KEY': '{key}',
  'ANTHROPIC_BASE_URL': '{url}',
  'ANTHROPIC_API_KEY': '{key}',
  'MODEL': '{model}',
  'HOME': '/tmp',  # the workspace belongs to the task
}
_REPLACED = ('url', 'key', 'model')
_NAME = re.compile('[A-Za-z_][A-Za-z0-9_]*')
_SHOWN_CHARS = 500  # of a command's errors


@dataclasses.dataclass(frozen=True)
class BlackboxConfig(AgentConfig):
  """A command and what it may see and use.

  Attributes:
    command: bash command line; the instruction is in `$TASK`. It prints the answer.
    environment: variables; `{url}`, `{key}` and `{model}` are replaced, and other
      braces are doubled. It extends and overrides `ENVIRONMENT`.
    read_only: directories of this machine that the command sees at the same path, such
      as the virtual environment of the agent. Their `bin` is in PATH.
    port: on 127.0.0.1 in the sandbox.
    relay: limits of the traffic.
    response_timeout_s: timeout of a response from the gateway.
    hints: whether the gateway gets what the command declares about its requests
      (`gateway.hints`). Some exempt a completion from training: then whatever runs
      inside the sandbox can do so.
    author: author of demonstrations, which are made by running the command.
  """

  kind: str = 'blackbox'
  command: str = ''
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  read_only: tuple[str, ...] = ()
  port: int = 8080
  relay: relay.Limits = relay.Limits()
  response_timeout_s: float = 600.0
  hints: bool = False
  author: AuthorConfig = AuthorConfig()

  def __post_init__(self):
    check = functools.partial(require, self)
    check(bool(self.command.strip()), 'command', 'a command line')
    check(0 < self.port < 65_536, 'port', 'between 1 and 65535')
    check(self.response_timeout_s > 0, 'response_timeout_s', 'positive')
    for name, text in self.environment.items():
      is_name = isinstance(name, str) and _NAME.fullmatch(name)
      check(is_name, 'environment', f'names and texts; {name!r} is no name')
      check(isinstance(text, str), 'environment', f'texts; {name}: {text!r} is no text')
      check(
        _can_be_filled(text),
        'environment',
        "texts with {url}, {key} and {model}, in which other braces are doubled: '{{' "
        f"for '{{'; {name}: {text!r} is none",
      )
    for directory in map(Path, self.read_only):
      absolute = directory.is_absolute() and directory.is_dir()
      check(absolute, 'read_only', f'absolute directories; {directory} is none')
      own = any(map(directory.is_relative_to, ('/tmp', '/workspace')))
      check(
        not own,
        'read_only',
        'directories outside /tmp and /workspace, of which every command has its own; '
        f'{directory} is below one',
      )
      hidden = not _shows_tasks(directory.resolve())
      check(
        hidden,
        'read_only',
        f'without m2jax and the packages of its tasks; {directory} has one: tasks know '
        'their answers; install the agent into an environment of its own',
      )


Config = BlackboxConfig


def _can_be_filled(text: str) -> bool:
  """Whether `format_map` replaces nothing in a text but `_REPLACED`."""
  try:
    parts = list(string.Formatter().parse(text))
  except ValueError:  # a single brace
    return False
  return all(
    field is None or (field in _REPLACED and not form and conversion is None)
    for _, field, form, conversion in parts
  )


def _shows_tasks(directory: Path) -> bool:
  """Whether a command that sees the directory could import a package with tasks."""
  names = {'m2jax_pipelines', *kinds.packages(tasks.__name__)}
  found = filter(None, map(importlib.util.find_spec, names))
  places = [spec.submodule_search_locations or [spec.origin] for spec in found]
  ours = [Path(place).resolve() for place in itertools.chain(*places)]
  return any(directory == our or directory in our.parents for our in ours)


def _visible(directory: str) -> list[tuple[str, str]]:
  """`Host.read_only` for a directory; a virtual environment with its interpreter."""
  seen = [directory]
  python = Path(directory, 'bin', 'python')
  if python.exists():
    base = python.resolve().parent.parent
    if not base.is_relative_to('/usr') and not base.is_relative_to(directory):
      seen.append(str(base))
  return [(path, path) for path in seen]


@dataclasses.dataclass
class _Episode:
  """One episode."""

  box: sandbox.Sandbox
  text: str
  relay: relay.Relay
  started_s: float
  outcome: Outcome


class Blackbox(Agent):
  """The agent."""

  def __init__(self, config: BlackboxConfig):
    self._config = config
    self._client = http.make_client()
    if config.read_only:
      seen = [pair for path in config.read_only for pair in _visible(path)]
      self.host = sandbox.Host(read_only=tuple(dict.fromkeys(seen)))

  async def prepare(
    self, task: Task, environment: Environment, endpoint: Endpoint
  ) -> _Episode:
    config, box = self._config, environment.box
    if box is None:
      raise ValueError(
        f'task {task.spec}: has no sandbox (`Environment.box`) for the command of a '
        'black-box agent'
      )
    if environment.turn_reward is not None:
      raise ValueError(
        f'task {task.spec}: pays turns (`Environment.turn_reward`), which end unseen '
        'inside a command: use a white-box agent'
      )
    async with contextlib.AsyncExitStack() as stack:
      way = relay.Relay(
        await box.listen(config.port),
        endpoint,
        self._client,
        config.relay,
        config.response_timeout_s,
        config.hints,
      )
      stack.push_async_callback(way.close)
      exports = self._exports(way.port, endpoint.model, task.instruction)
      await way.start()
      stack.pop_all()
    return _Episode(
      box=box,
      text=exports + config.command,
      relay=way,
      started_s=time.monotonic(),
      outcome=Outcome(),
    )

  def _exports(self, port: int, model: str, instruction: str) -> str:
    """The lines that set the command's variables."""
    values = {'url': f'http://127.0.0.1:{port}', 'key': DUMMY_KEY, 'model': model}
    given = {**ENVIRONMENT, **self._config.environment}
    variables = {name: text.format_map(values) for name, text in given.items()}
    variables['TASK'] = instruction
    lines = [f'export {k}={shlex.quote(v)}\n' for k, v in variables.items()]
    if self.host is not None:  # a container has the PATH of its image
      seen = ':'.join(f'{place}/bin' for _, place in self.host.read_only)
      lines.insert(0, f'export PATH={shlex.quote(seen)}:"$PATH"\n')
    return ''.join(lines)

  async def run(self, episode: _Episode) -> None:
    way, outcome = episode.relay, episode.outcome
    running = asyncio.ensure_future(episode.box.exec(episode.text))
    try:
      await asyncio.wait({running, way.over}, return_when='FIRST_COMPLETED')
      if running.done():
        outcome.end_reason, outcome.error = _end(running.result(), way)
        if outcome.end_reason == 'answer':
          outcome.answer = running.result().stdout.strip()
        return
      limit = way.over.result()
      outcome.end_reason = 'max_turns' if limit == 'requests' else 'limit'
      outcome.error = f'more than relay.{limit}={getattr(self._config.relay, limit)}'
    finally:
      running.cancel()
      await asyncio.gather(running, return_exceptions=True)

  async def finish(self, episode: _Episode) -> Outcome:
    way, outcome = episode.relay, episode.outcome
    await way.close()
    outcome.messages, outcome.tools = transcript.of(way.last)
    outcome.tool_calls = sum(m.get('role') == 'tool' for m in outcome.messages)
    outcome.wall_s = time.monotonic() - episode.started_s
    return outcome

  async def close(self) -> None:
    await self._client.aclose()


make = Blackbox


def _end(result: sandbox.ExecResult, way: relay.Relay) -> tuple[str, str]:
  """End reason and details of a command that ended."""
  how = f'exit {result.returncode}'
  if result.timed_out:
    how = f'killed after {result.wall_s:.0f} s'
  elif result.oom:
    how += ', out of memory'
  said = (result.stderr or result.stdout).strip()[-_SHOWN_CHARS:]
  details = f'{how}: {said}' if said else how
  if way.failure:
    return 'infrastructure', f'{way.failure}; {details}'
  if not way.begun:
    return 'infrastructure', f'the command got no completion; {details}'
  if result.timed_out:
    return 'timeout', details
  if result.returncode:
    return 'exit', details
  return 'answer', ''
