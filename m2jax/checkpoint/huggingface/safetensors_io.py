"""Safetensors files, read and written a few rows at a time.

The format (github.com/huggingface/safetensors): the header's length as 8 little-endian
bytes; the header, JSON of {name: {dtype, shape, data_offsets [begin, end)}}; the data.
The library reads a tensor as a whole and writes a file from tensors that are all in
memory; a checkpoint larger than the host's memory needs neither to happen.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from m2jax.checkpoint.errors import CorruptCheckpoint

DTYPES = {
  'F64': np.dtype(np.float64),
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(jnp.bfloat16),
  'F8_E4M3': np.dtype(jnp.float8_e4m3fn),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_METADATA = '__metadata__'


class Entry(NamedTuple):
  """One tensor of a file: format's dtype code, shape, first byte in the file."""

  code: str
  shape: tuple[int, ...]
  offset: int

  def __str__(self):
    return f'{self.code}[{",".join(map(str, self.shape))}]'


class Reader:
  """One file, read with `pread`: no mapped pages, nothing kept.

  Attributes:
    path: of the file.
    entries: its tensors by name.
  """

  def __init__(self, path: str | os.PathLike):
    """Reads the header.

    Raises:
      FileNotFoundError: no such file.
      CorruptCheckpoint: no header, or the file ends before a tensor; names the first.
    """
    self.path = os.fspath(path)
    self._fd = os.open(self.path, os.O_RDONLY)
    try:
      self.entries = self._read_header(os.fstat(self._fd).st_size)
    except BaseException:
      self.close()
      raise

  def close(self):
    os.close(self._fd)

  def rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of a tensor, as a new array; elements of a 1-D tensor.

    Raises:
      CorruptCheckpoint: the file ends before them.
    """
    code, shape, offset = self.entries[name]
    out = np.empty((stop - start, *shape[1:]), DTYPES[code])
    row_bytes = math.prod(shape[1:]) * out.dtype.itemsize
    view = memoryview(out.reshape(-1).view(np.uint8))
    at = offset + start * row_bytes
    while view:
      count = os.preadv(self._fd, [view], at)
      if not count:
        raise CorruptCheckpoint(f'{self.path}: truncated inside tensor {name}')
      view, at = view[count:], at + count
    return out

  def _read_header(self, size: int) -> dict[str, Entry]:
    length = int.from_bytes(os.pread(self._fd, _LENGTH_BYTES, 0), 'little')
    first = _LENGTH_BYTES + length
    if size < first or not length:
      raise CorruptCheckpoint(
        f'{self.path}: {size} bytes do not hold a safetensors header'
        + (f' of {length} bytes' if size >= _LENGTH_BYTES else '')
      )
    try:
      header = json.loads(_pread(self._fd, length, _LENGTH_BYTES))
      found = {
        name: (_entry(tensor, first), first + tensor['data_offsets'][1])
        for name, tensor in header.items()
        if name != _METADATA
      }
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
      raise CorruptCheckpoint(
        f'{self.path}: its safetensors header cannot be read: {error!r}'
      ) from error
    for name, (entry, end) in sorted(found.items(), key=lambda item: item[1][1]):
      if end > size:
        raise CorruptCheckpoint(
          f'{self.path}: truncated: tensor {name} {entry} ends at byte {end}, the file '
          f'at {size}'
        )
      if entry.code in DTYPES and end - entry.offset != nbytes(entry.code, entry.shape):
        raise CorruptCheckpoint(
          f'{self.path}: tensor {name} {entry} has {end - entry.offset} bytes'
        )
    return {name: entry for name, (entry, _) in found.items()}


def nbytes(code: str, shape: Iterable[int]) -> int:
  """Bytes of a tensor of a known dtype."""
  return math.prod(shape) * DTYPES[code].itemsize


def code_of(dtype: Any) -> str:
  """The format's code of a numpy or jax dtype.

  Raises:
    ValueError: the format has it not, or this project has no use for it.
  """
  try:
    return _CODES[np.dtype(dtype)]
  except KeyError:
    raise ValueError(
      f'dtype {np.dtype(dtype)}: safetensors are written as one of {list(DTYPES)}'
    ) from None


def write(
  path: str | os.PathLike,
  tensors: Mapping[str, tuple[str, tuple[int, ...]]],
  pieces: Callable[[str], Iterable[np.ndarray]],
) -> None:
  """Writes a file and waits until it is on disk.

  Args:
    path: must not exist.
    tensors: dtype code and shape by name, in the order of writing.
    pieces: gives a tensor's rows, in order and in arrays of its dtype.
  """
  header: dict[str, Any] = {_METADATA: {'format': 'pt'}}  # transformers asks for it
  end = 0
  for name, (code, shape) in tensors.items():
    begin, end = end, end + nbytes(code, shape)
    header[name] = {'dtype': code, 'shape': shape, 'data_offsets': (begin, end)}
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % _LENGTH_BYTES)  # aligns the data
  with open(path, 'xb') as file:
    file.write(len(text).to_bytes(_LENGTH_BYTES, 'little') + text)
    for name, (code, shape) in tensors.items():
      before = file.tell()
      for piece in pieces(name):
        if piece.dtype != DTYPES[code]:
          raise TypeError(f'tensor {name}: a piece of {piece.dtype}, not {code}')
        file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
      if file.tell() - before != nbytes(code, shape):
        raise ValueError(f'tensor {name}: {file.tell() - before} bytes for {shape}')
    file.flush()
    os.fsync(file.fileno())


def _pread(fd: int, count: int, offset: int) -> bytes:
  """`count` bytes at `offset`; one call reads at most 2 GB."""
  out = bytearray()
  while len(out) < count:
    more = os.pread(fd, count - len(out), offset + len(out))
    if not more:
      break
    out += more
  return bytes(out)


def _entry(tensor: Mapping[str, Any], first: int) -> Entry:
  """An Entry of the header's description of a tensor; `first` byte of the data."""
  begin, _ = tensor['data_offsets']
  shape = tuple(int(size) for size in tensor['shape'])
  if begin < 0 or min(shape, default=0) < 0:
    raise ValueError(f'negative size in {tensor}')
  return Entry(str(tensor['dtype']), shape, first + int(begin))
