"""Grouped matmul on GPU: Pallas Triton kernels, one program per tile of one
group's rows.

The first tile of a group begins at its first row, so that no row is multiplied twice;
the last one is masked. There are at most T/tile + E + 1 tiles, listed in a table;
programs past the last return at once. Rows past the sum of the sizes are a group of
their own, which is set to 0 without being read. For the gradient of the matrices a
program takes a block of one matrix and loops over its group's rows.

Axes: T rows sorted by group, E groups, D in, F out.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from m2jax.kernels import block_sizes
from m2jax.kernels.grouped_matmul.gradients import differentiable
from m2jax.kernels.pallas import dot

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def _sizes(dtype):
  sizes = block_sizes.get('gpu', 'grouped_matmul')
  # Blocks were chosen for 16 bits.
  return sizes | dict(inner=sizes['inner'] * 2 // max(2, dtype.itemsize))


class _Tiles(NamedTuple):
  first: jax.Array  # [tiles] int32: first row; T for tiles past the last
  group: jax.Array  # [tiles] int32; E: rows past the sum of the sizes
  bounds: jax.Array  # [E + 2] int32: group g has rows bounds[g] … bounds[g + 1] - 1


def tiles(group_sizes, rows, tile) -> _Tiles:
  """Tiles of `tile` rows of one group each, including those of rows past the sum."""
  groups = len(group_sizes)
  ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
  bounds = jnp.concatenate(
    [jnp.zeros(1, jnp.int32), ends, jnp.full(1, rows, jnp.int32)]
  )
  number = -(-jnp.diff(bounds) // tile)
  at = jnp.cumsum(number, dtype=jnp.int32)
  step = jnp.arange(-(-rows // tile) + groups, dtype=jnp.int32)
  group = jnp.sum(at <= step[:, None], axis=1, dtype=jnp.int32)
  void = group > groups
  group = jnp.minimum(group, groups)
  first = bounds[group] + (step - (at - number)[group]) * tile
  return _Tiles(jnp.where(void, rows, first), group, bounds)


def _before(at, end):
  """[n] bool: which indices of the slice are below `end`."""
  return at.start + lax.iota(jnp.int32, at.size) < end


def _load(ref, at, end, lead=()):
  """The block of a matrix at a pair of slices; 0 beyond `end`, a pair of bounds."""
  live = _before(at[0], end[0])[:, None] & _before(at[1], end[1])[None]
  return plgpu.load(ref.at[*lead, *at], mask=live, other=0)


def _store(ref, at, end, x):
  live = _before(at[0], end[0])[:, None] & _before(at[1], end[1])[None]
  plgpu.store(ref.at[*at], x.astype(ref.dtype), mask=live)


def _per_row_kernel(sizes, transpose, *refs):
  """Grid: columns, tiles. lhs, rhs and out are whole arrays."""
  (first, group, bounds), (lhs, rhs, out) = _Tiles(*refs[:3]), refs[3:]
  columns, parts = sizes['columns'], pl.cdiv(lhs.shape[1], sizes['inner'])
  step, rows, inner = pl.program_id(1), lhs.shape[0], lhs.shape[1]
  begin, own = first[step], group[step]
  row_at, end = pl.ds(begin, sizes['rows']), bounds[own + 1]
  column_at = pl.ds(pl.program_id(0) * columns, columns)

  def add(p, acc):
    part_at = pl.ds(p * sizes['inner'], sizes['inner'])
    x = _load(lhs, (row_at, part_at), (end, inner))
    order = slice(None, None, -1 if transpose else 1)
    at, ends = (part_at, column_at)[order], (inner, out.shape[1])[order]
    return acc + dot(x, _load(rhs, at, ends, (own,)), 1, int(transpose))

  @pl.when(begin < rows)
  def _():
    acc = jnp.zeros((sizes['rows'], columns), jnp.float32)
    # int32 both: Triton gives a select of two Python numbers the type of the predicate
    count = jnp.where(own < rhs.shape[0], np.int32(parts), np.int32(0))
    acc = lax.fori_loop(0, count, add, acc)
    _store(out, (row_at, column_at), (end, out.shape[1]), acc)


def _per_group_kernel(sizes, bounds, lhs, d_out, d_rhs):
  """Grid: parts of F, parts of D, groups. d_rhs [D, F] of the group, the rest whole."""
  group, columns = pl.program_id(2), sizes['columns']
  d = pl.ds(pl.program_id(1) * columns, columns)
  f = pl.ds(pl.program_id(0) * columns, columns)
  begin, end = bounds[group], bounds[group + 1]

  def add(i, acc):
    at = pl.ds(begin + i * sizes['inner'], sizes['inner'])
    x = _load(lhs, (at, d), (end, lhs.shape[1]))
    return acc + dot(x, _load(d_out, (at, f), (end, d_out.shape[1])), 0, 0)

  parts = lax.div(end - begin + sizes['inner'] - 1, np.int32(sizes['inner']))
  acc = jnp.zeros((columns, columns), jnp.float32)
  _store(d_rhs, (d, f), d_rhs.shape, lax.fori_loop(0, parts, add, acc))


def _params(sizes):
  return plgpu.CompilerParams(num_warps=sizes['warps'], num_stages=sizes['stages'])


@functools.partial(jax.jit, static_argnames='transpose')
def _per_row(lhs, rhs, group_sizes, *, transpose):
  """Each row times its group's matrix, transposed or not."""
  outer = rhs.shape[1] if transpose else rhs.shape[2]
  sizes = _sizes(lhs.dtype)
  table = tiles(group_sizes, len(lhs), sizes['rows'])
  return pl.pallas_call(
    functools.partial(_per_row_kernel, sizes, transpose),
    grid=(pl.cdiv(outer, sizes['columns']), len(table.first)),
    out_shape=jax.ShapeDtypeStruct((len(lhs), outer), lhs.dtype),
    compiler_params=_params(sizes),
    name='grouped_matmul_d_lhs' if transpose else 'grouped_matmul_forward',
  )(*table, lhs, rhs)


