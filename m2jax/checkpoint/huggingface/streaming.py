"""Pieces of host memory ↔ large arrays on devices, a piece at a time.

An array is filled on its devices: each device's part is allocated once, and a
computation that donates the part writes each piece into it. So neither the host nor a
device stores any part twice, even if they share memory.

A file stores a matrix row after row, and a process reads whole rows. Where a mesh of
several processes splits the columns, each layer is therefore filled as if it split the
rows, so that each process reads its share, and is then resharded.

Axes: pieces are [rows, columns] or [rows] of one matrix or vector of a stacked array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PIECE_BYTES = 2**25


def row_ranges(start: int, stop: int, row_bytes: int) -> Iterator[tuple[int, int]]:
  """Splits [start, stop) into ranges of at most PIECE_BYTES, or of one row."""
  step = max(1, PIECE_BYTES // max(row_bytes, 1))
  for first in range(start, stop, step):
    yield first, min(first + step, stop)


def _names(spec: jax.sharding.PartitionSpec, axis: int) -> tuple[str, ...]:
  """The mesh axes that split an axis, outermost first."""
  names = spec[axis] if axis < len(spec) else None
  return (names,) if isinstance(names, str) else tuple(names or ())


class _Part(NamedTuple):
  """The part of one device: [start, stop) of each axis of the whole array."""

  device: jax.Device
  bounds: tuple[tuple[int, int], ...]


class Filler:
  """An array being filled on this process's devices."""

  def __init__(
    self, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding
  ):
    """Allocates zeros of `dtype` on each device that has a part of the array."""
    self._shape, self._sharding = shape, sharding
    indices = sharding.addressable_devices_indices_map(shape)
    self._buffers = {}
    for device, index in indices.items():
      bounds = tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
      sizes = [stop - start for start, stop in bounds]
      self._buffers[_Part(device, bounds)] = jnp.zeros(sizes, dtype, device=device)

  def wanted(
    self, index: tuple[int, ...], transposed: bool
  ) -> dict[tuple[int, int], list[_Part]]:
    """Row ranges of the matrix at `index` that this process needs, and for which parts.

    Rows and columns are those of the file; if `transposed`, the array's are swapped.
    """
    found: dict[tuple[int, int], list[_Part]] = {}
    for part in self._buffers:
      lead, matrix = part.bounds[: len(index)], part.bounds[len(index) :]
      if all(a <= i < b for i, (a, b) in zip(index, lead, strict=True)):
        found.setdefault(matrix[-1 if transposed else 0], []).append(part)
    return found

  def put(
    self,
    piece: np.ndarray,
    index: tuple[int, ...],
    first_row: int,
    transposed: bool,
    parts: list[_Part],
  ):
    """Writes full rows from `first_row` of the matrix at `index` into `parts`."""
    for part in parts:
      bounds = part.bounds[len(index) :]
      bounds = bounds[::-1] if transposed else bounds
      start = [first_row - bounds[0][0]]
      mine = piece
      if piece.ndim == 2:
        mine = piece[:, slice(*bounds[1])]
        start.append(0)
      start = start[::-1] if transposed else start
      lead = [i - a for i, (a, _) in zip(index, part.bounds, strict=False)]
      mine = jax.device_put(mine, part.device)
      at = np.array([*lead, *start], np.int32)
      self._buffers[part] = _write(self._buffers[part], mine, at, transposed)
    # Otherwise pieces would queue up in the host's memory.
    jax.block_until_ready([self._buffers[part] for part in parts])

  def flush(self, index: tuple[int, ...]):
    """All pieces of the layer index[0] are put; of the array if it has no layers."""

  def array(self) -> jax.Array:
    """The filled array; the filler is empty afterwards."""
    buffers, self._buffers = list(self._buffers.values()), {}
    return jax.make_array_from_single_device_arrays(
      self._shape, self._sharding, buffers
    )


