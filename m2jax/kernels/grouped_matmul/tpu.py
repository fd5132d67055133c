"""Grouped matmul on TPU: Pallas Mosaic kernels over pairs of a row tile and a group.

Rows are cut into tiles. A block pair is a tile and a group that has rows in it; there
are at most T/tile + E pairs, listed in a table in scalar memory, and the grid is as
long as the list. The pairs of a tile are consecutive and add their rows to one
accumulator; so are the pairs of a group, whose sum is the gradient of its matrix, and
the matrix block stays in VMEM from one pair to the next. A tile is multiplied in chunks
of rows; chunks without a row of the group are skipped. Rows of other groups, and rows
past the sum of the sizes, are masked in every product, so that their values do not
matter. Two cores of a chip share the blocks of columns; where their number is odd, as
with few columns on each of several tensor-parallel devices, each core has half of the
list.

Axes: T rows sorted by group, E groups, D in, F out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m2jax.kernels import block_sizes, pallas
from m2jax.kernels.grouped_matmul.block_pairs import BlockPairs, block_pairs
from m2jax.kernels.grouped_matmul.gradients import differentiable

_LANES = 128
_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_PAIRS = 128 * 1024  # two tables of 512 KiB of scalar memory


def _sizes(dtype) -> dict[str, int]:
  """Block sizes; fp32 takes twice the bytes, and more where a product splits it."""
  sizes = block_sizes.get('tpu', 'grouped_matmul')
  halved = ('rows', 'inner', 'd_rhs_columns') if dtype == jnp.float32 else ()
  return {name: n // 2 if name in halved else n for name, n in sizes.items()}


def _each_chunk(table: BlockPairs, entry, tile, chunk, body):
  """`body(rows of the tile, mask [chunk, 1])` for chunks with a row of this pair."""
  group = table.group[entry.at]
  begin, end = table.bounds[group], table.bounds[group + 1]
  for at in range(0, tile, chunk):
    size = min(chunk, tile - at)
    row = table.tile[entry.at] * tile + at

    @pl.when(entry.live & (begin < row + size) & (row < end))
    def _(at=at, size=size, row=row):
      ids = row + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
      body(pl.ds(at, size), (begin <= ids) & (ids < end))


def _per_row_kernel(tile, chunk, axis, *refs):
  """Grid: columns x parts of the table, block pairs, parts of the contracted side."""
  table, (lhs, rhs, out, acc) = BlockPairs(*refs[:4]), refs[4:]
  entry = pallas.entry(table.parts, pl.program_id(0), pl.program_id(1))
  part = pl.program_id(2)
  first, last = pallas.edges(table.tile, entry)

  @pl.when(first & (part == 0))
  def _():
    acc[...] = jnp.zeros_like(acc)

  def add(rows, mask):
    acc[rows] += jnp.where(mask, pallas.dot(lhs[rows], rhs[...], 1, axis), 0)

  _each_chunk(table, entry, tile, chunk, add)

  @pl.when(last & (part == pl.num_programs(2) - 1))
  def _():
    out[...] = acc[...].astype(out.dtype)


def _per_group_kernel(tile, chunk, *refs):
  """Grid: parts of D x parts of F x parts of the table, block pairs."""
  table, (lhs, d_out, d_rhs, acc) = BlockPairs(*refs[:4]), refs[4:]
  entry = pallas.entry(table.parts, pl.program_id(0), pl.program_id(1))
  first, last = pallas.edges(table.group, entry)

  @pl.when(first)
  def _():
    acc[...] = jnp.zeros_like(acc)

  def add(rows, mask):
    x, y = (jnp.where(mask, r[rows], 0).astype(r.dtype) for r in (lhs, d_out))
    acc[...] += pallas.dot(x, y, 0, 0)

  _each_chunk(table, entry, tile, chunk, add)

  @pl.when(last)
  def _():
    d_rhs[...] = acc[...].astype(d_rhs.dtype)


def _part(size, most):
  """Columns of a block, at most `most`.

  The whole side if it fits; else a divisor of `size` with an even quotient, for two
  cores, or any divisor; else `most`, and the last block is partial.
  """
  if size <= most:
    return size
  parts = range(most, 0, -_LANES)
  even = (n for n in parts if size % (2 * n) == 0)
  return next(even, next((n for n in parts if size % n == 0), most))


def _row_tile(rows, most):
  return rows if rows < _LANES else min(most, rows // _LANES * _LANES)


def _call(
  kernel: Callable,
  name: str,
  grid: tuple[int | jax.Array, ...],
  table: BlockPairs,
  inputs: list[pallas.Blocked],
  out: pallas.Blocked,
  flops: int,
):
  """Runs a kernel with an fp32 accumulator of the shape of an output block.

  A chip of two cores divides the first axis of the grid between them.
  """
  arrays = [x.array for x in inputs]
  size = sum(x.size * x.dtype.itemsize for x in (*arrays, out.array))
  block = [n for n in out.spec.block_shape if n is not None]
  return pl.pallas_call(
    kernel,
    out_shape=out.array,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(table),
      grid=grid,
      in_specs=[x.spec for x in inputs],
      out_specs=out.spec,
      scratch_shapes=[pltpu.VMEM(block, jnp.float32)],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', *['arbitrary'] * (len(grid) - 1)),
      vmem_limit_bytes=_sizes(out.array.dtype)['vmem_bytes'],
    ),
    cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=size),
    name=f'grouped_matmul_{name}',
  )(*table, *arrays)


@functools.partial(jax.jit, static_argnames='transpose')
def _per_row(lhs, rhs, group_sizes, *, transpose):
  """Each row times its group's matrix, transposed or not."""
  inner, outer = rhs.shape[1:][::-1] if transpose else rhs.shape[1:]
  sizes = _sizes(lhs.dtype)
  tile = _row_tile(len(lhs), sizes['rows'])
  columns, part = _part(outer, sizes['columns']), _part(inner, sizes['inner'])
  blocks, inner_parts = pl.cdiv(outer, columns), inner // part
  table = block_pairs(
    group_sizes, len(lhs), tile, by_group=False, split=blocks % 2 == 1
  )

  def at(index):
    """`index`: (block of columns, tile, group, part, table) → a block's index."""

    def of_step(lead, step, p, *refs):
      table = BlockPairs(*refs)
      e = pallas.entry(table.parts, lead, step)
      p = jnp.where(e.live, p, inner_parts - 1)  # nothing is copied past a part
      c = pallas.block_of(table.parts, lead)
      return index(c, table.tile[e.at], table.group[e.at], p, table)

    return of_step

  def lhs_at(c, tile_id, group, p, table):
    live = jnp.maximum(table.bounds[len(rhs)] - 1, 0)  # no row past the last is read
    return jnp.minimum(tile_id, lax.div(live, jnp.int32(tile))), p

  def rhs_at(c, tile_id, group, p, table):
    return (group, c, p) if transpose else (group, p, c)

  rhs_block = (None, columns, part) if transpose else (None, part, columns)
  return _call(
    functools.partial(_per_row_kernel, tile, sizes['chunk'], 1 if transpose else 0),
    'd_lhs' if transpose else 'forward',
    (blocks * (len(table.parts) - 1), table.steps, inner_parts),
    table,
    [
      pallas.Blocked(lhs, pl.BlockSpec((tile, part), at(lhs_at))),
      pallas.Blocked(rhs, pl.BlockSpec(rhs_block, at(rhs_at))),
    ],
    pallas.Blocked(
      jax.ShapeDtypeStruct((len(lhs), outer), lhs.dtype),
      pl.BlockSpec((tile, columns), at(lambda c, tile_id, *_: (tile_id, c))),
    ),
    2 * lhs.size * outer,
  )


