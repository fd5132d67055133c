"""An episode's only way to the model: HTTP/1.1 from its sandbox to the gateway.

A sandbox has no network. The relay accepts connections on a socket in the sandbox's own
network (`Sandbox.listen`), which only its commands can reach: the socket is the
episode's identity, and the relay puts the session's key into every request, whatever
key the client sent. It passes on the calls of a model API and nothing else of the
gateway, such as metrics or other sessions; of a request the body and the headers that
such an API has. Everything that a client can grow has a limit (law 9); exceeding a
limit of the whole episode ends it.

A failure of the gateway masks the episode, so only what the gateway did counts as one:
never how long a client takes, reads or waits.

It does not serve over `gateway.connections`: there a client that closes its side loses
the rest of its response, parsing answers some methods before the relay can, and bytes
are written without being counted for the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import re
import socket
import weakref
from typing import Any

import h11
import httpx
from absl import logging

from m2jax.agents.agent import Endpoint
from m2jax.agents.transcript import Exchange
from m2jax.checks import require
from m2jax.gateway.hints import BODY_FIELD, HEADERS

_READ_BYTES = 1 << 16
# Without escapes or dots that lead elsewhere.
_TARGET = re.compile(
  r'/v1/(chat/completions|messages(/count_tokens)?|responses|models(/[\w-]+)?|tokenize)'
  r'|/tokenize|/'
)
_METHODS = (b'GET', b'HEAD', b'POST')
_PASSED = frozenset(('accept', 'content-type', 'anthropic-version', 'anthropic-beta'))
# Of the connection (RFC 9110 §7.6.1).
_DROPPED = frozenset(
  'connection keep-alive proxy-connection te trailer transfer-encoding upgrade'.split()
)
_COMPLETIONS = ('/v1/chat/completions', '/v1/messages', '/v1/responses')
# 401: it has restarted without the session, for the key is the relay's.
_GATEWAY_FAILED = (401, 429, 500, 502, 503, 504)
_BUSY_S = 1.0  # between attempts while all requests together exceed a bound of it
_BEHIND_BYTES = 1 << 16  # unread by a client: what asyncio buffers before it pauses
# The gateway's comment in a stream that failed after its start.
_STREAM_FAILED, _COMMENT_BYTES = re.compile(rb'\n: failed (\d{3})\n'), 16


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of an episode's traffic. All are positive.

  Attributes:
    connections: open at once; others are closed at once.
    header_bytes: limit on a request's headers.
    body_bytes: limit on a request's body, and on all unfinished bodies together.
    requests, total_connections, total_bytes: limits of the whole episode, which ends
      above them; bytes in both directions.
  """

  connections: int = 16
  header_bytes: int = 32 << 10
  body_bytes: int = 4 << 20
  requests: int = 256
  total_connections: int = 4096
  total_bytes: int = 256 << 20

  def __post_init__(self):
    check = functools.partial(require, self)
    for field in dataclasses.fields(self):
      check(getattr(self, field.name) > 0, field.name, 'positive')


class _Refused(Exception):
  """A request that is not passed on."""

  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status = status


class _Over(Exception):
  """A limit of the whole episode is exceeded."""


