"""Differences of arrays between two versions, bit by bit.

An array, or a process's shard of it, is divided into boxes of a bounded size. A box
that changed is stored as the XOR of the bit patterns, its bytes regrouped (the first of
every value, then the second, …) and compressed by zstandard: after a small step most
values of bfloat16 weights are the same, and in the others only low bits differ. XOR
restores every bit, so NaNs and -0.0 need no care. A box without a change is not stored.

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

Box = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
  """Where the difference of a box is, and what checks it.

  Attributes:
    name: of the leaf.
    start, stop: per axis, in the whole leaf.
    crc32: of the box's bytes in the new version.
    offset, size: of the payload in the data file, in bytes.
    payload_crc32: of the payload.
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
  """Of a box with these values, without a payload."""
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
  sizes = list(shape)
  for axis, size in enumerate(shape):
    rest = itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64))
    sizes[axis] = max(1, min(size, limit_bytes // max(rest, 1)))
    if sizes[axis] > 1 or rest <= limit_bytes:
      break
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
  xor = bits(old) ^ bits(new)
  changed = int(np.count_nonzero(xor))
  if not changed:
    return None
  planes = xor.reshape(-1).view(np.uint8).reshape(-1, xor.dtype.itemsize).T
  compressor = zstandard.ZstdCompressor(level=_LEVEL)
  return compressor.compress(np.ascontiguousarray(planes)), changed


def decode(payload: bytes, shape: Sequence[int], dtype: Any) -> np.ndarray:
  """The XOR of the bit patterns of a box, as unsigned integers.

  Raises:
    ValueError: the payload is not that of a box of this size.
  """
  itemsize = np.dtype(dtype).itemsize
  count = int(np.prod(shape, dtype=np.int64))
  try:
    size = zstandard.frame_content_size(payload)
    if size != count * itemsize:  # before anything is allocated
      raise ValueError(f'a box of {size} bytes instead of {count * itemsize}')
    data = zstandard.ZstdDecompressor().decompress(payload)
  except zstandard.ZstdError as error:
    raise ValueError(f'not a compressed difference: {error}') from error
  planes = np.frombuffer(data, np.uint8).reshape(itemsize, count)
  xor = np.ascontiguousarray(planes.T).view(np.dtype(f'u{itemsize}'))
  return xor.reshape(shape)


def total(counts: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
  """Sums of the counts of several processes, by dtype."""
  out: dict[str, list[int]] = {}
  for part in counts:
    for dtype, values in part.items():
      have = out.get(dtype, [0] * len(values))
      out[dtype] = [a + b for a, b in zip(have, values, strict=True)]
  return out