@functools.partial(jax.jit, static_argnames='dtype')
def _per_group(lhs, d_out, group_sizes, *, dtype):
  """Σ over a group's rows of lhsᵀ d_out: [E, D, F]; 0 for an empty group."""
  sizes = _sizes(lhs.dtype)
  tile = _row_tile(len(lhs), sizes['rows'])
  shape = lhs.shape[1], d_out.shape[1]
  d, f = (_part(n, sizes['d_rhs_columns']) for n in shape)
  across = pl.cdiv(shape[1], f)
  blocks = pl.cdiv(shape[0], d) * across
  table = block_pairs(group_sizes, len(lhs), tile, True, split=blocks % 2 == 1)

  def at(index):
    """`index`: (tile, group, block of D, block of F) → a block's index."""

    def of_step(lead, step, *refs):
      table = BlockPairs(*refs)
      e = pallas.entry(table.parts, lead, step).at
      block = pallas.block_of(table.parts, lead)
      i, j = lax.div(block, jnp.int32(across)), lax.rem(block, jnp.int32(across))
      return index(table.tile[e], table.group[e], i, j)

    return of_step

  return _call(
    functools.partial(_per_group_kernel, tile, sizes['chunk']),
    'd_rhs',
    (blocks * (len(table.parts) - 1), table.steps),
    table,
    [
      pallas.Blocked(
        lhs, pl.BlockSpec((tile, d), at(lambda tile_id, group, i, j: (tile_id, i)))
      ),
      pallas.Blocked(
        d_out, pl.BlockSpec((tile, f), at(lambda tile_id, group, i, j: (tile_id, j)))
      ),
    ],
    pallas.Blocked(
      jax.ShapeDtypeStruct((len(group_sizes), *shape), dtype),
      pl.BlockSpec((None, d, f), at(lambda tile_id, group, i, j: (group, i, j))),
    ),
    2 * lhs.size * shape[1],
  )


_matmul = differentiable(_per_row, _per_group)


def unsupported_reason(lhs, rhs) -> str | None:
  """Why the kernels do not support these tensors; None where they do."""
  if lhs.dtype != rhs.dtype or lhs.dtype not in _DTYPES:
    return f'{lhs.dtype}, {rhs.dtype}: must both be bfloat16 or both float32'
  sizes = _sizes(lhs.dtype)
  for n in rhs.shape[1:]:
    if n % _part(n, sizes['inner']):
      return f'{n} columns: above {sizes["inner"]} they must be a multiple of {_LANES}'
  if len(lhs) // sizes['rows'] + len(rhs) >= _MOST_PAIRS:
    return (
      f'{len(lhs)} rows, {len(rhs)} groups: more block pairs than fit scalar memory'
    )
  return None


def matmul(lhs, rhs, group_sizes):
  """Same contract as `reference.matmul`.

  Raises:
    ValueError: `unsupported_reason`: tensors that are not both bfloat16 or both
      float32, a side of the matrices that no block divides, or too many block pairs.
  """
  if reason := unsupported_reason(lhs, rhs):
    raise ValueError(f'matmul on TPU: {reason}')
  if not len(lhs):  # a grid must have a step
    return jnp.zeros((0, rhs.shape[2]), lhs.dtype)
  return _matmul(lhs, rhs, group_sizes.astype(jnp.int32))
