"""HTTP connections with limits on headers, time and idle connections.

uvicorn's httptools connection limits neither the size nor the time of headers and
bodies, accepts any number of connections (`limit_concurrency` only answers them with a
503), and waits forever for a client that does not read. `Connection` adds these limits.
It also rejects input for which the parser would call back thousands of times per read
of the socket and block the loop: bodies in chunks of a few bytes, and many pipelined
requests.
"""

from __future__ import annotations

import dataclasses
import json
import time

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.counters import Counters
from m2jax.gateway.errors import ApiError

# Added to the bytes of a header (RFC 7541 §4.1).
_HEADER_OVERHEAD_BYTES = 32

# A body may have this many chunks of any size; more must have this average size.
_ANY_CHUNKS = 1000
_LEAST_CHUNK_BYTES = 32
# Maximum requests that wait behind the current one.
_PIPELINED_REQUESTS = 8
# Bytes of a body discarded after its response, before the connection is closed.
_UNREAD_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class _Rejection:
  """A response that ends a connection.

  Attributes:
    reason: label in the counter closed_connections_total.
  """

  status: int
  reason: str
  message: str

  def response(self) -> bytes:
    error = ApiError(self.status, self.message, code=self.reason)
    body = json.dumps(error.any_body()).encode()
    wait_s = error.retry_after_s
    return STATUS_LINE[self.status] + (
      b'content-type: application/json\r\ncontent-length: %d\r\n%b'
      b'connection: close\r\n\r\n%b'
      % (len(body), b'' if wait_s is None else b'retry-after: %d\r\n' % wait_s, body)
    )


