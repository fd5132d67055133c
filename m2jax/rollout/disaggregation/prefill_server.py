"""A prefill engine for decode processes: `PrefillScheduler` behind a socket.

  server = PrefillServer(scheduler, 'unix:/run/prefill.sock', load=load).start()

A decode process sends `ask`, `cancel`, `weights` (the version that it has, so that this
process loads it) and `ping`; it is sent `part`, `failed`, `weights_failed` and `pong`
(`connection`). When its connection ends, what it has asked for is cancelled.

The newest version that any connected decode process has is loaded. One that cannot be
loaded is retried while a process wants it, without delaying older ones: a version is
advertised (in the opening and in `pong`) when it is there.

What a peer can grow is bounded: connections, asks and unsent bytes of each, and the
bytes and the time of a frame.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from m2jax.frames import Frame, Malformed
from m2jax.rollout.disaggregation import connection
from m2jax.rollout.disaggregation.handover import Ask, HandoverError, Part
from m2jax.rollout.disaggregation.prefill_engine import PrefillScheduler


@dataclasses.dataclass(frozen=True)
class Limits:
  """Attributes:
  connections: maximum open at once.
  asks: maximum unanswered asks of a connection.
  unsent_bytes: unsent bytes of a connection beyond which it is closed.
  frame_s: time for a frame, and for each step of the opening.
  silence_s: time without a frame after which a connection is closed; decode processes
    send one every second.
  retry_s, max_retry_s: wait before loading a version again; doubled after each failure.
  """

  connections: int = 16
  asks: int = 1024
  unsent_bytes: int = 1 << 30
  frame_s: float = 10.0
  silence_s: float = 60.0
  retry_s: float = 1.0
  max_retry_s: float = 30.0


@dataclasses.dataclass
class _Failed:
  """A version that could not be loaded; tried again at `again_s`, after `wait_s`."""

  again_s: float
  wait_s: float


class PrefillServer:
  """Serves a PrefillScheduler to other processes.

  Attributes:
    rejected: connections that did not know the key or sent what they must not.
  """

  def __init__(
    self,
    scheduler: PrefillScheduler,
    address: str,
    *,
    load: Callable[[int], Any],
    key: bytes | None = None,
    run_id: str = '',
    limits: Limits | None = None,
  ):
    """Listens, and serves from `start` on.

    Args:
      scheduler: not started; `start` and `stop` apply to it, too.
      address: see `connection.Address`; port 0 is a free one.
      load: the weights of a version, called from a thread of its own.
      key: at least 16 bytes, which decode processes must know.
      run_id: id of the run whose weights these are; versions of other runs differ.

    Raises:
      ValueError: other machines could connect, and there is no key.
    """
    connection.check_key(key)
    self._scheduler, self._load, self._key = scheduler, load, key
    self._run_id, self._limits = run_id, limits or Limits()
    self._address = connection.Address.parse(address)
    self._socket = self._address.listen(key)
    self._lock = threading.Condition()
    self._peers: set[_Peer] = set()
    self._opening = 0
    self._stopping = False
    self._loaded = scheduler.stats()['policy_version']
    self._failed: dict[int, _Failed] = {}  # of the versions that peers want
    self.rejected = 0
    self._threads = [
      threading.Thread(target=f, daemon=True, name='prefill server')
      for f in (self._accept, self._replace_weights)
    ]

  @property
  def address(self) -> str:
    """With the port that was chosen."""
    if self._address.kind == 'unix':
      return f'unix:{self._address.target}'
    host, port = self._socket.getsockname()[:2]
    return f'tcp:{host}:{port}'

  @property
  def alive(self) -> bool:
    """Whether its engine serves."""
    return self._scheduler.alive

  @property
  def stopped_reason(self) -> str | None:
    """Why its engine does not serve any more."""
    return self._scheduler.stopped_reason

  def start(self, *, warmup: bool = True) -> PrefillServer:
    self._scheduler.start(warmup=warmup)
    for thread in self._threads:
      thread.start()
    return self

  def stop(self) -> None:
    """Closes all connections and stops the engine."""
    with self._lock:
      self._stopping = True
      self._lock.notify_all()
      peers = list(self._peers)
    if self._address.kind == 'unix':
      with contextlib.suppress(OSError):
        os.unlink(self._address.target)
    for peer in peers:
      peer.close()
    for thread in self._threads:
      if thread.ident is not None:
        thread.join()
    self._socket.close()
    self._scheduler.stop()

  def stats(self) -> dict[str, float]:
    return self._scheduler.stats() | {
      'connections': len(self._peers),
      'rejected_connections': self.rejected,
    }

  def _accept(self) -> None:
    self._socket.settimeout(connection.IDLE_S / 4)  # to see that it is to stop
    while not self._stopping:
      try:
        sock, _ = self._socket.accept()
      except TimeoutError:
        continue
      except OSError:  # such as no file descriptors
        time.sleep(0.1)
        continue
      with self._lock:
        full = self._opening + len(self._peers) >= self._limits.connections
        self._opening += not full
      if full:
        sock.close()
        continue
      threading.Thread(
        target=self._serve, args=(sock,), daemon=True, name='prefill connection'
      ).start()

  def _serve(self, sock: socket.socket) -> None:
    """One connection, from its opening to its end."""
    peer = None
    try:
      hello = dict(
        layout=self._scheduler.layout, run_id=self._run_id, version=self._loaded
      )
      connection.open_server(sock, self._key, hello, self._limits.frame_s)
      with self._lock:
        peer = _Peer(self, sock)
        self._peers.add(peer)
        self._opening -= 1
        if self._stopping:
          peer.close()
      peer.serve()
    except Malformed as error:
      self.rejected += 1
      logging.log_every_n_seconds(
        logging.WARNING, 'a connection was closed: %s', 10, error
      )
    except OSError:
      pass  # it has ended
    finally:
      with self._lock:
        self._peers.discard(peer)
        self._opening -= peer is None
      if peer is None:
        sock.close()
      else:
        peer.end()

  def want(self, peer: _Peer, version: int) -> None:
    """Has the weights that a decode process has loaded, if they are newer."""
    with self._lock:
      peer.version = version
      self._lock.notify_all()

  def _replace_weights(self) -> None:
    while (version := self._next_version()) is not None:
      try:
        self._scheduler.update_weights(self._load(version), version)
      except Exception as error:  # such as a version that is not there
        logging.warning('cannot load version %d: %r', version, error)
        self._cannot_load(version, repr(error)[:500])
      else:
        with self._lock:
          self._loaded = version

  def _next_version(self) -> int | None:
    """Waits for a version to load, the newest that is due; None at the end."""
    with self._lock:
      while not self._stopping:
        wanted = {p.version for p in self._peers if p.version is not None}
        newer = {version for version in wanted if version > self._loaded}
        self._failed = {v: f for v, f in self._failed.items() if v in newer}
        now = time.monotonic()
        wait_s = {v: f.again_s - now for v, f in self._failed.items()}
        due = [version for version in newer if wait_s.get(version, 0.0) <= 0]
        if due:
          return max(due)
        self._lock.wait(min(wait_s.values(), default=None))
      return None

  def _cannot_load(self, version: int, reason: str) -> None:
    """Reports it to those who want it, and when to try again."""
    limits = self._limits
    with self._lock:
      last = self._failed.get(version)
      wait_s = min(2 * last.wait_s, limits.max_retry_s) if last else limits.retry_s
      self._failed[version] = _Failed(time.monotonic() + wait_s, wait_s)
      peers = [peer for peer in self._peers if peer.version == version]
    for peer in peers:
      peer.send('weights_failed', version=version, reason=reason)


class _Peer:
  """A decode process.

  Attributes:
    version: version of its weights, as it last named it; under the server's lock.
  """

  def __init__(self, server: PrefillServer, sock: socket.socket):
    self._server, self._limits = server, server._limits
    self._scheduler = server._scheduler
    self.version: int | None = None
    self._channel = connection.Channel(
      sock,
      max_body_bytes=4 * self._scheduler.context_tokens,
      max_unsent_bytes=self._limits.unsent_bytes,
      timeout_s=self._limits.frame_s,
    )
    self._lock = threading.Lock()
    self._asks: dict[int, Callable[[], None]] = {}  # how to cancel them
    self.send, self.close = self._channel.send, self._channel.close

  def serve(self) -> None:
    """Until the connection ends; raises Malformed or OSError."""
    heard = time.monotonic()
    while not self._channel.closed:
      frame = self._channel.receive()
      if frame is not None:
        heard = time.monotonic()
        self._handle(frame)
      elif time.monotonic() > heard + self._limits.silence_s:
        raise TimeoutError('a silent connection')

  def end(self) -> None:
    self._channel.join()
    with self._lock:
      cancels = list(self._asks.values())
      self._asks.clear()
    for cancel in cancels:
      cancel()

  def _handle(self, frame: Frame) -> None:
    match frame.kind:
      case 'ask':
        self._ask(frame)
      case 'cancel':
        with self._lock:
          cancel = self._asks.pop(frame.integer('number'), None)
        if cancel is not None:
          cancel()
      case 'weights':
        self._server.want(self, frame.version('version'))
      case 'ping':
        self.send('pong', stats=self._server.stats())
      case kind:
        raise Malformed(f'a frame of kind {kind[:40]}')

  def _ask(self, frame: Frame) -> None:
    number, ids = frame.integer('number'), (0, self._scheduler.layout['vocab_size'])
    tokens = frame.array('tokens', np.int32, (None,), ids)
    ask = Ask(tokens, frame.integer('first_page'), frame.version('version'))
    with self._lock:
      if number in self._asks or len(self._asks) >= self._limits.asks:
        raise Malformed(f'ask {number}: known already, or too many')
      self._asks[number] = lambda: None
    try:
      send = functools.partial(self._send, number, len(tokens) - 1)
      cancel = self._scheduler.ask(ask, send)
    except ValueError as error:
      raise Malformed(f'ask: {error}') from error
    except HandoverError as error:
      self._send(number, 0, error)
      return
    with self._lock:
      if number in self._asks:  # it has not ended meanwhile
        self._asks[number] = cancel

  def _send(self, number: int, target: int, part: Part | HandoverError) -> None:
    """Called from any thread."""
    failed = isinstance(part, HandoverError)
    if failed or part.held == target:
      with self._lock:
        self._asks.pop(number, None)
    if failed:
      self.send('failed', number=number, reason=str(part)[:500])
      return
    pages = part.pages._asdict().items()
    self.send(
      'part',
      {name: x for name, x in pages if x is not None},
      number=number,
      first_page=part.first_page,
      held=part.held,
      oldest=part.versions[0],
      newest=part.versions[1],
      pages=part.num_pages,
    )
