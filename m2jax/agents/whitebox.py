"""The white-box agent: completions, tool calls and observations over plain HTTP.

It knows a base URL and a key, as any agent does (docs/facts/m2-and-forge.md §4.4); it
is white-box because its loop is part of this code. An infrastructure failure is masked
from the loss, every other end of an episode is judged (law 5).
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import httpx

from m2jax.agents import http
from m2jax.agents.agent import Agent, AgentConfig, Endpoint, Outcome
from m2jax.tasks import BadCall, Environment, Execute, Task
from m2jax.text import markup
from m2jax.text.parsing import Status

_BROKEN = (Status.MALFORMED_STRUCTURE, Status.UNCLOSED_BLOCK, Status.UNCLOSED_THINKING)


class _Infrastructure(Exception):
  """The episode cannot continue, for a reason other than the model."""


class _ContextExceeded(Exception):
  """The prompt exceeds the context."""


@dataclasses.dataclass(frozen=True)
class WhiteboxConfig(AgentConfig):
  """How an episode runs. The task limits the number of turns.

  Attributes:
    max_tokens: maximum response tokens per completion.
    observation_bytes: maximum bytes of an observation; the middle of a longer tool
      output is replaced by a marker.
    sampling: additional fields of the request, e.g. {'temperature': 0}; a training
      session overrides those that would change the sampled distribution.
    retries: additional attempts after a connection failure or an HTTP 429 or 5xx.
    retry_delay_s: pause before the first retry; doubles with each.
    request_timeout_s: wall-clock limit of one completion.
  """

  kind: str = 'whitebox'
  max_tokens: int = 128
  observation_bytes: int = 2048
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  retries: int = 3
  retry_delay_s: float = 0.2
  request_timeout_s: float = 600.0


Config = WhiteboxConfig


@dataclasses.dataclass
class _Episode:
  """One episode.

  Attributes:
    post: posts a completion request and returns the body of the response.
    body: body of the requests; each turn extends its messages.
    execute: runs calls of the tools in `names`.
    names: names of the task's tools.
    independent: those whose calls of one turn run at the same time.
    max_turns: maximum number of completions.
    started_s: start on the monotonic clock.
    outcome: the result, filled in as the episode proceeds.
  """

  post: Callable[[dict], Awaitable[dict]]
  body: dict[str, Any]
  execute: Execute
  names: list[str]
  independent: frozenset[str]
  max_turns: int
  started_s: float
  outcome: Outcome


class Whitebox(Agent):
  """The agent; its methods raise for no output of the model or the gateway."""

  def __init__(self, config: WhiteboxConfig):
    self._config = config
    self._client = http.make_client()

  async def prepare(
    self, task: Task, environment: Environment, endpoint: Endpoint
  ) -> _Episode:
    config, messages = self._config, []
    if config.system is not None:
      messages.append({'role': 'system', 'content': config.system})
    messages.append({'role': 'user', 'content': task.instruction})
    body = {
      'model': endpoint.model,
      'messages': messages,
      'tools': list(task.tools),
      'max_tokens': config.max_tokens,
      **config.sampling,
      **endpoint.sampling,
    }
    return _Episode(
      post=_poster(self._client, endpoint, config),
      body=body,
      execute=environment.execute,
      names=[tool['function']['name'] for tool in task.tools],
      independent=environment.independent,
      max_turns=task.max_tool_calls + 1,
      started_s=time.monotonic(),
      outcome=Outcome(messages=list(messages)),
    )

  async def run(self, episode: _Episode) -> None:
    outcome = episode.outcome
    try:
      for _ in range(episode.max_turns):
        choice = (await episode.post(episode.body))['choices'][0]
        message = choice['message']
        self._add(message, episode)
        if choice['finish_reason'] == 'length':
          outcome.end_reason = 'length'
          return
        if not await self._act(choice, episode):
          outcome.end_reason, outcome.answer = 'answer', message.get('content') or ''
          return
      outcome.end_reason = 'max_turns'
    except _ContextExceeded:
      outcome.end_reason = 'context'
    except _Infrastructure as error:
      outcome.end_reason, outcome.error = 'infrastructure', str(error)

  async def finish(self, episode: _Episode) -> Outcome:
    episode.outcome.wall_s = time.monotonic() - episode.started_s
    return episode.outcome

  async def close(self) -> None:
    await self._client.aclose()

  def _add(self, message: dict, episode: _Episode) -> None:
    episode.body['messages'].append(message)
    episode.outcome.messages.append(message)

  async def _act(self, choice: dict, episode: _Episode) -> bool:
    """Runs a message's tool calls; returns False if it has none and is the answer."""
    outcome, message = episode.outcome, choice['message']
    calls = message.get('tool_calls') or ()
    if not calls:
      # Content contains tool-call markup if a call could not be parsed or was only
      # quoted by the model; the parser's status distinguishes the two.
      broken = choice.get('parse_status') in _BROKEN
      if not broken or markup.TOOL_CALL not in (message.get('content') or ''):
        return False
      # A tool message needs the id of a call, so this is a user message.
      outcome.tool_errors += 1
      error = {'role': 'user', 'content': 'error: malformed tool call'}
      self._add(error, episode)
      return True
    names = {call['function']['name'] for call in calls}
    run = [functools.partial(self._timed, call['function'], episode) for call in calls]
    results = await in_order(run, together=names <= episode.independent)
    for call, (observation, seconds) in zip(calls, results, strict=True):
      shown = {'role': 'tool', 'tool_call_id': call['id'], 'content': observation}
      episode.body['messages'].append(shown)
      outcome.messages.append(shown | {'duration_s': seconds})
    return True

  async def _timed(self, function: dict, episode: _Episode) -> tuple[str, float]:
    """Runs one call; returns the observation and its duration in seconds."""
    started_s = time.monotonic()
    observation = await self._call(function, episode)
    return observation, round(time.monotonic() - started_s, 4)

  async def _call(self, function: dict, episode: _Episode) -> str:
    """Runs one call; returns the observation."""
    outcome, name = episode.outcome, function['name']
    try:
      if name not in episode.names:
        raise BadCall(f'no tool {name!r}; use {", ".join(episode.names)}')
      shown = await episode.execute(name, json.loads(function['arguments']))
    except BadCall as error:
      outcome.tool_errors += 1
      return f'error: {error}'
    except Exception as error:
      raise _Infrastructure(f'tool {name}: {error!r}') from error
    outcome.tool_calls += 1
    return cut(shown, self._config.observation_bytes)