class Connection(HttpToolsProtocol):
  """The connection of a client.

  Headers and body of a request have a timer each, which starts with the wait and is not
  extended by received bytes. During a response, pipelined requests are not timed:
  reading pauses after the headers of the next request.

  Attributes:
    idle_since: monotonic time since which it waits for the next request; None if busy.
  """

  def __init__(self, bounds: GatewayConfig, counters: Counters, **server):
    super().__init__(**server)
    self._bounds = bounds
    self._counters = counters
    self._rejection: _Rejection | None = None  # sent
    self._fault: _Rejection | None = None  # found in a callback of the parser
    self._in_headers = self._in_body = self._received = False
    self._header_bytes = 0  # of the complete lines of the current request
    self._partial_bytes = 0  # received since the parser's last callback
    self._found = False  # whether the current data caused a callback
    self._chunks = self._body_bytes = 0  # of the current body
    self._unread_bytes = 0  # of a body whose response is already complete
    self._waits_for: str | None = None
    self._timer = self._write_timer = None
    self.idle_since: float | None = None

  # Lifecycle.

  def connection_made(self, transport):
    super().connection_made(transport)
    limit = self._bounds.max_connections
    if len(self.connections) > limit:
      idle = [c for c in self.connections if c.idle_since is not None]
      if not idle:
        self._reject(
          _Rejection(503, 'connections', f'max_connections={limit} are open; try again')
        )
        return
      self._counters.add('closed_connections_total', reason='idle')
      oldest = min(idle, key=lambda connection: connection.idle_since)
      oldest.transport.close()
      self.connections.discard(oldest)
    self._watch()

  def connection_lost(self, exc):
    for timer in (self._timer, self._write_timer, self.timeout_keep_alive_task):
      if timer is not None:
        timer.cancel()
    super().connection_lost(exc)

  def data_received(self, data: bytes):
    if self._rejection is not None or self.parser is None:
      return
    self._received, self.idle_since = True, None
    self._found = False
    super().data_received(data)
    if self._found:
      self._partial_bytes = 0
    elif self._rejection is None:  # an incomplete header or trailer
      self._partial_bytes += len(data)
      if self._partial_bytes > self._bounds.max_header_bytes:
        self._reject(self._too_many_header_bytes())
    self._watch()

  # Callbacks of the parser. An exception leads to `send_400_response`.

  def on_message_begin(self):
    super().on_message_begin()
    self._in_headers = self._found = True
    self._header_bytes = 0

  def on_url(self, url: bytes):
    self._count_header_bytes(len(url))
    super().on_url(url)

  def on_header(self, name: bytes, value: bytes):
    self._count_header_bytes(len(name) + len(value) + _HEADER_OVERHEAD_BYTES)
    super().on_header(name, value)

  def on_headers_complete(self):
    self._in_headers, self._in_body, self._found = False, True, True
    self._chunks = self._body_bytes = 0
    if len(self.pipeline) >= _PIPELINED_REQUESTS:
      self._find(400, 'pipelined', f'pipeline at most {_PIPELINED_REQUESTS} requests')
    super().on_headers_complete()

  def on_body(self, body: bytes):
    self._found = True
    self._chunks += 1
    self._body_bytes += len(body)
    if (
      self._chunks > _ANY_CHUNKS
      and self._body_bytes < _LEAST_CHUNK_BYTES * self._chunks
    ):
      self._find(400, 'chunks_too_small', 'send the body in chunks of 64 bytes or more')
    super().on_body(body)
    if self.cycle.response_complete:
      # Continue reading for a while: a client that still sends might miss the response.
      self._unread_bytes += len(body)
      if self._unread_bytes > _UNREAD_BYTES:
        self.transport.abort()

  def on_message_complete(self):
    self._in_body, self._found = False, True
    self._unread_bytes = 0
    super().on_message_complete()

  def on_response_complete(self):
    super().on_response_complete()
    if not self._in_headers and not self._in_body and not self.pipeline:
      self.idle_since = time.monotonic()  # finer than the loop
    self._watch()

  def send_400_response(self, msg: str):
    self._reject(self._fault or _Rejection(400, 'invalid_http', msg))

  def _find(self, status: int, reason: str, message: str):
    """Stops the parser, which then calls `send_400_response`."""
    self._fault = _Rejection(status, reason, message)
    raise ValueError(reason)

  def _count_header_bytes(self, count: int):
    self._header_bytes += count
    if self._header_bytes > self._bounds.max_header_bytes:
      self._fault = self._too_many_header_bytes()
      raise ValueError(self._fault.reason)

  def _too_many_header_bytes(self) -> _Rejection:
    limit = self._bounds.max_header_bytes
    message = f'the headers are larger than max_header_bytes={limit}'
    return _Rejection(431, 'headers_too_large', message)

  # Timers.

  def _watch(self):
    """Restarts the timer if the connection now waits for something else."""
    waits_for = self._awaited()
    if waits_for == self._waits_for:
      return
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None
    self._waits_for = waits_for
    if waits_for is not None:
      seconds = getattr(self._bounds, f'{waits_for}_timeout_s')
      self._timer = self.loop.call_later(seconds, self._late, waits_for, seconds)

  def _awaited(self) -> str | None:
    if self._rejection is not None or self.transport.is_closing():
      return None
    responding = self.cycle is not None and not self.cycle.response_complete
    if self._in_body and not self.pipeline:
      return 'body'
    if responding or self.idle_since is not None:  # idle: uvicorn's keep-alive timer
      return None
    return 'header'

  def _late(self, waits_for: str, seconds: float):
    self._timer = None
    message = f'no complete {waits_for} within {waits_for}_timeout_s={seconds:g}'
    self._reject(_Rejection(408, f'{waits_for}_timeout', message))

  def pause_writing(self):
    super().pause_writing()
    seconds = self._bounds.write_timeout_s
    self._write_timer = self.loop.call_later(seconds, self._stuck)

  def resume_writing(self):
    super().resume_writing()
    if self._write_timer is not None:
      self._write_timer.cancel()
      self._write_timer = None

  def _stuck(self):
    self._counters.add('closed_connections_total', reason='write_timeout')
    self.transport.abort()

  def _reject(self, rejection: _Rejection):
    """Ends the connection, with a response unless one has started."""
    if self._rejection is not None:
      return
    self._rejection = rejection
    self._counters.add('closed_connections_total', reason=rejection.reason)
    started = (
      self.cycle is not None
      and self.cycle.response_started
      and not (self.cycle.response_complete and (self._in_headers or not self._in_body))
    )
    if self._received and not started or rejection.status == 503:
      self.transport.write(rejection.response())
    self.transport.close()
    self._watch()