class RowFiller:
  """A Filler of an array whose columns are split: a layer's rows are filled, then sent.

  All processes must flush the same layers in the same order.
  """

  def __init__(
    self,
    shape: tuple[int, ...],
    dtype: Any,
    target: jax.sharding.NamedSharding,
    moved: tuple[str, ...],
    lead: int,
    transposed: bool,
  ):
    """Allocates zeros.

    Args:
      target: the array's sharding.
      moved: the innermost mesh axes of the file's columns; they split its rows while
        they are filled.
      lead: number of the axes before the matrix; the first of them, if any, is that of
        layers, which is not split.
      transposed: whether the array has the transpose of the file's matrices.
    """
    self._dtype, self._layers = dtype, min(lead, 1)
    self._shape = shape[self._layers :]
    row, column = (-1, -2) if transposed else (-2, -1)
    row, column = len(self._shape) + row, len(self._shape) + column
    axes = [_names(target.spec, axis) for axis in range(self._layers, len(shape))]
    axes[row], axes[column] = axes[row] + moved, axes[column][: -len(moved)]
    spec = jax.sharding.PartitionSpec(*(names or None for names in axes))
    self._by_rows = jax.sharding.NamedSharding(target.mesh, spec)
    self._filler: Filler | None = None

    def send(array, layer, at):
      sent = jax.lax.all_to_all(layer, moved, column, row, tiled=True)
      if not self._layers:
        return sent
      return jax.lax.dynamic_update_index_in_dim(array, sent, at, 0)

    whole = jax.sharding.PartitionSpec()
    send = jax.shard_map(
      send,
      mesh=target.mesh,
      in_specs=(target.spec, spec, whole),
      out_specs=target.spec,
      check_vma=False,
    )
    self._send = jax.jit(send, donate_argnums=0, out_shardings=target)
    zeros = functools.partial(jnp.zeros, shape, dtype)
    self._array = jax.jit(zeros, out_shardings=target)()

  def wanted(self, index, transposed):
    """As `Filler.wanted`."""
    if self._filler is None:
      self._filler = Filler(self._shape, self._dtype, self._by_rows)
    return self._filler.wanted(index[self._layers :], transposed)

  def put(self, piece, index, first_row, transposed, parts):
    """As `Filler.put`."""
    index = index[self._layers :]
    self._filler.put(piece, index, first_row, transposed, parts)

  def flush(self, index):
    """As `Filler.flush`; collective over processes."""
    layer, self._filler = self._filler.array(), None
    self._array = self._send(self._array, layer, np.int32(index[0] if index else 0))
    # Otherwise the next layer is filled while this one still exists twice.
    jax.block_until_ready(self._array)

  def array(self) -> jax.Array:
    """As `Filler.array`."""
    array, self._array = self._array, None
    return array


def filler(
  shape: tuple[int, ...],
  dtype: Any,
  sharding: jax.sharding.Sharding,
  lead: int,
  transposed: bool,
) -> Filler | RowFiller:
  """The filler with which each process reads the fewest rows.

  Args:
    lead: number of the array's axes before its matrices, or vectors.
    transposed: whether it has the transpose of the file's matrices.
  """
  processes = {device.process_index for device in sharding.device_set}
  if len(processes) > 1 and len(shape) - lead == 2:
    row, column = (lead + 1, lead) if transposed else (lead, lead + 1)
    moved, held = _names(sharding.spec, column), _names(sharding.spec, row)
    parts = lambda names: math.prod(sharding.mesh.shape[name] for name in names)
    while shape[row] % parts(held + moved):
      moved = moved[1:]
    if parts(moved) > 1:
      return RowFiller(shape, dtype, sharding, moved, lead, transposed)
  return Filler(shape, dtype, sharding)


@functools.partial(jax.jit, static_argnames='transposed', donate_argnums=0)
def _write(buffer, piece, start, transposed: bool):
  piece = (piece.T if transposed else piece).astype(buffer.dtype)
  piece = piece.reshape((1,) * (buffer.ndim - piece.ndim) + piece.shape)
  starts = [start[axis] for axis in range(buffer.ndim)]
  return jax.lax.dynamic_update_slice(buffer, piece, starts)


def rows(
  array: jax.Array | np.ndarray,
  index: tuple[int, ...],
  start: int,
  stop: int,
  *,
  transposed: bool,
  dtype: Any,
) -> np.ndarray:
  """Rows [start, stop) of the matrix (its transpose) at `index`, on the host.

  If the array spans processes, all of them must call this, and all get the rows.
  """
  if isinstance(array, np.ndarray):
    matrix = array[index].T if transposed else array[index]
    return np.ascontiguousarray(matrix[start:stop].astype(dtype))
  read = _read(array.sharding, stop - start, len(index), transposed, np.dtype(dtype))
  out = read(array, np.array([*index, start], np.int32))
  return np.asarray(out.addressable_data(0))


