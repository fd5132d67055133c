"""Messages between processes as bytes: one format, checked when it is read.

A frame is 16 bytes (`m2f1`, header bytes u32, body bytes u64, big-endian), a header of
JSON, one object, and a body of raw little-endian arrays, one after the other:

  {"kind": "ask", "number": 7, "arrays": {"tokens": ["int32", [9]]}}

Sizes are checked before anything is allocated or parsed, and nothing is unpickled. The
reader names the fields, and the arrays by type and shape, that a kind must have; what
differs is `Malformed`, which names it. Frames are neither encrypted nor signed.

Whole: `pack`, `decode`. On a socket: `send`, `receive`. In a response over HTTP:
`stream`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

PREFIX_BYTES, MAX_HEADER_BYTES = 16, 64 << 10
_PREFIX, _MAGIC = struct.Struct('>4sIQ'), b'm2f1'
_MAX_ARRAYS, _MAX_AXES = 256, 16
_DTYPES = {
  name: jnp.dtype(name)
  for name in (
    *('bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32'),
    *('float16', 'float32', 'float64', 'bfloat16', 'float8_e4m3fn'),
  )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Malformed(Exception):
  """The bytes are no frame, or none of its kind; the message names the field."""


@dataclasses.dataclass(frozen=True)
class Frame:
  """A frame that was read: its form is checked, its values are not.

  Attributes:
    kind: the kind of message.
    fields: the rest of the header.
    arrays: views of the body.
  """

  kind: str
  fields: Mapping[str, Any]
  arrays: Mapping[str, np.ndarray]

  def wrong(self, field: str, must: str) -> Malformed:
    """The error of a field."""
    return Malformed(f'{self.kind}: {field} must be {must}')

  def integer(self, field: str, least: int = 0, most: int = 2**53) -> int:
    """An integer field; raises Malformed."""
    value = self.fields.get(field)
    if type(value) is not int or not least <= value <= most:
      raise self.wrong(field, f'an integer, {least} to {most}')
    return value

  def version(self, field: str) -> int:
    """A field that is a `records.policy_version`; raises Malformed."""
    return self.integer(field, -(2**31), 2**31 - 1)

  def text(self, field: str) -> str:
    """A text field, cut to 500 characters, '' if it is missing; raises Malformed."""
    value = self.fields.get(field, '')
    if not isinstance(value, str):
      raise self.wrong(field, 'text')
    return value[:500]

  def ascii_text(self, field: str) -> str:
    """`text` of ASCII characters alone; lone surrogates have no bytes to sign."""
    value = self.text(field)
    if not value.isascii():
      raise self.wrong(field, 'ASCII')
    return value

  def array(
    self,
    name: str,
    dtype: Any,
    shape: Sequence[int | None],
    within: tuple[int, int] | None = None,
    *,
    optional: bool = False,
  ) -> np.ndarray | None:
    """An array.

    Args:
      shape: None is any size.
      within: the least value, and the one after the largest.
      optional: return None if it is missing.

    Raises:
      Malformed: it is another one, or missing.
    """
    found = self.arrays.get(name)
    if found is None and optional:
      return None
    if (
      found is None
      or (found.dtype, found.ndim) != (dtype, len(shape))
      or any(n not in (None, m) for n, m in zip(shape, found.shape, strict=True))
    ):
      axes = ', '.join('any' if n is None else str(n) for n in shape)
      raise self.wrong(name, f'an array [{axes}] of {jnp.dtype(dtype).name}')
    if within and found.size:
      least, end = within
      if not least <= found.min() <= found.max() < end:
        raise self.wrong(name, f'from {least} to {end - 1}')
    return found


def encode(
  kind: str, arrays: Mapping[str, Any] | None = None, /, **fields: Any
) -> list[Any]:
  """A frame as buffers, to be sent one after the other; arrays are not copied.

  Args:
    kind: an identifier.
    arrays: name → array.
    **fields: JSON-able.
  """
  arrays = {name: np.asarray(x, order='C') for name, x in (arrays or {}).items()}
  header = dict(fields, kind=kind)
  if arrays:
    header['arrays'] = {name: (_NAMES[x.dtype], x.shape) for name, x in arrays.items()}
  head = json.dumps(header).encode()
  if len(head) > MAX_HEADER_BYTES:
    raise ValueError(f'{kind}: a header of {len(head)} bytes; {MAX_HEADER_BYTES} fit')
  body = sum(x.nbytes for x in arrays.values())
  prefix = _PREFIX.pack(_MAGIC, len(head), body)
  return [prefix + head, *(x.reshape(-1).view(np.uint8) for x in arrays.values())]


def pack(kind: str, arrays: Mapping[str, Any] | None = None, /, **fields: Any) -> bytes:
  """A frame as bytes; see `encode`."""
  return b''.join(encode(kind, arrays, **fields))


def decode(data: Any) -> Frame:
  """The inverse; raises Malformed, also if anything follows the frame."""
  data = memoryview(data)
  head, body = _sizes(data[:PREFIX_BYTES], len(data))
  if len(data) != PREFIX_BYTES + head + body:
    raise Malformed(f'{len(data)} bytes; a header of {head} and a body of {body}')
  return _parse(data[PREFIX_BYTES : PREFIX_BYTES + head], data[PREFIX_BYTES + head :])


def _sizes(prefix: Any, max_body_bytes: int) -> tuple[int, int]:
  """Bytes of header and body; raises Malformed."""
  if len(prefix) < PREFIX_BYTES or prefix[:4] != _MAGIC:
    raise Malformed('bytes that are no frame')
  _, head, body = _PREFIX.unpack(prefix)
  if head > MAX_HEADER_BYTES or body > max_body_bytes:
    raise Malformed(
      f'a frame of {head} + {body} bytes; at most {MAX_HEADER_BYTES} + '
      f'{max_body_bytes} are allowed'
    )
  return head, body


def _parse(head: Any, body: Any) -> Frame:
  try:
    fields = json.loads(bytes(head))
  except (ValueError, RecursionError) as error:
    raise Malformed(f'a header that is no JSON: {error}') from error
  kind = fields.get('kind') if isinstance(fields, dict) else None
  if not isinstance(kind, str) or not (kind.isascii() and kind.isidentifier()):
    raise Malformed('a header without kind')
  del fields['kind']
  named = fields.pop('arrays', {})
  if not isinstance(named, dict) or len(named) > _MAX_ARRAYS:
    raise Malformed(f'{kind}: arrays must be an object of at most {_MAX_ARRAYS}')
  arrays, start = {}, 0
  for name, described in named.items():
    dtype, shape = _described(kind, name, described)
    end = start + math.prod(shape) * dtype.itemsize
    if end > len(body):
      raise Malformed(f'{kind}: {name[:40]!r} must have {end - start} bytes')
    arrays[name] = np.frombuffer(body, dtype, math.prod(shape), start).reshape(shape)
    start = end
  if start != len(body):
    raise Malformed(f'{kind}: {len(body)} bytes, of which the arrays are {start}')
  return Frame(kind, fields, arrays)


def _described(kind: str, name: str, value: Any) -> tuple[np.dtype, list[int]]:
  if isinstance(value, list) and len(value) == 2:
    dtype, shape = value
    whole = isinstance(shape, list) and len(shape) <= _MAX_AXES
    if whole and all(type(n) is int and 0 <= n < 2**40 for n in shape):
      if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype], shape
  raise Malformed(f'{kind}: {name[:40]!r} must be a type and a shape')


def send(
  sock: socket.socket,
  kind: str,
  arrays: Mapping[str, Any] | None = None,
  /,
  **fields: Any,
) -> None:
  """Sends a frame; see `encode`. Raises OSError, TimeoutError among them."""
  for part in encode(kind, arrays, **fields):
    sock.sendall(part)


def receive(
  sock: socket.socket,
  max_body_bytes: int,
  timeout_s: float,
  *,
  idle_s: float | None = None,
) -> Frame | None:
  """Receives a frame.

  Args:
    timeout_s: within which a frame that has begun must be complete.
    idle_s: return None if none begins within it.

  Raises:
    Malformed: it is no frame, or larger than it may be.
    OSError: the connection is closed or too slow.
  """
  sock.settimeout(timeout_s if idle_s is None else idle_s)
  try:
    begin = sock.recv(1)
  except TimeoutError:
    if idle_s is None:
      raise
    return None
  if not begin:
    raise ConnectionError('the connection was closed')
  ends_s = time.monotonic() + timeout_s
  rest = _receive_exactly(sock, PREFIX_BYTES - 1, ends_s)
  head, body = _sizes(begin + rest, max_body_bytes)
  text = _receive_exactly(sock, head, ends_s)
  return _parse(text, _receive_exactly(sock, body, ends_s))


def _receive_exactly(sock: socket.socket, count: int, ends_s: float) -> bytearray:
  out = bytearray(count)
  left = memoryview(out)
  while left:
    remaining = ends_s - time.monotonic()
    if remaining <= 0:
      raise TimeoutError('a frame takes too long')
    sock.settimeout(remaining)
    got = sock.recv_into(left)
    if not got:
      raise ConnectionError('the connection was closed within a frame')
    left = left[got:]
  return out


async def stream(
  chunks: AsyncIterator[bytes], max_body_bytes: int
) -> AsyncIterator[Frame]:
  """The frames in a stream of bytes.

  Raises:
    Malformed: bytes are no frame, or the stream ends within one.
  """
  buffer = bytearray()
  async for chunk in chunks:
    buffer += chunk
    while len(buffer) >= PREFIX_BYTES:
      end = PREFIX_BYTES + sum(_sizes(buffer[:PREFIX_BYTES], max_body_bytes))
      if len(buffer) < end:
        break
      yield decode(bytes(buffer[:end]))
      del buffer[:end]
  if buffer:
    raise Malformed('the stream ended within a frame')
