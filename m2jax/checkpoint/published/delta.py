"""Differences of arrays between two versions, bit by bit.

An array, or a process's shard of it, is divided into boxes of a bounded size. The
difference of a box is the XOR of its bit patterns: of all values, or, if most are the
same, of those that changed, with the distance of each from the one before. The bytes
are regrouped (the first of every value, then the second, …) and compressed by
zstandard. XOR restores every bit, so NaNs and -0.0 need no care. A box in which nothing
changed is not stored.

In RL over 99 % of the bytes of bfloat16 weights do not change in a step
(docs/facts/rl-systems.md §4.6).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import zstandard

# Memory that a box needs beside the arrays, a few times over.
BOX_BYTES = 2**23
_LEVEL = 3  # of zstandard; higher ones gain little on such data
# Below it, positions and values take less room than all values, most of them 0.
_SPARSE_SHARE = 0.5
_DENSE, _SPARSE = b'd', b's'

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
  """Where the difference of a box is, and what checks it.

  Attributes:
    name: the leaf's name.
    start, stop: per axis, in the whole leaf.
    crc32: checksum of the box's bytes in the new version.
    offset, size: where the payload is in the data file, in bytes.
    payload_crc32: checksum of the payload.
  """

  name: str
  start: tuple[int, ...]
  stop: tuple[int, ...]
  crc32: int
  offset: int = 0
  size: int = 0
  payload_crc32: int = 0

  @property
  def box(self) -> Box:
    return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))


def entry(name: str, at: Box, values: np.ndarray) -> Entry:
  """The entry of a box with these values, without a payload."""
  bounds = tuple(s.start for s in at), tuple(s.stop for s in at)
  return Entry(name, *bounds, crc32(values))


def encode_index(entries: Sequence[Entry], counts: Mapping[str, list[int]]) -> bytes:
  """Entries and counts as JSON, a list for each entry."""
  rows = [dataclasses.astuple(entry) for entry in entries]
  content = {'counts': counts, 'boxes': rows}
  return json.dumps(content, separators=(',', ':')).encode()


def decode_index(data: bytes) -> tuple[list[Entry], dict[str, list[int]]]:
  """The inverse of `encode_index`."""
  content = json.loads(data)
  rows = content['boxes']
  entries = [Entry(r[0], tuple(r[1]), tuple(r[2]), *r[3:]) for r in rows]
  return entries, content['counts']


def boxes(
  shape: Sequence[int], itemsize: int, limit_bytes: int = BOX_BYTES
) -> Iterator[Box]:
  """Boxes that cover an array, in order, each of at most `limit_bytes` or one value."""
  if 0 in shape:
    return
  sizes, room = [1] * len(shape), max(1, limit_bytes // itemsize)
  for axis in reversed(range(len(shape))):  # whole rows of the last axes
    sizes[axis] = min(shape[axis], max(1, room))
    room //= shape[axis]
  ranges = [range(0, n, step) for n, step in zip(shape, sizes, strict=True)]
  for starts in itertools.product(*ranges):
    yield tuple(
      slice(a, min(a + step, n))
      for a, step, n in zip(starts, sizes, shape, strict=True)
    )


def shifted(box: Box, start: Sequence[int], sign: int = 1) -> Box:
  """The box with `start` added to every bound, or subtracted."""
  return tuple(
    slice(s.start + sign * a, s.stop + sign * a)
    for s, a in zip(box, start, strict=True)
  )


def intersection(a: Box, b: Box) -> Box | None:
  """What two boxes have in common; None if that is nothing."""
  common = tuple(
    slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
  )
  return None if any(s.start >= s.stop for s in common) else common


def bits(array: np.ndarray) -> np.ndarray:
  """The bit patterns, as unsigned integers of the same shape; a view if it can be."""
  array = np.ascontiguousarray(array).reshape(array.shape)
  return array.view(np.dtype(f'u{array.dtype.itemsize}'))


def crc32(array: np.ndarray) -> int:
  """Checksum of the bytes in C order."""
  return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def encode(old: np.ndarray, new: np.ndarray) -> tuple[bytes, int] | None:
  """The difference of two boxes of one dtype, and the number of changed values.

  None if no bit differs.
  """
  xor = (bits(old) ^ bits(new)).reshape(-1)
  where = np.flatnonzero(xor)
  if not where.size:
    return None
  if where.size < _SPARSE_SHARE * xor.size:
    distances = np.diff(where, prepend=-1).astype(np.uint32)
    return _SPARSE + _compress(distances, xor[where]), where.size
  return _DENSE + _compress(xor), where.size


def decode(payload: bytes, shape: Sequence[int], dtype: Any) -> np.ndarray:
  """The XOR of the bit patterns of a box, as unsigned integers.

  Raises:
    ValueError: the payload is not the difference of a box of this size.
  """
  words = np.dtype(f'u{np.dtype(dtype).itemsize}')
  size = int(np.prod(shape, dtype=np.int64))
  mode, packed = payload[:1], payload[1:]
  if mode == _DENSE:
    (xor,) = _decompress(packed, size, words)
    if len(xor) != size:
      raise ValueError(f'{len(xor)} values instead of {size}')
    return xor.reshape(shape)
  if mode != _SPARSE:
    raise ValueError(f'unknown kind {mode!r}')
  distances, values = _decompress(packed, size, np.dtype(np.uint32), words)
  where = np.cumsum(distances, dtype=np.int64) - 1
  if not (distances.all() and (where[-1:] < size).all()):
    raise ValueError('positions beyond the box')
  xor = np.zeros(size, words)
  xor[where] = values
  return xor.reshape(shape)


def _compress(*arrays: np.ndarray) -> bytes:
  """Arrays of one length, regrouped: the first bytes of all values, the second, …"""
  planes = [
    np.ascontiguousarray(a.view(np.uint8).reshape(-1, a.dtype.itemsize).T)
    for a in arrays
  ]
  data = b''.join(plane.tobytes() for plane in planes)
  return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _decompress(data: bytes, most: int, *dtypes: np.dtype) -> list[np.ndarray]:
  """The inverse of `_compress`, for arrays of up to `most` values."""
  width = sum(dtype.itemsize for dtype in dtypes)
  try:
    size = zstandard.frame_content_size(data)
    if size % width or not 0 <= size <= most * width:  # before anything is allocated
      raise ValueError(f'{size} bytes, for {most} values of {width}')
    data = zstandard.ZstdDecompressor().decompress(data)
  except zstandard.ZstdError as error:
    raise ValueError(f'not compressed by zstandard: {error}') from error
  count, arrays, offset = size // width, [], 0
  for dtype in dtypes:
    planes = np.frombuffer(data, np.uint8, count * dtype.itemsize, offset)
    words = np.ascontiguousarray(planes.reshape(dtype.itemsize, count).T)
    arrays.append(words.view(dtype).reshape(-1))
    offset += planes.size
  return arrays


def total(counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
  """Sums of the counts of several processes, by dtype."""
  out: dict[str, list[int]] = {}
  for part in counts:
    for dtype, values in part.items():
      have = out.get(dtype, [0] * len(values))
      out[dtype] = [a + b for a, b in zip(have, values, strict=True)]
  return out
