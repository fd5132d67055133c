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
MAX_BYTES = 1 << 30  # of a body, before it is compressed

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
    ValueError: the blob is damaged, or needs its parent, and `parent` is None or
      another one.
  """
  flags, body = decompress(blob)
  try:
    own, response, shared, changed = lengths = _LENGTHS.unpack_from(body)
    size, ids = _LENGTHS.size + 4 * own + 12 * response, ()
    if flags & _HAS_EXPERTS and min(lengths) >= 0:
      ids = _EXPERTS.unpack_from(body, size)
      rows = changed + own + response
      size += _EXPERTS.size + 4 * changed + 2 * rows * math.prod(ids)
  except struct.error as error:
    raise ValueError(f'data pool: arrays of a completion: {error}') from error
  if min(*lengths, *ids) < 0 or size != len(body):
    raise ValueError(
      f'data pool: arrays of a completion: {len(body)} bytes for the lengths '
      f'{(*lengths, *ids)}'
    )
  if shared and (parent is None or _tokens(parent) != shared):
    raise ValueError(
      f'data pool: the parent of a completion, of {shared} tokens, is missing'
    )
  if shared and ids and (parent.experts is None or parent.experts.shape[1:] != ids):
    raise ValueError(f'data pool: the parent of a completion has no expert ids {ids}')
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
    offset += _EXPERTS.size
    positions = read('<i4', changed)
    if not ((positions >= 0) & (positions < shared)).all():
      raise ValueError('data pool: expert ids of a completion: positions out of range')
    experts = read('<i2', rows * math.prod(ids)).reshape(rows, *ids)
    out['experts'] = experts[changed:]
    if shared:
      out['experts'] = np.concatenate([parent.experts, experts[changed:]])
      out['experts'][positions] = experts[:changed]
  return out


def compress(flags: int, body: bytes) -> bytes:
  """A header byte and the body; a long body is compressed to a zstd frame.

  Raises:
    ValueError: the body has more than `MAX_BYTES`: it would not be read.
  """
  if len(body) > MAX_BYTES:
    raise ValueError(f'data pool: {len(body)} bytes are more than {MAX_BYTES}')
  if len(body) > COMPRESS_BYTES:
    return bytes([flags | _ZSTD]) + _zstd().compress(body)
  return bytes([flags]) + body


def decompress(blob: bytes) -> tuple[int, bytes]:
  """The inverse of `compress`.

  Raises:
    ValueError: the blob is damaged, or its body has more than `MAX_BYTES`.
  """
  flags, body = int.from_bytes(blob[:1]), blob[1:]
  if flags & _ZSTD:
    try:
      size = zstandard.frame_content_size(body)
      if not 0 <= size <= MAX_BYTES:  # before anything is allocated
        raise ValueError(f'data pool: {size} bytes, of at most {MAX_BYTES}')
      body = zstandard.decompress(body)
    except zstandard.ZstdError as error:
      raise ValueError(f'data pool: not compressed by zstd: {error}') from error
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
