"""Requests of an agent to the model: completions and token counts, with retries.

Errors of the gateway become one of two exceptions: of the context, which the agent can
handle, or of the infrastructure, which masks the episode (law 5).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import httpx

from m2jax.agents import scaffold
from m2jax.agents.agent import Endpoint


class InfrastructureFailure(Exception):
  """The episode cannot continue, for a reason other than the model."""


class ContextExceeded(Exception):
  """The prompt exceeds the context."""


class Retries(Protocol):
  """The settings that are used here; see `whitebox.WhiteboxConfig`."""

  retries: int
  retry_delay_s: float
  request_timeout_s: float


def make(
  client: httpx.AsyncClient,
  endpoint: Endpoint,
  config: Retries,
  tools: Sequence[Mapping[str, Any]],
) -> tuple[Callable[[dict], Awaitable[dict]], Callable]:
  """Makes functions that post a completion request, and that count tokens.

  Both retry. Tokens are counted with `tools`; those of sub-agents are at most these.
  """
  base = endpoint.base_url.rstrip('/')
  headers = {
    'authorization': f'Bearer {endpoint.api_key}',
    'content-type': 'application/json',
  }
  timeout = httpx.Timeout(config.request_timeout_s).as_dict()

  async def send(url: str, body: dict) -> dict:
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
          raise ContextExceeded
        break
    raise InfrastructureFailure(f'gateway: {failure}')

  async def post(body: dict) -> dict:
    reply = await send(f'{base}/chat/completions', body)
    for choice in reply.get('choices', ()):
      if 'parse_status' not in choice:  # not of this gateway
        choice['message'] = scaffold.with_thinking(choice['message'])
    return reply

  async def count(messages: list[dict]) -> tuple[int, int]:
    body = {'model': endpoint.model, 'messages': messages}
    if tools:  # servers refuse an empty list
      body['tools'] = list(tools)
    try:
      found = await send(f'{base.removesuffix("/v1")}/tokenize', body)
    except InfrastructureFailure as error:
      raise InfrastructureFailure(
        f'{error} (agent.context.policy and .tokens need POST /tokenize of the server, '
        'as vLLM and this gateway have it)'
      ) from error
    return found['count'], found['max_model_len']

  return post, count


def _error_code(response: httpx.Response) -> str | None:
  try:
    return response.json()['error']['code']
  except (ValueError, KeyError, TypeError):
    return None
