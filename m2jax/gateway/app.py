"""The HTTP surface: routes, authentication, body limits, disconnects, error bodies.

- POST /v1/chat/completions, GET /v1/models, GET /health, GET /metrics, HEAD /.
- `Authorization: Bearer KEY`; the key is the session.

The completion route is a plain ASGI callable; its only overhead per request is a task
that waits for the client to disconnect.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable

import fastapi
from absl import logging
from starlette import routing
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from m2jax.gateway import protocol, responses, streaming
from m2jax.gateway.errors import ApiError, busy
from m2jax.gateway.service import ChatService

CLIENT_CLOSED_REQUEST = 499


class Disconnected(Exception):
  """The client disconnected before its request was complete."""


def build(service: ChatService) -> fastapi.FastAPI:
  """The gateway's ASGI application around a service."""
  config, counters = service.config, service.counters
  created = int(time.time())
  app = fastapi.FastAPI(title='m2jax gateway', openapi_url=None)
  app.router.routes.append(
    routing.Route(
      '/v1/chat/completions', ChatCompletions(service), methods=['POST'], name='chat'
    )
  )

  @app.exception_handler(HTTPException)
  async def http_error(request: fastapi.Request, error: HTTPException):
    counters.add('requests_total', status=str(error.status_code))
    message = f'{request.method} {request.url.path}: {error.detail}'
    body = ApiError(error.status_code, message).body()
    return JSONResponse(body, error.status_code, headers=error.headers)

  @app.exception_handler(ApiError)
  async def api_error(request: fastapi.Request, error: ApiError):
    counters.add('requests_total', status=str(error.status))
    return JSONResponse(error.body(), error.status)

  @app.get('/v1/models')
  async def models(request: fastapi.Request):
    service.sessions.find(bearer(request.scope))
    model = {
      'id': config.model_name,
      'object': 'model',
      'created': created,
      'owned_by': 'm2jax',
    }
    return JSONResponse({'object': 'list', 'data': [model]})

  @app.get('/health')
  async def health():
    alive, stats = service.health()
    body = {'status': 'ok' if alive else 'engine down', 'engine': stats}
    body['policy_version'] = stats.get('policy_version')
    body['sessions'] = len(service.sessions)
    return JSONResponse(body, 200 if alive else 503)

  @app.get('/metrics')
  async def metrics():
    return PlainTextResponse(counters.exposition())

  @app.head('/')
  async def root():
    return Response()

  return app


def bearer(scope: dict) -> str:
  """The API key of a request. Raises ApiError (401) if there is none."""
  for name, value in scope['headers']:
    if name == b'authorization':
      scheme, _, key = value.decode('latin-1').partition(' ')
      if scheme.lower() == 'bearer' and key.strip():
        return key.strip()
  raise ApiError(
    401,
    'no API key: send "Authorization: Bearer KEY"; the key identifies the session',
    code='invalid_api_key',
  )


class Bodies:
  """Counts the bytes of all bodies that are arriving or waiting to be read."""

  def __init__(self, max_bytes: int):
    self.max_bytes = max_bytes
    self.held_bytes = 0

  @contextlib.asynccontextmanager
  async def receive(
    self, scope: dict, receive: Callable, limit_bytes: int, too_large: ApiError
  ) -> AsyncIterator[bytearray]:
    """Receives a body; its bytes count until the context ends.

    Raises:
      ApiError: `too_large` above `limit_bytes`, or 429.
      Disconnected: the client has disconnected.
    """
    for name, value in scope['headers']:
      if name == b'content-length' and value.isdigit() and int(value) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
      more = True
      while more:
        event = await receive()
        if event['type'] == 'http.disconnect':
          raise Disconnected
        chunk = event.get('body', b'')
        more = event.get('more_body', False)
        if len(body) + len(chunk) > limit_bytes:
          raise too_large
        if self.held_bytes + len(chunk) > self.max_bytes:
          raise busy(
            f'bodies of more than max_unfinished_bytes={self.max_bytes} are arriving; '
            'try again'
          )
        body += chunk
        self.held_bytes += len(chunk)
      yield body
    finally:
      self.held_bytes -= len(body)