@functools.partial(jax.jit, static_argnames='dtype')
def _per_group(lhs, d_out, group_sizes, *, dtype):
  """Σ over a group's rows of lhsᵀ d_out: [E, D, F]; 0 for an empty group."""
  sizes = _sizes(lhs.dtype)
  shape = lhs.shape[1], d_out.shape[1]
  bounds = tiles(group_sizes, len(lhs), sizes['rows']).bounds
  whole = [pl.BlockSpec(x.shape, lambda *_, n=x.ndim: (0,) * n) for x in (bounds, lhs)]
  return pl.pallas_call(
    functools.partial(_per_group_kernel, sizes),
    grid=(*(pl.cdiv(n, sizes['columns']) for n in shape[::-1]), len(group_sizes)),
    in_specs=[*whole, pl.BlockSpec(d_out.shape, lambda *_: (0, 0))],
    out_specs=pl.BlockSpec((None, *shape), lambda j, i, g: (g, 0, 0)),
    out_shape=jax.ShapeDtypeStruct((len(group_sizes), *shape), dtype),
    compiler_params=_params(sizes),
    name='grouped_matmul_d_rhs',
  )(bounds, lhs, d_out)


_matmul = differentiable(_per_row, _per_group)


def unsupported_reason(lhs, rhs) -> str | None:
  """Why the kernels do not support these tensors; None where they do."""
  if lhs.dtype != rhs.dtype or lhs.dtype not in _DTYPES:
    return f'{lhs.dtype}, {rhs.dtype}: must both be bf16, both fp16 or both fp32'
  return None


def matmul(lhs, rhs, group_sizes):
  """Same contract as `reference.matmul`.

  Raises:
    ValueError: `unsupported_reason`: tensors that are not both bfloat16, both float16
      or both float32.
  """
  if reason := unsupported_reason(lhs, rhs):
    raise ValueError(f'matmul on GPU: {reason}')
  if not len(lhs):
    return jnp.zeros((0, rhs.shape[2]), lhs.dtype)
  return _matmul(lhs, rhs, group_sizes.astype(jnp.int32))
