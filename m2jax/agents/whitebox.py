"""The white-box agent: completions, tool calls and observations over plain HTTP.

It knows a base URL and a key, as any agent does (facts/m2-and-forge.md §4.4); what
makes it white-box is that its loop is ours to change. Every episode ends in one of
`records.Trajectory`'s ways: a real end is judged, an infrastructure failure is
masked from the loss (law 5), so the two are never mixed up here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from m2jax.tasks.task import BadCall, Execute
from m2jax.text import markup
from m2jax.text.parsing import Status

_BROKEN = (Status.MALFORMED_STRUCTURE, Status.UNCLOSED_BLOCK, Status.UNCLOSED_THINKING)


class _Infrastructure(Exception):
  """The episode cannot go on, and not because of the model."""


class _ContextExceeded(Exception):
  """The prompt no longer fits the context."""


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """How an episode runs.

  Attributes:
    max_turns: completions per episode.
    max_tokens: response tokens per completion.
    system: system prompt; None leaves the model's default.
    observation_bytes: tool output beyond this is cut in its middle, with a marker.
    sampling: more fields of the request, e.g. {'temperature': 0}; a training session
      overrides what would bend the sampled distribution.
    retries: more attempts after a connection failure or an HTTP 429 or 5xx.
    retry_delay_s: pause before the first retry; doubles with each.
    request_timeout_s: wall-clock limit of one completion.
  """

  max_turns: int = 8
  max_tokens: int = 128
  system: str | None = None
  observation_bytes: int = 2048
  sampling: dict[str, Any] = dataclasses.field(default_factory=dict)
  retries: int = 3
  retry_delay_s: float = 0.2
  request_timeout_s: float = 600.0


@dataclasses.dataclass
class AgentOutcome:
  """How an episode ended.

  Attributes:
    ended: 'answer', 'max_turns', 'length', 'context' or 'infrastructure'.
    reason: for 'infrastructure', what broke.
    answer: text of the last assistant message if `ended` is 'answer', else ''.
    messages: the whole chat as OpenAI dicts.
    tool_calls: calls executed.
    tool_errors: calls that did not parse, named no tool or had wrong arguments.
    wall_s: wall-clock seconds.
  """

  ended: str = ''
  reason: str = ''
  answer: str = ''
  messages: list[dict] = dataclasses.field(default_factory=list)
  tool_calls: int = 0
  tool_errors: int = 0
  wall_s: float = 0.0


async def run(
  task: str | Sequence[dict],
  *,
  client: httpx.AsyncClient,
  base_url: str,
  api_key: str,
  model: str,
  tools: Sequence[dict],
  execute: Execute,
  config: AgentConfig,
) -> AgentOutcome:
  """Runs one episode; never raises for what the model or the infrastructure did.

  Args:
    task: the instruction, or the messages to start from.
    client: shared between agents (`agents.http.make_client`).
    base_url: of the gateway, with '/v1'.
    api_key: the session.
    tools: OpenAI tool dicts.
    execute: `(name, arguments)` to observation. Raises BadCall when the model is to
      blame; any other exception ends the episode as 'infrastructure'.
  """
  started = time.monotonic()
  outcome = AgentOutcome()
  if config.system is not None:
    outcome.messages.append({'role': 'system', 'content': config.system})
  if isinstance(task, str):
    outcome.messages.append({'role': 'user', 'content': task})
  else:
    outcome.messages.extend(task)
  post = _poster(client, base_url, api_key, config)
  body = {
    'model': model,
    'messages': outcome.messages,
    'tools': list(tools),
    'max_tokens': config.max_tokens,
    **config.sampling,
  }
  names = [tool['function']['name'] for tool in tools]
  try:
    outcome.ended = 'max_turns'
    for _ in range(config.max_turns):
      choice = (await post(body))['choices'][0]
      message = choice['message']
      outcome.messages.append(message)
      if choice['finish_reason'] == 'length':
        outcome.ended = 'length'
        break
      if not await _act(choice, names, execute, config, outcome):
        outcome.ended = 'answer'
        outcome.answer = message.get('content') or ''
        break
  except _ContextExceeded:
    outcome.ended = 'context'
  except _Infrastructure as error:
    outcome.ended, outcome.reason = 'infrastructure', str(error)
  outcome.wall_s = time.monotonic() - started
  return outcome


async def _act(
  choice: dict,
  names: Sequence[str],
  execute: Execute,
  config: AgentConfig,
  outcome: AgentOutcome,
) -> bool:
  """Carries out a message's tool calls. False when it has none: the answer."""
  message = choice['message']
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
    name = call['function']['name']
    try:
      if name not in names:
        raise BadCall(f'no tool {name!r}; use {", ".join(names)}')
      arguments = json.loads(call['function']['arguments'])
      observation = cut(await execute(name, arguments), config.observation_bytes)
      outcome.tool_calls += 1
    except BadCall as error:
      outcome.tool_errors += 1
      observation = f'error: {error}'
    except Exception as error:
      raise _Infrastructure(f'tool {name}: {error!r}') from error
    outcome.messages.append(
      {'role': 'tool', 'tool_call_id': call['id'], 'content': observation}
    )
  return True


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
  client: httpx.AsyncClient, base_url: str, api_key: str, config: AgentConfig
) -> Callable[[dict], Awaitable[dict]]:
  """A function that posts a completion request, with retries, and gives its body."""
  url = httpx.URL(base_url.rstrip('/') + '/chat/completions')
  headers = {'authorization': f'Bearer {api_key}', 'content-type': 'application/json'}
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