class Relay:
  """Serves one episode; `start`, then `close`.

  Attributes:
    over: done when a limit of the episode is exceeded, with its name.
    requests, connections, total_bytes: counts so far.
    begun: number of completions that the gateway did not refuse.
    failure: why the gateway did not complete the last request for a completion, or was
      out of reach; '' if it did.
    last: the last completion.
  """

  def __init__(
    self,
    listener: socket.socket,
    endpoint: Endpoint,
    client: httpx.AsyncClient,
    limits: Limits,
    timeout_s: float,
    hints: bool = False,
  ):
    """Does not start yet.

    Args:
      listener: accepts the episode's connections; closed by `close`.
      endpoint: the gateway and the session. Its model and its sampling replace those of
        each request.
      client: shared by relays.
      limits: the episode's limits.
      timeout_s: timeout of a response.
      hints: whether what the client says of a request (`gateway.hints`) is passed on.
    """
    self._passed = _PASSED | HEADERS if hints else _PASSED
    self._hints = hints
    self._listener, self._endpoint = listener, endpoint
    self._client, self._limits, self._timeout_s = client, limits, timeout_s
    self._root = endpoint.base_url.rstrip('/').removesuffix('/v1')
    self._server: asyncio.Server | None = None
    self._serving: set[asyncio.Task] = set()
    self._writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()
    self._held_bytes = 0
    self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    self.requests = self.connections = self.total_bytes = self.begun = 0
    self.failure = ''
    self.last: Exchange | None = None

  @property
  def port(self) -> int:
    """The port on 127.0.0.1, as the sandbox's commands see it."""
    return self._listener.getsockname()[1]

  async def start(self) -> None:
    """Accepts connections."""
    self._listener.setblocking(False)
    # Inherited by connections; asyncio sets it only if the socket knows its protocol.
    self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._server = await asyncio.start_server(self._accept, sock=self._listener)

  async def close(self) -> None:
    """Ends all connections; requests in flight are cancelled at the gateway."""
    if self._server is not None:
      self._server.close()
    self._listener.close()
    for task in self._serving:
      task.cancel()
    await asyncio.gather(*self._serving, return_exceptions=True)
    for writer in self._writers:  # also those that wait for a client to read
      writer.transport.abort()
    self.over.cancel()

  # --- Accounts ---

  def count_bytes(self, count: int) -> None:
    """Raises _Over above the limit."""
    self.total_bytes += count
    if self.total_bytes > self._limits.total_bytes:
      self._end('total_bytes')

  @contextlib.contextmanager
  def held(self):
    """`add(bytes)` counts bytes of a body until the context ends."""
    mine = 0

    def add(count: int) -> None:
      nonlocal mine
      if self._held_bytes + count > self._limits.body_bytes:
        raise _Refused(413, f'bodies above body_bytes={self._limits.body_bytes}')
      mine += count
      self._held_bytes += count

    try:
      yield add
    finally:
      self._held_bytes -= mine

  def _end(self, limit: str) -> None:
    if not self.over.done():
      self.over.set_result(limit)
      self._server.close()  # refuses further connections
    raise _Over

  async def _accept(self, reader, writer) -> None:
    self.connections += 1
    self._writers.add(writer)
    task = asyncio.current_task()
    try:
      if self.connections > self._limits.total_connections:
        self._end('total_connections')
      if len(self._serving) >= self._limits.connections:
        return
      self._serving.add(task)
      await _Connection(self, reader, writer, self._limits.header_bytes).serve()
    except (_Over, OSError, asyncio.CancelledError):
      pass  # the client is gone, or the episode ends
    except Exception:
      logging.exception('relay: a connection failed')
    finally:
      self._serving.discard(task)
      writer.close()

  # --- Passing on ---

  async def send(
    self, request: h11.Request, body: bytes
  ) -> tuple[httpx.Response, Exchange | None]:
    """Sends a request to the gateway; the caller reads and closes the response.

    Returns:
      The response, and the exchange if it is a completion.

    Raises:
      _Refused: not a call of a model API, or the gateway cannot be reached.
    """
    self.requests += 1
    if self.requests > self._limits.requests:
      self._end('requests')
    path = request.target.decode('latin-1').partition('?')[0]
    if not _TARGET.fullmatch(path) or request.method not in _METHODS:
      raise _Refused(404, f'{path[:100]}: only the calls of a model API are served')
    asked = _json_object(body)
    if asked is not None:
      asked |= {'model': self._endpoint.model, **self._endpoint.sampling}
      if not self._hints:
        asked.pop(BODY_FIELD, None)
      body = json.dumps(asked).encode()
    headers = [
      (name, value) for name, value in request.headers if name.decode() in self._passed
    ]
    headers.append((b'authorization', f'Bearer {self._endpoint.api_key}'.encode()))
    made = httpx.Request(
      request.method,
      self._root + path,
      headers=headers,
      content=body,
      extensions={'timeout': httpx.Timeout(self._timeout_s).as_dict()},
    )
    completes = path in _COMPLETIONS
    self.begun += completes
    try:
      response = await self._client.send(made, stream=True)
      while response.status_code == 429 and 'retry-after' in response.headers:
        await response.aclose()
        await asyncio.sleep(_BUSY_S)
        response = await self._client.send(made, stream=True)
    except httpx.TimeoutException as error:  # other requests of the client may be why
      raise _Refused(504, f'no response in {self._timeout_s:g} s') from error
    except httpx.TransportError as error:
      self.begun -= completes
      self.failure = f'the gateway cannot be reached: {error!r}'
      raise _Refused(502, self.failure) from error
    status = response.status_code
    if not completes:  # says nothing about the engine
      return response, None
    self.failure = _failure(status)
    if status != 200 or asked is None:
      self.begun -= 1
      return response, None
    self.last = Exchange(path, asked)
    return response, self.last


