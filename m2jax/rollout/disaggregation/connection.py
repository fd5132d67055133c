"""Connections between a prefill and a decode process: frames, their bounds, the key.

They are `m2jax.frames`; the receiver's own engine determines shapes and dtypes of
arrays.

When a connection opens, both sides prove that they know the key: an HMAC-SHA256 over
two random numbers, one of each side, which also names the side. Frames are neither
encrypted nor signed; see docs/security.md.

Listening on an address that other machines can reach needs a key. A Unix socket is for
its owner only (mode 0600).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from m2jax import frames

MIN_KEY_BYTES = 16
IDLE_S = 1.0  # after which `Channel.receive` returns without a frame


@dataclasses.dataclass(frozen=True)
class Address:
  """`unix:PATH` or `tcp:HOST:PORT`."""

  kind: str
  target: Any

  @classmethod
  def parse(cls, text: str) -> Address:
    kind, _, rest = text.partition(':')
    if kind == 'unix' and rest:
      return cls(kind, rest)
    host, _, port = rest.rpartition(':')
    if kind == 'tcp' and host and port.isdecimal() and int(port) < 2**16:
      return cls(kind, (host.strip('[]'), int(port)))
    raise ValueError(f'address={text!r}: must be unix:PATH or tcp:HOST:PORT')

  def connect(self, timeout_s: float) -> socket.socket:
    """A connected socket; raises OSError."""
    if self.kind == 'tcp':
      sock = socket.create_connection(self.target, timeout_s)
      sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
      return sock
    sock = socket.socket(socket.AF_UNIX)
    try:
      sock.settimeout(timeout_s)
      sock.connect(self.target)
    except BaseException:
      sock.close()
      raise
    return sock

  def listen(self, key: bytes | None) -> socket.socket:
    """A listening socket.

    Raises:
      ValueError: other machines could connect, and there is no key.
      OSError: the address is in use, or not this machine's.
    """
    if self.kind == 'tcp':
      found = socket.getaddrinfo(*self.target, type=socket.SOCK_STREAM)
      hosts = [info[4][0] for info in found]
      if key is None and not all(ipaddress.ip_address(h).is_loopback for h in hosts):
        raise ValueError(
          f'address: {self.target[0]} can be reached from other machines; listening '
          'there needs a key'
        )
      family, *_, target = found[0]
      return socket.create_server(target, family=family)
    with contextlib.suppress(OSError):  # of a process that was killed
      if stat.S_ISSOCK(os.lstat(self.target).st_mode) and not self._answers():
        os.unlink(self.target)
    sock = socket.socket(socket.AF_UNIX)
    try:
      sock.bind(self.target)
      os.chmod(self.target, 0o600)  # before anyone can connect
      sock.listen()
    except BaseException:
      sock.close()
      raise
    return sock

  def _answers(self) -> bool:
    try:
      self.connect(1.0).close()
    except ConnectionRefusedError:
      return False
    except OSError:
      return True
    return True


def check_key(key: bytes | None) -> None:
  """Raises ValueError if a key is too short to keep anyone out."""
  if key is not None and len(key) < MIN_KEY_BYTES:
    raise ValueError(f'key: {len(key)} bytes; must have at least {MIN_KEY_BYTES}')


# --- The opening.


def _mac(key: bytes | None, side: str, nonces: str) -> str:
  if key is None:
    return ''
  return hmac.new(key, f'm2jax handover {side} {nonces}'.encode(), 'sha256').hexdigest()


def _prove(frame: frames.Frame, key: bytes | None, side: str, nonces: str) -> None:
  want, found = _mac(key, side, nonces), frame.ascii_text('mac')
  if not hmac.compare_digest(want, found):
    raise frames.Malformed(f'the {side} side does not know the key')


def open_server(
  sock: socket.socket, key: bytes | None, hello: dict, timeout_s: float
) -> None:
  """Opens a connection from a decode process; sends it `hello` if it knows the key."""
  sock.settimeout(timeout_s)
  mine = secrets.token_hex(16)
  frames.send(sock, 'challenge', nonce=mine)
  answer = frames.receive(sock, 0, timeout_s)
  nonces = mine + answer.ascii_text('nonce')
  _prove(answer, key, 'decode', nonces)
  frames.send(sock, 'hello', **hello, mac=_mac(key, 'prefill', nonces))


def open_client(
  sock: socket.socket, key: bytes | None, timeout_s: float
) -> frames.Frame:
  """Opens a connection to a prefill process; returns its `hello`."""
  sock.settimeout(timeout_s)
  challenge, mine = frames.receive(sock, 0, timeout_s), secrets.token_hex(16)
  nonces = challenge.ascii_text('nonce') + mine
  frames.send(sock, 'challenge', nonce=mine, mac=_mac(key, 'decode', nonces))
  hello = frames.receive(sock, 0, timeout_s)
  _prove(hello, key, 'prefill', nonces)
  return hello


class Channel:
  """An open connection, with a thread that sends.

  `send` may be called from any thread and never blocks; one thread receives.
  """

  def __init__(
    self,
    sock: socket.socket,
    *,
    max_body_bytes: int,
    max_unsent_bytes: int,
    timeout_s: float,
  ):
    """Args:
    max_body_bytes: limit on a received frame's body.
    max_unsent_bytes: bytes beyond which a slow receiver is disconnected.
    timeout_s: timeout of a frame, sent or received.
    """
    self._receiving, self._sending = sock, sock.dup()
    self._max_body_bytes, self._timeout_s = max_body_bytes, timeout_s
    self._max_unsent_bytes = max_unsent_bytes
    self._frames: collections.deque[tuple[Callable, int]] = collections.deque()
    self._unsent = 0  # bytes
    self._wake = threading.Condition()
    self._closed = False
    self._thread = threading.Thread(target=self._send, daemon=True, name='handover')
    self._thread.start()

  @property
  def closed(self) -> bool:
    return self._closed

  def send(
    self, kind: str, arrays: Mapping[str, np.ndarray] | None = None, /, **fields: Any
  ) -> None:
    """Queues a frame (`frames.encode`); does nothing if the connection is closed."""
    # Encoded by the thread: what is not contiguous is copied there.
    send = functools.partial(frames.send, self._sending, kind, arrays, **fields)
    size = sum(x.nbytes for x in (arrays or {}).values()) + 1
    with self._wake:
      slow = self._unsent + size > self._max_unsent_bytes
      if not slow and not self._closed:
        self._frames.append((send, size))
        self._unsent += size
        self._wake.notify()
    if slow:
      self.close()

  def receive(self) -> frames.Frame | None:
    """The next frame; None if none has begun for IDLE_S. Raises as `frames.receive`."""
    bounds = self._max_body_bytes, self._timeout_s
    return frames.receive(self._receiving, *bounds, idle_s=IDLE_S)

  def close(self) -> None:
    """Ends both directions; `receive` raises. May be called more than once."""
    with self._wake:
      self._closed = True
      self._frames.clear()
      self._wake.notify()
    with contextlib.suppress(OSError):
      self._receiving.shutdown(socket.SHUT_RDWR)

  def join(self) -> None:
    """Closes and waits for the thread; by the thread that receives."""
    self.close()
    self._thread.join()
    self._sending.close()
    self._receiving.close()

  def _send(self) -> None:
    self._sending.settimeout(self._timeout_s)
    while True:
      with self._wake:
        self._wake.wait_for(lambda: self._frames or self._closed)
        if self._closed:
          return
        send, size = self._frames.popleft()
      try:
        send()
      except OSError:
        self.close()
        return
      with self._wake:
        self._unsent -= size
