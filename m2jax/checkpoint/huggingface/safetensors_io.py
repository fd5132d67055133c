"""Reads and writes safetensors files a few rows at a time.

The format (github.com/huggingface/safetensors): the header's length as 8 little-endian
bytes; the header, JSON of {name: {dtype, shape, data_offsets [begin, end)}}; the data.

The safetensors library (0.8) writes a file from tensors that are all in memory, which a
checkpoint larger than the host's memory rules out. Its `safe_open(…).get_slice` reads
rows, but

- its numpy framework does not read F8_E4M3;
- it maps the file into memory: a file truncated while it is read ends the process with
  SIGBUS, and all pages that were read count as the process's memory;
- its errors name neither the file nor the tensor that is truncated;
- it accepts duplicate names and names that cannot be printed, and waits for a pipe.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from m2jax.checkpoint import bounded
from m2jax.checkpoint.errors import CorruptCheckpoint
from m2jax.text import strict_json

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
_MAX_AXES = 8
_WORD = re.compile('[!-~]{1,1024}')  # printed in errors


class Entry(NamedTuple):
  """One tensor of a file: dtype code of the format, shape, offset in bytes."""

  code: str
  shape: tuple[int, ...]
  offset: int

  def __str__(self):
    return f'{self.code}[{",".join(map(str, self.shape))}]'


class Reader:
  """One file, read with `pread`: no memory map, no cache.

  Attributes:
    path: the file's path.
    entries: its tensors by name.
  """

  def __init__(self, path: str | os.PathLike):
    """Reads the header.

    Raises:
      FileNotFoundError: no such file.
      CorruptCheckpoint: there is no header, or a tensor is truncated; names the first.
    """
    self.path = os.fspath(path)
    self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
      self.entries = self._read_header(os.fstat(self._fd).st_size)
    except BaseException:
      self.close()
      raise

  def close(self):
    os.close(self._fd)

  def rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Rows [start, stop) of a tensor (elements if it is 1-D), as a new array.

    Raises:
      CorruptCheckpoint: the file ends before these rows.
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
        f'{self.path}: {size} bytes are too few for a safetensors header'
        + (f' of {length} bytes' if size >= _LENGTH_BYTES else '')
      )
    if length > bounded.MAX_BYTES:
      raise CorruptCheckpoint(
        f'{self.path}: a safetensors header of {length} bytes; at most '
        f'{bounded.MAX_BYTES} are read'
      )
    try:
      header = strict_json.loads(os.pread(self._fd, length, _LENGTH_BYTES))
      found = {
        name: _entry(name, tensor, first)
        for name, tensor in header.items()
        if name != _METADATA
      }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
      why = error if isinstance(error, ValueError) else repr(error)
      raise CorruptCheckpoint(
        f'{self.path}: cannot read the safetensors header: {why}'
      ) from error
    before = first
    order = lambda item: (item[1][0].offset, item[1][1])
    for name, (entry, end) in sorted(found.items(), key=order):
      if end > size:
        raise CorruptCheckpoint(
          f'{self.path}: truncated: tensor {name} {entry} ends at byte {end}, the file '
          f'at {size}'
        )
      if entry.code in DTYPES and end - entry.offset != nbytes(entry.code, entry.shape):
        raise CorruptCheckpoint(
          f'{self.path}: tensor {name} {entry} has {end - entry.offset} bytes'
        )
      if entry.offset < before:
        raise CorruptCheckpoint(f'{self.path}: tensor {name} overlaps another')
      before = end
    return {name: entry for name, (entry, _) in found.items()}


def nbytes(code: str, shape: Iterable[int]) -> int:
  """Bytes of a tensor of a known dtype."""
  return math.prod(shape) * DTYPES[code].itemsize


def code_of(dtype: Any) -> str:
  """The format's code of a numpy or jax dtype.

  Raises:
    ValueError: the format or this module does not support it.
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
    pieces: tensor name → its rows, in order, as arrays of its dtype.
  """
  header: dict[str, Any] = {_METADATA: {'format': 'pt'}}  # transformers requires it
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
          raise TypeError(f'tensor {name}: a piece has dtype {piece.dtype}, not {code}')
        file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
      if file.tell() - before != nbytes(code, shape):
        raise ValueError(f'tensor {name}: got {file.tell() - before} bytes for {shape}')
    file.flush()
    os.fsync(file.fileno())


def _entry(name: str, tensor: Mapping[str, Any], first: int) -> tuple[Entry, int]:
  """An Entry from a tensor's description in the header, and where its data end.

  Args:
    name: the tensor's name.
    tensor: its description.
    first: offset of the data.
  """
  (begin, end), shape, code = (tensor[k] for k in ('data_offsets', 'shape', 'dtype'))
  whole = all(type(n) is int and n >= 0 for n in (begin, end, *shape))
  if not whole or begin > end or len(shape) > _MAX_AXES:
    raise ValueError(f'sizes of tensor {name[:99]!a}: {reprlib.repr(tensor)}')
  if not _WORD.fullmatch(name) or not _WORD.fullmatch(code):
    raise ValueError(f'tensor {name[:99]!a} of dtype {code[:99]!a}: no names')
  return Entry(code, tuple(shape), first + begin), first + end
