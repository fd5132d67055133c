"""One session with an OpenEnv server: reset, step, close over a WebSocket.

The protocol is that of PyPI `openenv` 0.10.0 (`openenv.core.env_server`: `types.py`,
`http_server.py`): `GET /schema`, and at `/ws`
JSON texts {"type": "reset" | "step" | "close", "data": ...}, each answered by one
{"type": "observation", "data": {"observation", "reward", "done"}} or {"type": "error",
"data": {"message", "code"}}. A connection is a session with an environment of its own.

The server is not trusted: its answers are bounded in bytes, depth and time, no redirect
is followed, and whatever else it does is a SandboxError.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from m2jax import sandbox

_MAX_DEPTH = 32
_CLOSE_S = 10.0
INSTALL = 'pip install "m2jax_pipelines[openenv]"'


class Refused(Exception):
  """The server refused an action as one that does not fit its schema."""


class Session:
  """A session; make it with `connect`."""

  def __init__(self, socket: Any, url: str, timeout_s: float):
    self._socket, self._url, self._timeout_s = socket, url, timeout_s

  async def request(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Sends 'reset' or 'step' and returns the observation's `data`.

    Raises:
      Refused: VALIDATION_ERROR, the action's fault.
      SandboxError: no valid answer in time.
    """
    import websockets

    try:
      async with asyncio.timeout(self._timeout_s):
        await self._socket.send(json.dumps({'type': kind, 'data': data}))
        text = await self._socket.recv()
    except (TimeoutError, OSError, websockets.WebSocketException) as error:
      raise self._failed(f'{kind}: {error!r}') from error
    answer = parse(text, self._url)
    found = answer.get('data')
    if not isinstance(found, dict):
      raise self._failed(f'{kind}: an answer without data')
    if answer.get('type') == 'error':
      said = f'{found.get("code")}: {str(found.get("message"))[:300]}'
      if found.get('code') == 'VALIDATION_ERROR' and kind == 'step':
        raise Refused(said)
      raise self._failed(f'{kind}: {said}')
    reward = found.get('reward')
    numeric = isinstance(reward, bool | int | float) and math.isfinite(reward)
    if (
      answer.get('type') != 'observation'
      or not isinstance(found.get('observation'), dict)
      or not isinstance(found.get('done', False), bool)
      or not (reward is None or numeric)
    ):
      raise self._failed(f'{kind}: no observation with reward and done')
    return found

  def _failed(self, what: str) -> sandbox.SandboxError:
    return sandbox.SandboxError(f'OpenEnv server {self._url}: {what}')


@contextlib.asynccontextmanager
async def connect(url: str, timeout_s: float, max_bytes: int) -> AsyncIterator[Session]:
  """A session with an environment of its own; leaving the context ends it.

  Args:
    url: http(s)://HOST:PORT of the server, and a path if it has one.
    timeout_s: limit of connecting and of each request.
    max_bytes: maximum size of an answer.

  Raises:
    SandboxError: there is no such server.
    ValueError: websockets is not installed.
  """
  try:
    import websockets
    from websockets.asyncio import client
  except ImportError as error:
    raise ValueError(f'the kind openenv needs websockets: {INSTALL}') from error

  class Connect(client.connect):
    def process_redirect(self, exc: Exception) -> Exception:
      return exc  # the config names the server

  try:
    socket = await Connect(
      f'ws{url.removeprefix("http")}/ws',
      max_size=max_bytes,
      max_queue=1,
      compression=None,
      proxy=None,
      open_timeout=timeout_s,
      close_timeout=timeout_s,
    )
  except (TimeoutError, OSError, websockets.WebSocketException) as error:
    raise sandbox.SandboxError(f'OpenEnv server {url}: {error!r}') from error
  try:
    yield Session(socket, url, timeout_s)
  finally:
    # The server frees the session before it closes the connection in return.
    with contextlib.suppress(TimeoutError, OSError, websockets.WebSocketException):
      async with asyncio.timeout(min(timeout_s, _CLOSE_S)):
        await socket.send('{"type": "close"}')
        async for _ in socket:
          pass
    socket.transport.abort()


async def schema(url: str, timeout_s: float, max_bytes: int) -> dict[str, Any]:
  """The JSON schema of the server's actions.

  Raises:
    SandboxError: no valid answer in time.
  """
  headers = {'accept-encoding': 'identity'}
  try:
    async with (
      asyncio.timeout(timeout_s),
      httpx.AsyncClient(trust_env=False, timeout=timeout_s) as http,
      http.stream('GET', f'{url}/schema', headers=headers) as response,
    ):
      if response.status_code != 200 or 'content-encoding' in response.headers:
        raise sandbox.SandboxError(
          f'OpenEnv server {url}: GET /schema: {response.status_code}'
        )
      data = b''
      async for chunk in response.aiter_raw():
        data += chunk
        if len(data) > max_bytes:
          raise sandbox.SandboxError(
            f'OpenEnv server {url}: GET /schema: more than {max_bytes} bytes'
          )
  except (TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
    raise sandbox.SandboxError(f'OpenEnv server {url}: {error!r}') from error
  action = parse(data, url).get('action')
  if not isinstance(action, dict):
    raise sandbox.SandboxError(f'OpenEnv server {url}: GET /schema: no action')
  return action


def parse(text: str | bytes, url: str) -> dict[str, Any]:
  """A JSON object of the server's, of finite numbers and limited depth.

  Raises:
    SandboxError: it is not one.
  """

  def refuse(name: str):
    raise ValueError(f'{name} is no JSON')

  try:
    found = json.loads(text, parse_constant=refuse)
    if not isinstance(found, dict):
      raise ValueError('no object')
    left = [(found, 1)]
    while left:
      value, depth = left.pop()
      if depth > _MAX_DEPTH:
        raise ValueError(f'deeper than {_MAX_DEPTH}')
      inner = value.values() if isinstance(value, dict) else value
      left += [(item, depth + 1) for item in inner if isinstance(item, dict | list)]
  except (ValueError, RecursionError) as error:
    raise sandbox.SandboxError(f'OpenEnv server {url}: {str(error)[:200]}') from error
  return found
