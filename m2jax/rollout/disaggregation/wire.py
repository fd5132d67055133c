"""Frames between a prefill and a decode process: bytes, their bounds, and the key.

A frame is 16 bytes (`m2h1`, header bytes u32, body bytes u64, big-endian), a header of
JSON (one object with `kind`) and a body of raw arrays. Sizes are checked before
anything is allocated or parsed, nothing is unpickled, and shapes and dtypes come from
the receiver's own engine, never from a frame.

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
import hmac
import ipaddress
import json
import os
import secrets
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from m2jax.rollout.disaggregation.handover import HandoverError

MAX_HEADER_BYTES = 16 * 1024
MIN_KEY_BYTES = 16
IDLE_S = 1.0  # after which `receive` returns without a frame
_PREFIX = struct.Struct('>4sIQ')
_MAGIC = b'm2h1'


class ProtocolError(HandoverError):
  """The other side has sent what it must not; the connection ends."""


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


def send(sock: socket.socket, header: dict, arrays: Sequence[np.ndarray] = ()) -> None:
  """Sends a frame; raises OSError, TimeoutError among them."""
  head = json.dumps(header).encode()
  parts = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in arrays]
  body = sum(part.nbytes for part in parts)
  sock.sendall(_PREFIX.pack(_MAGIC, len(head), body) + head)
  for part in parts:
    sock.sendall(part)


def receive(
  sock: socket.socket, max_body_bytes: int, timeout_s: float, *, idle: bool = False
) -> tuple[dict[str, Any], bytearray] | None:
  """Receives a frame: its header and body.

  Args:
    timeout_s: within which a frame that has begun must be complete.
    idle: return None if none begins within IDLE_S.

  Raises:
    ProtocolError: it is no frame, or larger than it may be.
    OSError: the connection is closed or too slow.
  """
  sock.settimeout(IDLE_S if idle else timeout_s)
  try:
    begin = sock.recv(1)
  except TimeoutError:
    if idle:
      return None
    raise
  deadline = time.monotonic() + timeout_s
  rest = _receive_exactly(sock, _PREFIX.size - 1, deadline, begin)
  magic, header_bytes, body_bytes = _PREFIX.unpack(begin + rest)
  if magic != _MAGIC:
    raise ProtocolError('bytes that are no frame')
  if header_bytes > MAX_HEADER_BYTES or body_bytes > max_body_bytes:
    raise ProtocolError(
      f'a frame of {header_bytes} + {body_bytes} bytes; at most {MAX_HEADER_BYTES} + '
      f'{max_body_bytes} are allowed'
    )
  text = _receive_exactly(sock, header_bytes, deadline)
  try:
    header = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ProtocolError('a header that is no JSON') from error
  if not isinstance(header, dict) or not isinstance(header.get('kind'), str):
    raise ProtocolError('a header without kind')
  return header, _receive_exactly(sock, body_bytes, deadline)


def _receive_exactly(
  sock: socket.socket, count: int, deadline: float, begin: bytes = b'-'
) -> bytearray:
  if not begin:
    raise ConnectionError('the connection was closed')
  out = bytearray(count)
  left = memoryview(out)
  while left:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
      raise TimeoutError('a frame takes too long')
    sock.settimeout(remaining)
    got = sock.recv_into(left)
    if not got:
      raise ConnectionError('the connection was closed within a frame')
    left = left[got:]
  return out


def integer(header: dict, field: str, least: int = 0, most: int = 2**53) -> int:
  """An integer field of a header; raises ProtocolError."""
  value = header.get(field)
  if type(value) is not int or not least <= value <= most:
    raise ProtocolError(
      f'{header["kind"]}: {field} must be an integer, at least {least}'
    )
  return value


def version(header: dict, field: str) -> int:
  """A field that is a `records.policy_version`; raises ProtocolError."""
  return integer(header, field, -(2**31), 2**31 - 1)


def text(header: dict, field: str) -> str:
  """A short text field of a header, '' if it is missing; raises ProtocolError."""
  value = header.get(field, '')
  if not isinstance(value, str):
    raise ProtocolError(f'{header["kind"]}: {field} must be text')
  return value[:500]


def ascii_text(header: dict, field: str) -> str:
  """`text` of ASCII characters alone; lone surrogates have no bytes to sign."""
  value = text(header, field)
  if not value.isascii():
    raise ProtocolError(f'{header["kind"]}: {field} must be ASCII')
  return value


# --- The opening.


def _mac(key: bytes | None, side: str, nonces: str) -> str:
  if key is None:
    return ''
  return hmac.new(key, f'm2jax handover {side} {nonces}'.encode(), 'sha256').hexdigest()


def _prove(header: dict, key: bytes | None, side: str, nonces: str) -> None:
  want, found = _mac(key, side, nonces), ascii_text(header, 'mac')
  if not hmac.compare_digest(want, found):
    raise ProtocolError(f'the {side} side does not know the key')


def open_server(
  sock: socket.socket, key: bytes | None, hello: dict, timeout_s: float
) -> None:
  """Opens a connection from a decode process; sends it `hello` if it knows the key."""
  sock.settimeout(timeout_s)
  mine = secrets.token_hex(16)
  send(sock, dict(kind='challenge', nonce=mine))
  header, _ = receive(sock, 0, timeout_s)
  nonces = mine + ascii_text(header, 'nonce')
  _prove(header, key, 'decode', nonces)
  send(sock, dict(hello, kind='hello', mac=_mac(key, 'prefill', nonces)))


def open_client(sock: socket.socket, key: bytes | None, timeout_s: float) -> dict:
  """Opens a connection to a prefill process; returns its `hello`."""
  sock.settimeout(timeout_s)
  header, _ = receive(sock, 0, timeout_s)
  mine = secrets.token_hex(16)
  nonces = ascii_text(header, 'nonce') + mine
  answer = dict(kind='challenge', nonce=mine, mac=_mac(key, 'decode', nonces))
  send(sock, answer)
  hello, _ = receive(sock, 0, timeout_s)
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
    max_body_bytes: of a received frame.
    max_unsent_bytes: beyond which a slow receiver is disconnected.
    timeout_s: of a frame, sent or received.
    """
    self._receiving, self._sending = sock, sock.dup()
    self._max_body_bytes, self._timeout_s = max_body_bytes, timeout_s
    self._max_unsent_bytes = max_unsent_bytes
    self._frames: collections.deque[tuple[dict, Sequence[np.ndarray]]]
    self._frames = collections.deque()
    self._unsent = 0
    self._wake = threading.Condition()
    self._closed = False
    self._thread = threading.Thread(target=self._send, daemon=True, name='handover')
    self._thread.start()

  @property
  def closed(self) -> bool:
    return self._closed

  def send(self, header: dict, arrays: Sequence[np.ndarray] = ()) -> None:
    """Queues a frame; does nothing if the connection is closed."""
    size = sum(x.nbytes for x in arrays) + 1
    with self._wake:
      slow = self._unsent + size > self._max_unsent_bytes
      if not slow and not self._closed:
        self._frames.append((header, arrays))
        self._unsent += size
        self._wake.notify()
    if slow:
      self.close()

  def receive(self) -> tuple[dict[str, Any], bytearray] | None:
    """The next frame; None if none has begun for IDLE_S. Raises as `receive`."""
    return receive(self._receiving, self._max_body_bytes, self._timeout_s, idle=True)

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
        header, arrays = self._frames.popleft()
      try:
        send(self._sending, header, arrays)
      except OSError:
        self.close()
        return
      with self._wake:
        self._unsent -= sum(x.nbytes for x in arrays) + 1
