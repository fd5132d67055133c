"""The safetensors files of a checkpoint directory, as one table of tensors.

Either `model.safetensors`, or shards and `model.safetensors.index.json`, whose
`weight_map` maps a tensor to its file.
"""

from __future__ import annotations

import contextlib
import os
import re
import reprlib
from collections.abc import Sequence

import numpy as np

from m2jax.checkpoint import bounded
from m2jax.checkpoint import leaves as leaves_lib
from m2jax.checkpoint.errors import (
  CheckpointMismatch,
  CorruptCheckpoint,
  MissingCheckpoint,
)
from m2jax.checkpoint.huggingface import fp8, names, safetensors_io
from m2jax.checkpoint.huggingface.names import Tensor

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
_FILE_NAME = re.compile(r'\w[\w.-]*', re.ASCII)


class Shards:
  """Reads rows of any tensor of the directory."""

  def __init__(self, directory: str | os.PathLike, stack: contextlib.ExitStack):
    """Opens the files and reads their headers; the stack closes them.

    Raises:
      MissingCheckpoint: a file does not exist.
      CorruptCheckpoint: the index or a header cannot be read, or a file is truncated.
    """
    self._directory = os.fspath(directory)
    weight_map = self._weight_map()
    files = sorted(set(weight_map.values())) or [SINGLE]
    absent = [f for f in files if not os.path.isfile(os.path.join(directory, f))]
    if absent:
      which = f'files named in {INDEX} are' if weight_map else 'it is'
      raise MissingCheckpoint(
        f'checkpoint {directory}: {which} missing:\n{leaves_lib.listing(absent)}'
      )
    self._entries = {}
    for number, file in enumerate(files):
      reader = safetensors_io.Reader(os.path.join(directory, file))
      stack.callback(reader.close)
      for name, entry in reader.entries.items():
        if weight_map.get(name, file) == file:
          self._entries[name] = (number, reader, entry)

  def any_mtp(self) -> bool:
    """Whether there is any tensor of an MTP module."""
    return any(name.startswith(names.MTP_PREFIX) for name in self._entries)

  def position(self, name: str) -> tuple[int, int]:
    """Position of a tensor: number of its file, offset in bytes."""
    number, _, entry = self._entries[name]
    return number, entry.offset

  def row_bytes(self, name: str) -> int:
    """Bytes of a row of a tensor, as fp32 if it is FP8."""
    entry = self._entries[name][2]
    code = 'F32' if entry.code == fp8.CODE else entry.code
    return safetensors_io.nbytes(code, entry.shape[1:])

  def item_bytes(self, name: str) -> int:
    """Bytes of an element of a tensor."""
    return safetensors_io.DTYPES[self._entries[name][2].code].itemsize

  def is_fp8(self, name: str) -> bool:
    """Whether a tensor has block-FP8 values."""
    return self._entries[name][2].code == fp8.CODE

  def stored_rows(self, name: str, start: int, stop: int) -> np.ndarray:
    """Rows of a tensor as they are in the file."""
    return self._entries[name][1].rows(name, start, stop)

  def rows(self, name: str, start: int, stop: int, block) -> np.ndarray:
    """Rows of a tensor; FP8 is converted to fp32."""
    values = self.stored_rows(name, start, stop)
    if not self.is_fp8(name):
      return values
    scale_name = name + fp8.SCALE_SUFFIX
    _, reader, entry = self._entries[scale_name]
    scale = reader.rows(scale_name, 0, entry.shape[0])
    return fp8.dequantize(values, scale, block, start)

  def check(self, wanted: Sequence[Tensor], block: tuple[int, int]):
    """Raises CheckpointMismatch unless the files have exactly the wanted tensors."""
    lines, known = [], set()
    for tensor in wanted:
      known.add(tensor.name)
      entry = self._fits(tensor.name, tensor.shape, lines)
      if entry is not None and entry.code == fp8.CODE:
        scale = tensor.name + fp8.SCALE_SUFFIX
        known.add(scale)
        if len(tensor.shape) != 2:
          lines.append(f'{tensor.name}: FP8, but not a matrix')
        else:
          self._fits(scale, fp8.scale_shape(tensor.shape, block), lines)
    for name, (_, _, entry) in self._entries.items():
      if name not in known:
        lines.append(f'{name}: {entry} is not part of the model')
    if lines:
      raise CheckpointMismatch(
        f'checkpoint {self._directory}: the tensors do not match config.json:\n'
        f'{leaves_lib.listing(lines)}'
      )

  def _fits(self, name: str, shape: tuple[int, ...], lines: list[str]):
    """The tensor's entry; None, and a line in `lines`, if it is wrong."""
    _, reader, entry = self._entries.get(name, (None, None, None))
    want = f'[{",".join(map(str, shape))}]'
    if entry is None:
      lines.append(f'{name}: missing, should be {want}')
    elif entry.shape != shape:
      lines.append(f'{name}: {entry}, should be {want}, in {reader.path}')
    elif entry.code not in safetensors_io.DTYPES:
      lines.append(f'{name}: dtype {entry.code} is not supported, in {reader.path}')
    else:
      return entry
    return None

  def _weight_map(self) -> dict[str, str]:
    path = os.path.join(self._directory, INDEX)
    if not os.path.exists(path):
      return {}
    weight_map = bounded.read_object(path).get('weight_map')
    if not isinstance(weight_map, dict):
      raise CorruptCheckpoint(f'{path}: not an index: it has no object weight_map')
    for file in weight_map.values():
      if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
        shown = reprlib.repr(file)
        raise CorruptCheckpoint(f'{path}: weight_map has {shown}: not a file name')
    return weight_map