@functools.lru_cache
def _read(sharding, count: int, lead: int, transposed: bool, dtype: np.dtype):
  """Compiled `rows`: (array, [*index, start]) → the rows on every device.

  Each device slices its part of them, and the parts are summed. Slicing the whole array
  would not work: for a dynamic index the compiler gathers a sharded array on every
  device before slicing.
  """
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return jax.jit(functools.partial(_cut, _ALONE, count, lead, transposed, dtype))
  spec, mesh = sharding.spec, sharding.mesh
  axes = [_names(spec, i) for i in range(_MAX_AXES)]
  cut = functools.partial(_cut, _Split(mesh, axes), count, lead, transposed, dtype)
  whole = jax.sharding.PartitionSpec()
  return jax.jit(
    jax.shard_map(
      cut, mesh=mesh, in_specs=(spec, whole), out_specs=whole, check_vma=False
    )
  )


class _Split(NamedTuple):
  """The sharding of an array: the mesh axes over which each of its axes is split."""

  mesh: jax.sharding.Mesh | None
  axes: list[tuple[str, ...]]

  def first(self, axis: int, size: int):
    """Start of this device's `size` elements on an axis of the whole array."""
    return jax.lax.axis_index(self.axes[axis]) * size if self.axes[axis] else 0

  def parts(self, axis: int) -> int:
    """Number of parts of an axis."""
    return math.prod(self.mesh.shape[name] for name in self.axes[axis])


_MAX_AXES = 8
_ALONE = _Split(None, [()] * _MAX_AXES)


def _cut(split: _Split, count, lead, transposed, dtype, shard, at):
  """`count` rows from at[-1] of the matrix at index at[:-1] of the sharded array."""
  here = True
  for axis in range(lead):
    size = shard.shape[0]
    i = at[axis] - split.first(axis, size)
    here &= (i >= 0) & (i < size)
    i = jnp.clip(i, 0, size - 1)
    shard = jax.lax.dynamic_index_in_dim(shard, i, keepdims=False)
  row = shard.ndim - 1 if transposed else 0
  for axis in range(shard.ndim):
    if axis == row:
      shard = _range(split, lead, axis, shard, at[-1], count)
    elif split.axes[lead + axis]:
      whole = shard.shape[axis] * split.parts(lead + axis)
      shard = _range(split, lead, axis, shard, 0, whole)
  out = (shard.T if transposed else shard).astype(dtype)
  if split.mesh is None:
    return out
  used = {name for axes in split.axes for name in axes}
  for name in split.mesh.axis_names:
    if name not in used:  # replicas: only the first one contributes
      here &= jax.lax.axis_index(name) == 0
  # Sum the bits: adding zeros preserves all of them, including the sign of -0.0.
  bits = jax.lax.bitcast_convert_type(out, f'uint{8 * dtype.itemsize}')
  bits = jax.lax.psum(jnp.where(here, bits, 0), split.mesh.axis_names)
  return jax.lax.bitcast_convert_type(bits, dtype)


def _range(split: _Split, lead: int, axis: int, shard, begin, count: int):
  """[begin, begin + count) of an axis of the whole; zeros for other devices' parts."""
  size = shard.shape[axis]
  most = min(size, count)
  first = split.first(lead + axis, size)
  local = jnp.clip(begin - first, 0, size - most)
  part = jax.lax.dynamic_slice_in_dim(shard, local, most, axis)
  if not split.axes[lead + axis]:
    return part
  # Its position is first + local − begin, which may be out of range on either side.
  at = jnp.clip(first + local - begin + most, 0, count + most)
  shape = [*part.shape]
  shape[axis] = count + 2 * most
  zeros = jnp.zeros(shape, part.dtype)
  padded = jax.lax.dynamic_update_slice_in_dim(zeros, part, at, axis)
  return jax.lax.slice_in_dim(padded, most, most + count, axis=axis)