make = Whitebox


async def in_order(
  calls: Sequence[Callable[[], Awaitable[Any]]], *, together: bool
) -> list[Any]:
  """Results of calls in their order: run at the same time, or one after the other.

  An exception cancels the calls that run.
  """
  if not together:
    return [await call() for call in calls]
  try:
    async with asyncio.TaskGroup() as group:
      running = [group.create_task(call()) for call in calls]
  except ExceptionGroup as errors:
    raise errors.exceptions[0] from None
  return [task.result() for task in running]


def cut(text: str, limit_bytes: int) -> str:
  """Returns the text if it fits, else its first and last bytes around a marker.

  Lone surrogates become '?', so that the result can be encoded.

  Args:
    limit_bytes: maximum UTF-8 bytes of the text, not counting the marker.
  """
  data = text.encode('utf-8', 'replace')
  if len(data) <= limit_bytes:
    return data.decode()
  tail_bytes = limit_bytes // 2
  head = data[: limit_bytes - tail_bytes].decode('utf-8', 'ignore')
  tail = data[len(data) - tail_bytes :].decode('utf-8', 'ignore')
  return f'{head}\n[{len(data) - limit_bytes} bytes cut]\n{tail}'


def _poster(
  client: httpx.AsyncClient, endpoint: Endpoint, config: WhiteboxConfig
) -> Callable[[dict], Awaitable[dict]]:
  """Makes a function that posts a completion request, with retries."""
  url = httpx.URL(endpoint.base_url.rstrip('/') + '/chat/completions')
  headers = {
    'authorization': f'Bearer {endpoint.api_key}',
    'content-type': 'application/json',
  }
  timeout = httpx.Timeout(config.request_timeout_s).as_dict()

  async def post(body: dict) -> dict:
    content = json.dumps(body).encode()
    for attempt in range(config.retries + 1):
      if attempt:
        await asyncio.sleep(config.retry_delay_s * 2 ** (attempt - 1))
      request = httpx.Request(
        'POST', url, headers=headers, content=content, extensions={'timeout': timeout}
      )
      try:
        response = await client.send(request)
      except httpx.TransportError as error:
        failure = f'{type(error).__name__}: {error}'
        continue
      if response.status_code == 200:
        return json.loads(response.content)
      failure = f'HTTP {response.status_code}: {response.text[:500]}'
      if response.status_code not in (429, 500, 502, 503, 504):
        if _error_code(response) == 'context_length_exceeded':
          raise _ContextExceeded
        break
    raise _Infrastructure(f'gateway: {failure}')

  return post


def _error_code(response: httpx.Response) -> str | None:
  try:
    return response.json()['error']['code']
  except (ValueError, KeyError, TypeError):
    return None
