"""A scheduler over HTTP: `engine_client.RemoteScheduler` is the other side.

- POST /generate: a request (`wire`); the response is a stream of frames: new tokens as
  they are drawn, a sign of life every few seconds, and the result or an error.
- POST /cancel: the id of a request, which then ends with the tokens so far.
- GET /health: the scheduler's statistics; 503 once it has stopped.
- GET /pages?epoch=EPOCH&after=NUMBER: changes of the cached pages (`page_log`).

A client that disconnects cancels its requests. With a key, every request needs it as
`Authorization: Bearer KEY`; without one the server listens on loopback only.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import urllib.parse
from collections.abc import Callable
from typing import Any

from absl import logging

from m2jax import frames
from m2jax.forge.config import EngineServerConfig
from m2jax.forge.remote import wire
from m2jax.forge.remote.page_log import PageLog
from m2jax.gateway import hosts, receiving, streaming
from m2jax.gateway.counters import Counters
from m2jax.gateway.errors import ApiError, too_large
from m2jax.gateway.listener import Listener
from m2jax.rollout.api import EngineError, NewTokens, Serving


class EngineServer:
  """Serves a scheduler; a context manager."""

  def __init__(self, config: EngineServerConfig, scheduler: Serving, key: str = ''):
    """Prepares the server.

    Args:
      scheduler: serves the requests; has been started.
      key: the shared secret; '' needs none.

    Raises:
      ValueError: the host is not loopback, and there is no key.
    """
    if not key and not hosts.is_loopback(config.host):
      raise ValueError(
        f'EngineServerConfig.host={config.host!r}: beyond loopback the engine needs a '
        'key'
      )
    self.counters = Counters()
    self._listener = Listener(
      'engine', _Application(config, scheduler, key, self.counters), config,
      self.counters,
    )  # fmt: skip

  @property
  def url(self) -> str:
    """http://HOST:PORT, after the start."""
    return self._listener.url

  def __enter__(self) -> EngineServer:
    self._listener.start()
    return self

  def __exit__(self, *exc):
    self._listener.stop()


class _Application:
  """The ASGI application."""

  def __init__(
    self, config: EngineServerConfig, scheduler: Serving, key: str, counters: Counters
  ):
    self._config, self._scheduler, self._key = config, scheduler, key
    self._counters = counters
    self._bodies = receiving.Bodies(config.max_unfinished_bytes)
    self._running: dict[str, Any] = {}  # handles by id
    self._pages_log = PageLog(scheduler.page_events)
    self._routes = {
      ('POST', '/generate'): self._generate,
      ('POST', '/cancel'): self._cancel,
      ('GET', '/health'): self._health,
      ('GET', '/pages'): self._pages,
    }

  async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
    status = 499
    try:
      self._authorise(scope)
      route = self._routes.get((scope['method'], scope['path']))
      if route is None:
        raise ApiError(404, f'{scope["method"]} {scope["path"][:100]}: not found')
      status = await route(scope, receive, send)
    except receiving.Disconnected:
      pass
    except Exception as error:
      error = _as_api_error(error)
      status = error.status
      await _send(send, status, json.dumps(error.body()).encode())
    self._counters.add('requests_total', status=str(status))

  def _authorise(self, scope: dict) -> None:
    if self._key:
      receiving.authorise(scope, self._key)

  async def _body(self, scope: dict, receive: Callable, limit_bytes: int) -> bytes:
    error = too_large(f'the body is larger than {limit_bytes} bytes')
    async with self._bodies.receive(scope, receive, limit_bytes, error) as body:
      return bytes(body)

  async def _health(self, scope: dict, receive: Callable, send: Callable) -> int:
    scheduler, status = self._scheduler, 200
    body = {'context_tokens': scheduler.context_tokens, 'stats': scheduler.stats()}
    if not scheduler.alive:
      status, body['stopped_reason'] = 503, scheduler.stopped_reason
    await _send(send, status, json.dumps(body, default=float).encode())
    return status

  async def _pages(self, scope: dict, receive: Callable, send: Callable) -> int:
    fields = dict(urllib.parse.parse_qsl(scope['query_string'].decode('latin-1')))
    after = fields.get('after', '0')
    if not (after.isascii() and after.isdecimal() and len(after) < 20):
      raise ApiError(400, 'after: must be the number of an event')
    pages = self._pages_log.after(fields.get('epoch', ''), int(after))
    data = wire.encode_pages(pages)
    await _send(send, 200, data, b'application/octet-stream')
    return 200

  async def _cancel(self, scope: dict, receive: Callable, send: Callable) -> int:
    body = await self._body(scope, receive, 4 * wire.MAX_ID_CHARACTERS)
    handle = self._running.get(body.decode('utf-8', 'replace'))
    if handle is not None:
      handle.cancel()
    await _send(send, 200, b'{}')
    return 200

  async def _generate(self, scope: dict, receive: Callable, send: Callable) -> int:
    limit_bytes = wire.request_limit(self._scheduler.context_tokens)
    id_, request = wire.decode_request(await self._body(scope, receive, limit_bytes))
    if id_ in self._running:
      raise frames.Malformed(f'id: a request {id_!r} is in progress')
    if len(self._running) >= self._config.max_requests:
      most = self._config.max_requests
      raise EngineError(f'{most} requests are in progress (max_requests)')
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()
    handle = self._scheduler.submit(
      request, lambda tokens: streaming.call_soon(loop, queue.put_nowait, tokens)
    )
    streaming.forward(handle.future, queue)
    self._running[id_] = handle
    try:
      async with streaming.Watch(receive, handle):
        await self._stream(queue, send)
    finally:
      del self._running[id_]
    return 200

  async def _stream(self, queue: asyncio.Queue, send: Callable) -> None:
    """Sends frames until the result is sent; all that are there in one write."""
    headers = [(b'content-type', b'application/octet-stream')]
    await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
    last = False
    while not last:
      try:
        items = [await asyncio.wait_for(queue.get(), self._config.alive_s)]
      except TimeoutError:
        items = []
      while not queue.empty():
        items.append(queue.get_nowait())
      last = bool(items) and isinstance(items[-1], concurrent.futures.Future)
      data = b''.join(map(_frame, items)) or frames.pack('alive')
      await send({'type': 'http.response.body', 'body': data, 'more_body': not last})


def _frame(item: NewTokens | concurrent.futures.Future) -> bytes:
  if not isinstance(item, concurrent.futures.Future):
    return wire.encode_tokens(item)
  try:
    return wire.encode_result(item.result())
  except BaseException as error:  # CancelledError is not an Exception
    return frames.pack('error', reason=str(error)[:500])


def _as_api_error(error: Exception) -> ApiError:
  match error:
    case ApiError():
      return error
    case EngineError():
      return ApiError(503, str(error), type='server_error', code='engine_unavailable')
    case frames.Malformed() | ValueError():  # of the scheduler's check of each field
      return ApiError(400, str(error))
  logging.error('engine: a request failed', exc_info=error)
  return ApiError(500, 'internal error; see the log', type='server_error')


async def _send(
  send: Callable, status: int, data: bytes, kind: bytes = b'application/json'
) -> None:
  headers = [
    (b'content-type', kind),
    (b'content-length', str(len(data)).encode()),
  ]
  await send({'type': 'http.response.start', 'status': status, 'headers': headers})
  await send({'type': 'http.response.body', 'body': data})
