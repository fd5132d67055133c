"""Episodes of an environment behind an OpenEnv server, as tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import re
import urllib.parse
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks import foreign
from m2jax_pipelines.tasks.openenv import client

REWARDS = ('last', 'sum', 'max')
TOOL = 'step'  # the tool that is an action of a server without tools
_NAME = re.compile('[A-Za-z0-9_-]{1,64}')
_MAX_TOOLS = 64
_MCP = 'CallToolAction'  # title of the action schema of a server with tools
# (event loop) -> {(url, sessions): its free sessions}
_free: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Config(foreign.ForeignConfig):
  """Distribution of the episodes.

  Attributes:
    url: http(s)://HOST:PORT of the running server.
    instruction: user's message; `{observation}` is what `reset` shows.
    text_field: field of an action that the content of the model's message becomes; ''
      if actions are tool calls: the tools that the server lists, or the one tool `step`
      whose parameters are the schema of its actions.
    reset: arguments of every `reset`, beside the seed.
    rewards: which of the steps' rewards is the episode's: 'last', 'sum' or 'max'.
    pay_turns: the turns are also paid their steps' rewards.
    sessions: maximum concurrent episodes on the server, whose own limit is
      `max_concurrent_envs`, 1 by default; the others wait.
    max_bytes: maximum size of an answer of the server.
  """

  kind: str = 'openenv'
  url: str = ''
  instruction: str = '{observation}'
  text_field: str = ''
  reset: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  rewards: str = 'last'
  pay_turns: bool = False
  sessions: int = 1
  max_bytes: int = 1 << 20

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'url', self.url.rstrip('/'))
    parts = urllib.parse.urlsplit(self.url)
    good = parts.scheme in ('http', 'https') and bool(parts.hostname)
    good = good and not set(self.url) & set('?#@')
    require(self, good or not self.url, 'url', 'http(s)://HOST:PORT')
    require(self, self.rewards in REWARDS, 'rewards', f'of {REWARDS}')
    require(self, self.sessions >= 1, 'sessions', '1 or more')
    require(self, self.max_bytes >= 1, 'max_bytes', '1 or more')


class _Environment:
  """A session as the `respond` of a `tasks.Environment`."""

  def __init__(self, session: client.Session, config: Config, tools: Sequence[Mapping]):
    self._session, self._config, self._tools = session, config, tools
    self._names = {tool['function']['name'] for tool in tools}
    self._turns = 0
    self._unpaid = 0.0
    self.rewards: list[float] = []

  async def respond(self, message: Mapping[str, Any]) -> list[dict] | None:
    """Steps once per call, or by the content; see `tasks.Environment`."""
    self._turns += 1
    calls = message.get('tool_calls') or ()
    over = self._turns >= self._config.max_turns
    if not calls:
      if not self._config.text_field:
        return None  # the model's answer
      action = {self._config.text_field: message.get('content') or ''}
      shown, done = await self._step(action)
      return None if done or over else [{'role': 'user', 'content': shown}]
    texts = []
    for call in calls:
      shown, done = await self._call(call['function'])
      if done:
        return None
      texts.append(shown)
    return None if over else foreign.results(message, texts)

  async def turn_reward(self) -> float:
    """What the steps since the last call were rewarded with."""
    paid, self._unpaid = self._unpaid, 0.0
    return paid

  async def _call(self, function: Mapping[str, Any]) -> tuple[str, bool]:
    name = function['name']
    if name not in self._names:
      return f'error: no tool {name!r}; use {", ".join(sorted(self._names))}', False
    try:
      arguments = json.loads(function['arguments'])
    except (TypeError, ValueError, RecursionError):
      arguments = None
    if not isinstance(arguments, dict):
      return 'error: the arguments are not a JSON object', False
    if self._tools[0].get('own'):  # the one tool, an action
      return await self._step(arguments)
    call = {'type': 'call_tool', 'tool_name': name, 'arguments': arguments}
    return await self._step(call)

  async def _step(self, action: Mapping[str, Any]) -> tuple[str, bool]:
    try:
      found = await self._session.request('step', action)
    except client.Refused as error:
      return f'error: {error}', False
    if found.get('reward') is not None:
      self.rewards.append(float(found['reward']))
      self._unpaid += self.rewards[-1]
    return text(found['observation']), found.get('done', False)


@dataclasses.dataclass(frozen=True)
class _Open(task_lib.Environment):
  """rewards: of the steps so far."""

  rewards: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class OpenEnvTask:
  """A `tasks.Task`; what it asks and offers is known when it is open."""

  spec: str
  split: str
  number: int
  config: Config
  instruction: str = ''
  tools: Sequence[Mapping[str, Any]] = ()
  baseline_calls: int = 1

  @property
  def family(self) -> str:
    return _family(self.config)

  @property
  def max_tool_calls(self) -> int:
    return self.config.max_turns

  @contextlib.asynccontextmanager
  async def open(
    self, *, backend: str = '', limits: sandbox.Limits | None = None
  ) -> AsyncIterator[task_lib.Environment]:
    """Opens a session and resets it; see `tasks.Task.open`."""
    c = self.config
    bounds = (c.timeout_s, c.max_bytes)
    if not c.url:
      raise ValueError(f'task {self.spec}: set tasks.url, the server of the episodes')
    free = _free.setdefault(asyncio.get_running_loop(), {})
    async with (
      free.setdefault((c.url, c.sessions), asyncio.Semaphore(c.sessions)),
      client.connect(c.url, *bounds) as session,
    ):
      try:
        tools = [] if c.text_field else await _tools(session, c)
        first = await session.request('reset', {**c.reset, 'seed': self.number})
      except client.Refused as error:
        raise sandbox.SandboxError(f'OpenEnv server {c.url}: {error}') from error
      environment = _Environment(session, c, tools)
      yield _Open(
        foreign.no_tool,
        turn_reward=environment.turn_reward if c.pay_turns else None,
        instruction=c.instruction.replace('{observation}', text(first['observation'])),
        tools=[{k: v for k, v in tool.items() if k != 'own'} for tool in tools],
        respond=environment.respond,
        rewards=environment.rewards,
      )

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """The episode's reward, on the scale of `reward_range`; without any, 0."""
    assert isinstance(environment, _Open)
    rewards = environment.rewards
    if not rewards:
      return 0.0
    of = {'last': rewards[-1], 'sum': sum(rewards), 'max': max(rewards)}
    return foreign.verdict(self.spec, of[self.config.rewards], self.config)


