"""The routes that read a body of a dialect: completions, and counting of tokens.

Each is a plain ASGI callable; its only overhead per request is a task that waits for
the client to disconnect.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from absl import logging

from m2jax.gateway import hints, streaming
from m2jax.gateway.deltas import Deltas
from m2jax.gateway.dialects import Dialect
from m2jax.gateway.errors import ApiError
from m2jax.gateway.exchange import Answer, Pending
from m2jax.gateway.protocol import dumps
from m2jax.gateway.readers import Reading
from m2jax.gateway.receiving import Bodies, Disconnected, api_key
from m2jax.gateway.service import ChatService
from m2jax.rollout.api import NewTokens

CLIENT_CLOSED_REQUEST = 499

# A choice, and its new tokens or its result.
_Item = tuple[int, NewTokens | concurrent.futures.Future]


class Endpoint:
  """Receives and reads a body; `respond` answers it."""

  def __init__(self, service: ChatService, dialect: Dialect, bodies: Bodies):
    self.service, self.dialect = service, dialect
    self._bodies = bodies

  async def __call__(self, scope: dict, receive: Callable, send: Callable):
    service = self.service
    try:
      key = api_key(scope)
      service.sessions.find(key)  # a 401 comes before the body is read
      async with contextlib.AsyncExitStack() as stack:
        limit_bytes, too_large = service.body_limit
        body = await stack.enter_async_context(
          self._bodies.receive(scope, receive, limit_bytes, too_large)
        )
        reading = await stack.enter_async_context(service.read(body, self.dialect.name))
        if given := hints.headers(scope):
          said = hints.of_headers(given) | reading.request.hints
          reading.request = dataclasses.replace(reading.request, hints=said)
        # Body and reader are released as soon as the engine has the prompt.
        status = await self.respond(key, reading, stack.aclose, receive, send)
    except Disconnected:
      status = CLIENT_CLOSED_REQUEST
    except Exception as error:
      error = _as_api_error(error)
      status = error.status
      await _send_json(send, status, self.dialect.error(error), error.retry_after_s)
    service.counters.add('requests_total', status=str(status))

  async def respond(
    self,
    key: str,
    reading: Reading,
    submitted: Callable,
    receive: Callable,
    send: Callable,
  ) -> int:
    """Sends the response; returns its status.

    Args:
      submitted: called and awaited when the reading is no longer needed.
    """
    raise NotImplementedError


class Completions(Endpoint):
  """Answers a conversation, as one object or as server-sent events."""

  async def respond(self, key, reading, submitted, receive, send) -> int:
    if not reading.request.stream:
      return await self._answer(key, reading, submitted, receive, send)
    try:
      pendings, queue = await self._submit(key, reading, True)
    except ApiError as error:
      events = self.dialect.refuse(error, reading.request)
      if events is None:
        raise
      await _begin_events(send)
      await _send_events(send, [_failed(error), *events], last=True)
      return error.status
    await submitted()
    return await self._stream(pendings, queue, receive, send)

  async def _submit(
    self, key: str, reading: Reading, listen: bool
  ) -> tuple[list[Pending], asyncio.Queue[_Item]]:
    """Submits a request; its results, and if `listen` its tokens, go to the queue."""
    loop, queue = asyncio.get_running_loop(), asyncio.Queue()

    def on_tokens(choice: int, tokens: NewTokens):
      streaming.call_soon(loop, queue.put_nowait, (choice, tokens))

    pendings = await self.service.submit(key, reading, on_tokens if listen else None)
    for i, pending in enumerate(pendings):
      streaming.forward(pending.handle.future, queue, lambda done, i=i: (i, done))
    return pendings, queue

  async def _answer(self, key, reading, submitted, receive, send) -> int:
    request, service = reading.request, self.service
    pendings, queue = await self._submit(key, reading, bool(request.stop))
    await submitted()
    options = request.tools, request.stop, service.config.template_version
    deltas = [  # fed only if there are stop strings
      Deltas(service.tokenizer, *options) for _ in range(request.n)
    ]
    futures: dict[int, concurrent.futures.Future] = {}
    async with streaming.Watch(receive, *(pending.handle for pending in pendings)):
      async for choice, item in _items(queue, len(pendings)):
        if isinstance(item, concurrent.futures.Future):
          futures[choice] = item
        else:
          deltas[choice].feed(item)
          _cancel_stopped(pendings, deltas)
    answers = await self._finish(pendings, futures)
    if answers is None:
      return CLIENT_CLOSED_REQUEST
    await _send_json(send, 200, self.dialect.body(answers, service.tokenizer))
    return 200

  async def _stream(self, pendings, queue, receive, send) -> int:
    """Server-sent events. After the start, an error is sent as an event."""
    stream = self.dialect.stream(pendings, self.service.tokenizer)
    futures: dict[int, concurrent.futures.Future] = {}
    async with (
      streaming.Watch(receive, *(pending.handle for pending in pendings)),
      streaming.Pings(send, stream.ping, self.service.config.ping_s) as send,
    ):
      await _begin_events(send)
      try:
        await _send_events(send, stream.begin())
        async for choice, item in _items(queue, len(pendings)):
          if isinstance(item, concurrent.futures.Future):
            futures[choice] = item
          else:
            await _send_events(send, stream.feed(choice, item))
            _cancel_stopped(pendings, stream.deltas)
        answers = await self._finish(pendings, futures)
        if answers is None:
          return CLIENT_CLOSED_REQUEST
        await _send_events(send, stream.end(answers), last=True)
      except Exception as error:
        error = _as_api_error(error)
        for pending in pendings:
          pending.handle.cancel()
        await _send_events(send, [_failed(error), *stream.fail(error)], last=True)
        return error.status
    return 200

  async def _finish(
    self,
    pendings: Sequence[Pending],
    futures: dict[int, concurrent.futures.Future],
  ) -> list[Answer] | None:
    """Records all completions; None if one was cancelled."""
    answers = [
      await self.service.finish(pending, futures[choice])
      for choice, pending in enumerate(pendings)
    ]
    return None if None in answers else answers


class Counts(Endpoint):
  """Answers with the tokens of a prompt, which is not sent to the engine."""

  async def respond(self, key, reading, submitted, receive, send) -> int:
    request, service = reading.request, self.service
    ids = await service.count(key, reading)
    await submitted()
    size, tokenizer = service.context_tokens, service.tokenizer
    await _send_json(send, 200, self.dialect.body(request, ids, size, tokenizer))
    return 200


async def _items(queue: asyncio.Queue[_Item], choices: int) -> AsyncIterator[_Item]:
  """What is put on the queue until all results are there."""
  while choices:
    item = await queue.get()
    choices -= isinstance(item[1], concurrent.futures.Future)
    yield item


def _cancel_stopped(pendings: Sequence[Pending], deltas: Sequence[Deltas]) -> None:
  for pending, each in zip(pendings, deltas, strict=True):
    if each.stop is not None:
      pending.handle.cancel()


def _as_api_error(error: Exception) -> ApiError:
  if isinstance(error, ApiError):
    return error
  logging.error('gateway: a request failed', exc_info=error)
  return ApiError(500, 'internal error; see the log', type='server_error')


def _failed(error: ApiError) -> str:
  """A comment, which clients skip: the status that a plain answer would have had."""
  return f': failed {error.status}\n\n'


async def _send_json(
  send: Callable, status: int, body: dict, retry_after_s: int | None = None
):
  data = dumps(body).encode()
  headers = [
    (b'content-type', b'application/json'),
    (b'content-length', str(len(data)).encode()),
  ]
  if retry_after_s is not None:
    headers.append((b'retry-after', str(retry_after_s).encode()))
  await send({'type': 'http.response.start', 'status': status, 'headers': headers})
  await send({'type': 'http.response.body', 'body': data})


async def _begin_events(send: Callable):
  headers = [
    (b'content-type', b'text/event-stream; charset=utf-8'),
    (b'cache-control', b'no-cache'),
  ]
  await send({'type': 'http.response.start', 'status': 200, 'headers': headers})


async def _send_events(send: Callable, events: Iterable[str], *, last: bool = False):
  """Sends server-sent events in a single write."""
  data = ''.join(events).encode()
  if data or last:
    await send({'type': 'http.response.body', 'body': data, 'more_body': not last})