class ChatCompletions:
  """ASGI endpoint of POST /v1/chat/completions."""

  def __init__(self, service: ChatService):
    self._service = service
    self._bodies = Bodies(service.config.max_unfinished_bytes)

  async def __call__(self, scope: dict, receive: Callable, send: Callable):
    service = self._service
    try:
      key = bearer(scope)
      service.sessions.find(key)  # a 401 comes before the body is read
      async with contextlib.AsyncExitStack() as stack:
        limit_bytes, too_large = service.body_limit
        body = await stack.enter_async_context(
          self._bodies.receive(scope, receive, limit_bytes, too_large)
        )
        reading = await stack.enter_async_context(service.read(body))
        respond = self._stream if reading.request.stream else self._answer
        # Body and reader are released as soon as the engine has the prompt.
        status = await respond(key, reading, stack.aclose, receive, send)
    except Disconnected:
      status = CLIENT_CLOSED_REQUEST
    except Exception as error:
      error = _as_api_error(error)
      status = error.status
      await _send_json(send, status, error.body())
    service.counters.add('requests_total', status=str(status))

  async def _answer(self, key, reading, submitted, receive, send) -> int:
    pending = await self._service.submit(key, reading)
    await submitted()
    finished = asyncio.Queue()
    streaming.forward(pending.handle.future, finished)
    async with streaming.Watch(receive, pending.handle):
      future = await finished.get()
    answer = await self._service.finish(pending, future)
    if answer is None:
      return CLIENT_CLOSED_REQUEST
    await _send_json(send, 200, responses.completion(answer))
    return 200

  async def _stream(self, key, reading, submitted, receive, send) -> int:
    """Server-sent events. After the start, an error is sent as an event."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue = asyncio.Queue()
    pending = await self._service.submit(
      key, reading, lambda tokens: streaming.call_soon(loop, queue.put_nowait, tokens)
    )
    await submitted()
    streaming.forward(pending.handle.future, queue)
    stream = responses.Stream(pending, self._service.tokenizer)
    headers = [
      (b'content-type', b'text/event-stream; charset=utf-8'),
      (b'cache-control', b'no-cache'),
    ]
    async with streaming.Watch(receive, pending.handle):
      await send({'type': 'http.response.start', 'status': 200, 'headers': headers})
      try:
        await _send_events(send, stream.begin())
        while not isinstance(item := await queue.get(), concurrent.futures.Future):
          await _send_events(send, stream.feed(item))
        answer = await self._service.finish(pending, item)
        if answer is None:
          return CLIENT_CLOSED_REQUEST
        await _send_events(send, [*stream.end(answer), '[DONE]'], last=True)
      except Exception as error:
        error = _as_api_error(error)
        await _send_events(send, [protocol.dumps(error.body())], last=True)
        return error.status
    return 200


def _as_api_error(error: Exception) -> ApiError:
  if isinstance(error, ApiError):
    return error
  logging.error('gateway: a request failed', exc_info=error)
  return ApiError(500, 'internal error; see the log', type='server_error')


async def _send_json(send: Callable, status: int, body: dict):
  data = protocol.dumps(body).encode()
  headers = [
    (b'content-type', b'application/json'),
    (b'content-length', str(len(data)).encode()),
  ]
  if status == 429:
    headers.append((b'retry-after', b'1'))
  await send({'type': 'http.response.start', 'status': status, 'headers': headers})
  await send({'type': 'http.response.body', 'body': data})


async def _send_events(send: Callable, events: Iterable[str], *, last: bool = False):
  """Sends server-sent events in a single write."""
  data = ''.join(f'data: {event}\n\n' for event in events).encode()
  if data or last:
    await send({'type': 'http.response.body', 'body': data, 'more_body': not last})
