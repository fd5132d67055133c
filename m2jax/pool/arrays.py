"""Arrays of a completion as one blob, as a difference from its parent's.

The prompt of a completion that extends another one begins with the parent's prompt and
response, so a session of n turns would store its first prompt n times. A blob holds
only the prompt ids after that prefix, and the expert ids of the prefix only at the
positions where they differ from the parent's. Both are compared element by element when
the blob is made; a prompt without that prefix is stored completely. `unpack` always
returns the arrays that were packed.

Format: a header byte, four little-endian int32 lengths (stored prompt ids, response,
shared ids, shared positions whose expert ids differ), int32 prompt ids, int32 response
ids, float32 log-probabilities, int32 versions; if expert ids were recorded, int32 L and
top_k, the int32 positions that differ, and int16 ids of these and of all positions
after the shared ones. Above `COMPRESS_BYTES` everything after the header is a zstd
frame.
"""

from __future__ import annotations

import collections
import math
import struct
import threading

import numpy as np
import zstandard

from m2jax import records

COMPRESS_BYTES = 128

_LENGTHS = struct.Struct('<iiii')
_EXPERTS = struct.Struct('<ii')
_ZSTD, _HAS_EXPERTS = 1, 4  # header bits
_RECORD_BYTES = 1500  # approximate memory of a completion without its arrays' values
_local = threading.local()


class Recent:
  """Cache of the newest completions, which others may extend; bounded in bytes."""

  def __init__(self, max_bytes: int = 2**28):
    self._max_bytes = max_bytes
    self._bytes = 0
    self._by_id: collections.OrderedDict[str, records.Completion] = (
      collections.OrderedDict()
    )

  def get(self, id_: str | None) -> records.Completion | None:
    """The completion, or None if it is not in the cache."""
    return self._by_id.get(id_)

  def add(self, c: records.Completion) -> None:
    """Adds a completion and evicts the oldest ones beyond the limit."""
    if (before := self._by_id.pop(c.id, None)) is not None:  # its commit was repeated
      self._bytes -= _memory_bytes(before)
    self._by_id[c.id] = c
    self._bytes += _memory_bytes(c)
    while self._bytes > self._max_bytes:
      self._bytes -= _memory_bytes(self._by_id.popitem(last=False)[1])

  def drop(self, sessions: set[str]) -> None:
    """Removes the completions of sessions that have ended."""
    for c in [c for c in self._by_id.values() if c.session in sessions]:
      self._bytes -= _memory_bytes(self._by_id.pop(c.id))

  def clear(self) -> None:
    """Removes all completions."""
    self._by_id.clear()
    self._bytes = 0


def pack(c: records.Completion, parent: records.Completion | None) -> bytes:
  """Packs the arrays of a completion into a blob.

  Args:
    parent: the completion with id `c.parent`; without it the prompt is stored
      completely.
  """
  shared = _shared(c, parent)
  changed = np.zeros(0, '<i4')
  if shared and c.experts is not None:
    differs = (c.experts[:shared] != parent.experts).any(axis=(1, 2))
    changed = np.flatnonzero(differs).astype('<i4')
  flags, own = 0, c.prompt_ids[shared:]
  parts = [
    _LENGTHS.pack(len(own), len(c.response_ids), shared, len(changed)),
    own.astype('<i4', copy=False).tobytes(),
    c.response_ids.astype('<i4', copy=False).tobytes(),
    c.logprobs.astype('<f4', copy=False).tobytes(),
    c.versions.astype('<i4', copy=False).tobytes(),
  ]
  if c.experts is not None:
    flags |= _HAS_EXPERTS
    experts = np.concatenate([c.experts[changed], c.experts[shared:]])
    parts += [_EXPERTS.pack(*c.experts.shape[1:]), changed.tobytes()]
    parts += [experts.astype('<i2').tobytes()]
  return compress(flags, b''.join(parts))


def unpack(
  blob: bytes, parent: records.Completion | None
) -> dict[str, np.ndarray | None]:
  """The inverse of `pack`: the fields of `records.Completion` in a blob.

  Raises:
    ValueError: the blob needs its parent, and `parent` is None or another one.
  """
  flags, body = decompress(blob)
  own, response, shared, changed = _LENGTHS.unpack_from(body)
  if shared and (parent is None or _tokens(parent) != shared):
    raise ValueError(
      f'data pool: the parent of a completion, of {shared} tokens, is missing'
    )
  offset = _LENGTHS.size

  def read(dtype: str, count: int) -> np.ndarray:
    nonlocal offset
    values = np.frombuffer(body, dtype, count, offset)
    offset += values.nbytes
    return values

  prompt_ids = read('<i4', own)
  if shared:
    prompt_ids = np.concatenate([parent.prompt_ids, parent.response_ids, prompt_ids])
  out = {
    'prompt_ids': prompt_ids,
    'response_ids': read('<i4', response),
    'logprobs': read('<f4', response),
    'versions': read('<i4', response),
    'experts': None,
  }
  if flags & _HAS_EXPERTS:
    ids = tuple(_EXPERTS.unpack_from(body, offset))
    offset += _EXPERTS.size
    positions = read('<i4', changed)
    rest = own + response
    experts = read('<i2', (changed + rest) * math.prod(ids)).reshape(-1, *ids)
    out['experts'] = experts[changed:]
    if shared:
      out['experts'] = np.concatenate([parent.experts, experts[changed:]])
      out['experts'][positions] = experts[:changed]
  return out


def compress(flags: int, body: bytes) -> bytes:
  """A header byte and the body; a long body is compressed to a zstd frame."""
  if len(body) > COMPRESS_BYTES:
    return bytes([flags | _ZSTD]) + _zstd().compress(body)
  return bytes([flags]) + body


def decompress(blob: bytes) -> tuple[int, bytes]:
  """The inverse of `compress`."""
  flags, body = blob[0], blob[1:]
  if flags & _ZSTD:
    body = zstandard.decompress(body)
  return flags, body


def _shared(c: records.Completion, parent: records.Completion | None) -> int:
  """Number of prompt ids shared with the parent: all of the parent's, or 0."""
  if parent is None or parent.session != c.session or parent.id != c.parent:
    return 0
  middle, end = len(parent.prompt_ids), _tokens(parent)
  same_prompt = np.array_equal(c.prompt_ids[:middle], parent.prompt_ids)
  if not same_prompt or not np.array_equal(
    c.prompt_ids[middle:end], parent.response_ids
  ):
    return 0
  own, others = c.experts, parent.experts
  if own is not None and (others is None or own.shape[1:] != others.shape[1:]):
    return 0
  return end


def _tokens(c: records.Completion) -> int:
  return len(c.prompt_ids) + len(c.response_ids)


def _memory_bytes(c: records.Completion) -> int:
  arrays = (c.prompt_ids, c.response_ids, c.logprobs, c.versions, c.experts)
  return _RECORD_BYTES + sum(a.nbytes for a in arrays if a is not None)


def _zstd() -> zstandard.ZstdCompressor:
  """This thread's compressor; making one costs as much as compressing a completion."""
  if not hasattr(_local, 'zstd'):
    _local.zstd = zstandard.ZstdCompressor(level=1)
  return _local.zstd