async def _tools(session: client.Session, config: Config) -> list[dict]:
  """The tools that the server lists, or its actions as one tool.

  Raises:
    SandboxError: they are not valid.
  """
  action = await client.schema(config.url, config.timeout_s, config.max_bytes)
  if action.get('title') != _MCP:
    properties = dict(action.get('properties') or {})
    properties.pop('metadata', None)
    parameters = {**action, 'properties': properties}
    return [{**_tool(TOOL, 'Acts once.', parameters), 'own': True}]
  found = await session.request('step', {'type': 'list_tools'})
  listed = found['observation'].get('tools')
  try:
    tools = [_tool(t['name'], t['description'], t['input_schema']) for t in listed]
    names = [tool['function']['name'] for tool in tools]
    if not 0 < len(set(names)) == len(names) <= _MAX_TOOLS:
      raise ValueError(f'{len(names)} tools, {len(set(names))} names')
    if not all(_NAME.fullmatch(name) for name in names):
      raise ValueError(f'a name that is not {_NAME.pattern}')
  except (KeyError, TypeError, ValueError) as error:
    raise sandbox.SandboxError(
      f'OpenEnv server {config.url}: list_tools: {str(error)[:200]}'
    ) from error
  return tools


def _tool(name: str, description: Any, parameters: Any) -> dict:
  if not isinstance(name, str) or not isinstance(parameters, dict):
    raise ValueError('a tool without a name or a schema')
  function = {'name': name, 'description': str(description), 'parameters': parameters}
  return {'type': 'function', 'function': function}


def text(observation: Mapping[str, Any]) -> str:
  """What an observation shows the model.

  A tool's result is its text, or its error; of other observations the only field if
  it is a text, else JSON of all fields but `metadata`.
  """
  fields = {k: v for k, v in observation.items() if k != 'metadata' and v is not None}
  if 'tool_name' in fields:
    error, result = fields.get('error'), fields.get('result')
    if error is not None:
      said = error.get('message') if isinstance(error, dict) else error
      return f'error: {said}'
    if isinstance(result, dict) and isinstance(result.get('content'), list):
      parts = [part for part in result['content'] if isinstance(part, dict)]
      return '\n'.join(str(part.get('text', '')) for part in parts)
    return result if isinstance(result, str) else json.dumps(result)
  if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
    return only
  return json.dumps(fields, ensure_ascii=False)


def _family(config: Config) -> str:
  return urllib.parse.urlsplit(config.url).netloc or 'openenv'


def families(config: Config) -> Mapping[str, float]:
  """One family, the server's."""
  return dict(config.weights) or {_family(config): 1.0}


def spec(
  split: str, index: int, seed: int, config: Config, family: str | None = None
) -> str:
  """The spec of the index-th episode; see `tasks.spec`."""
  return foreign.spec(config, 'url', split, index, seed)


def make(spec: str) -> OpenEnvTask:
  """The task of a spec, without a request. Raises ValueError if it is none.

  The seed of its `reset` is a number below 2³¹, of which splits share none.
  """
  split, seed, index, config = foreign.parse(spec, Config, 'url')
  digest = hashlib.sha256(f'{split}/{seed}/{index}'.encode()).digest()
  part = int.from_bytes(digest[:4]) % (2**31 // len(foreign.SPLITS))
  number = part * len(foreign.SPLITS) + foreign.SPLITS.index(split)
  return OpenEnvTask(spec, split, number, config)


@dataclasses.dataclass(frozen=True)
class TeacherConfig(foreign.TeacherConfig):
  """A scripted teacher."""

  kind: str = 'openenv'