class _Connection:
  """One connection of a client."""

  def __init__(self, relay: Relay, reader, writer, header_bytes: int):
    self._relay, self._reader, self._writer = relay, reader, writer
    self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=header_bytes)
    self._behind = False  # whether the client has left much of a response unread

  async def serve(self) -> None:
    """Requests one after the other, until one of both sides closes."""
    try:
      while isinstance(request := await self._event(), h11.Request):
        try:
          await self._request(request)
        except _Refused as error:
          await self._refuse(error.status, str(error))
        if self._http.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
          return
        self._http.start_next_cycle()
    except h11.RemoteProtocolError as error:
      await self._refuse(error.error_status_hint, f'not HTTP/1.1: {error}')

  async def _event(self):
    while (event := self._http.next_event()) is h11.NEED_DATA:
      if self._http.they_are_waiting_for_100_continue:
        await self._send(h11.InformationalResponse(status_code=100, headers=[]))
      await self._receive()
    return event

  async def _receive(self) -> bool:
    """Reads once; returns False at the end."""
    data = await self._reader.read(_READ_BYTES)
    self._relay.count_bytes(len(data))
    self._http.receive_data(data)
    return bool(data)

  async def _request(self, request: h11.Request) -> None:
    with self._relay.held() as count:
      body = bytearray()
      while isinstance(event := await self._event(), h11.Data):
        count(len(event.data))
        body += event.data
      if not isinstance(event, h11.EndOfMessage):
        return
      sent = await self._until_gone(self._relay.send(request, bytes(body)))
    if sent is None:
      return
    response, exchange = sent
    try:
      await self._respond(response, exchange)
    finally:
      await response.aclose()

  async def _until_gone(self, sending) -> tuple[httpx.Response, Exchange | None] | None:
    """What `sending` returns; None, and it is cancelled, if the client closes."""
    sending = asyncio.ensure_future(sending)
    watch = asyncio.ensure_future(self._receive())
    gone = False
    try:
      await asyncio.wait({sending, watch}, return_when='FIRST_COMPLETED')
      if not sending.done():
        gone = not watch.result()
        if not gone:  # it has sent more, which is read after this response
          await asyncio.wait({sending})
    except BaseException:
      gone = True
      raise
    finally:
      watch.cancel()
      if gone:
        sending.cancel()
      sent, _ = await asyncio.gather(sending, watch, return_exceptions=True)
      if gone and isinstance(sent, tuple):
        await sent[0].aclose()
    return None if gone else sending.result()

  async def _respond(self, response: httpx.Response, exchange: Exchange | None) -> None:
    headers = [
      (name, value)
      for name, value in response.headers.raw
      if name.decode().lower() not in _DROPPED
    ]
    self._behind = False
    await self._send(h11.Response(status_code=response.status_code, headers=headers))
    streamed = 'text/event-stream' in response.headers.get('content-type', '')
    whole = None if streamed or exchange is None else bytearray()
    failed, last = '', b'\n'  # the end of what was read, with the begin of a comment
    try:
      async for chunk in response.aiter_raw():
        if whole is not None:
          whole += chunk
        elif found := _STREAM_FAILED.search(last := last + chunk):
          failed = failed or _failure(int(found[1]))
        last = last[-_COMMENT_BYTES:]
        await self._send(h11.Data(data=chunk))
    except httpx.TransportError as error:
      broken = f'the response of the gateway broke off: {error!r}'
      # A gateway closes the connection of a client that does not read.
      if not self._behind and not isinstance(error, httpx.TimeoutException):
        failed = broken
      raise ConnectionError(broken) from error
    finally:
      if exchange is not None:
        self._relay.failure = failed
    await self._send(h11.EndOfMessage())
    if whole is not None:
      exchange.response = _json_object(whole)

  async def _refuse(self, status: int, message: str) -> None:
    """Answers with an error, unless a response has begun; then closes."""
    if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
      return
    error = {'message': message, 'type': 'invalid_request_error', 'code': None}
    body = json.dumps({'error': error | {'param': None}}).encode()
    headers = [('content-type', 'application/json'), ('connection', 'close')]
    headers.append(('content-length', str(len(body))))
    await self._send(h11.Response(status_code=status, headers=headers))
    await self._send(h11.Data(data=body))
    await self._send(h11.EndOfMessage())

  async def _send(self, event) -> None:
    data = self._http.send(event)
    if data:
      self._relay.count_bytes(len(data))
      self._writer.write(data)
      unread_bytes = self._writer.transport.get_write_buffer_size()
      self._behind |= unread_bytes > _BEHIND_BYTES
      await self._writer.drain()


def _failure(status: int) -> str:
  """Why a request failed, if that is the gateway's failure; otherwise ''."""
  return f'the gateway answered with HTTP {status}' if status in _GATEWAY_FAILED else ''


def _json_object(body: bytes | bytearray) -> dict[str, Any] | None:
  try:
    found = json.loads(bytes(body))
  except (ValueError, RecursionError):
    return None
  return found if isinstance(found, dict) else None
