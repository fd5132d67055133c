"""The white-box agent: completions, tool calls and observations over plain HTTP.

It knows a base URL and a key, as any agent does (docs/facts/m2-and-forge.md §4.4); what
makes it white-box is that its loop is ours to change. A real end of an episode is
judged, an infrastructure failure is masked from the loss (law 5).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from m2jax.agents import http
from m2jax.agents.agent import Agent, AgentConfig, Endpoint, Outcome
from m2jax.tasks import BadCall, Environment, Execute, Task
from m2jax.text import markup
from m2jax.text.parsing import Status

_BROKEN = (Status.MALFORMED_STRUCTURE, Status.UNCLOSED_BLOCK, Status.UNCLOSED_THINKING)


class _Infrastructure(Exception):
  """The episode cannot go on, and not because of the model."""


class _ContextExceeded(Exception):
  """The prompt no longer fits the context."""


@dataclasses.dataclass(frozen=True)
class WhiteboxConfig(AgentConfig):
  """How an episode runs. A task sets how many turns it may take.

  Attributes:
    max_tokens: response tokens per completion.
    observation_bytes: tool output beyond this is cut in its middle, with a marker.
    sampling: more fields of the request, e.g. {'temperature': 0}; a training session
      overrides what would bend the sampled distribution.
    retries: more attempts after a connection failure or an HTTP 429 or 5xx.
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
    post: posts a completion request and gives its body.
    body: of each request; its messages grow.
    execute: runs tool calls, those of `names`.
    max_turns: completions that it may take.
    started_s: on the monotonic clock.
    outcome: what becomes of it.
  """

  post: Callable[[dict], Awaitable[dict]]
  body: dict[str, Any]
  execute: Execute
  names: list[str]
  max_turns: int
  started_s: float
  outcome: Outcome


class Whitebox(Agent):
  """The agent; its methods never raise for what the model or the gateway did."""

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
      max_turns=task.max_tool_calls + 1,
      started_s=time.monotonic(),
      outcome=Outcome(messages=messages),
    )

  async def run(self, episode: _Episode) -> None:
    outcome = episode.outcome
    try:
      for _ in range(episode.max_turns):
        choice = (await episode.post(episode.body))['choices'][0]
        message = choice['message']
        outcome.messages.append(message)
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

  async def _act(self, choice: dict, episode: _Episode) -> bool:
    """Carries out a message's tool calls. False when it has none: the answer."""
    outcome, message = episode.outcome, choice['message']
    calls = message.get('tool_calls') or ()
    if not calls:
      # The gateway shows the markup of a call that it could not parse, and of one that
      # the model only quotes; the parser's verdict tells them apart.
      broken = choice.get('parse_status') in _BROKEN
      if not broken or markup.TOOL_CALL not in (message.get('content') or ''):
        return False
      # No call to reply to, so no tool message can carry this.
      outcome.tool_errors += 1
      outcome.messages.append({'role': 'user', 'content': 'error: malformed tool call'})
      return True
    for call in calls:
      observation = await self._call(call['function'], episode)
      outcome.messages.append(
        {'role': 'tool', 'tool_call_id': call['id'], 'content': observation}
      )
    return True

  async def _call(self, function: dict, episode: _Episode) -> str:
    """Runs one call; gives what the model reads of it."""
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


def cut(text: str, limit_bytes: int) -> str:
  """The text if it fits, else its first and last bytes with the loss named between.

  Lone surrogates become '?': what comes back can be sent.

  Args:
    limit_bytes: most UTF-8 bytes kept; the marker comes on top.
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
  """A function that posts a completion request, with retries, and gives its body."""
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
