"""Grouped matmul in XLA whose cost does not grow with the number of experts.

Rows are divided into at most T/b + E tiles of one group each, of which a group's last
may be partial, and one loop runs a dense matmul per tile. `lax.ragged_dot` on a CPU
multiplies every row by every group's matrix instead. M2's experts on a CPU do not call
this: `moe.tiled` runs their three matmuls in one loop.

Axes: T rows sorted by group, E groups, D in, F out; tiles of b rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_TILE_ROWS = 128


def _tiles(group_sizes, num_rows):
  """First row, group and end row of each tile; unused tiles have no rows."""
  groups = len(group_sizes)
  b = min(_TILE_ROWS, max(8, num_rows // groups))
  ends = jnp.cumsum(group_sizes)
  starts = ends - group_sizes
  counts = -(-group_sizes // b)
  tile_ends = jnp.cumsum(counts)
  tile = jnp.arange(num_rows // b + groups)
  group = jnp.minimum(jnp.sum(tile[:, None] >= tile_ends[None], axis=1), groups - 1)
  first = starts[group] + (tile - (tile_ends - counts)[group]) * b
  end = jnp.where(tile < tile_ends[-1], ends[group], 0)
  return b, tile_ends[-1], first, group, end


def _rows(x, first, end, b):
  """Rows first … first+b-1 of x (padded by b rows), zero at `end` and beyond."""
  live = (first + jnp.arange(b) < end)[:, None]
  return jnp.where(live, jax.lax.dynamic_slice_in_dim(x, first, b), 0), live


def _pad(x, b):
  return jnp.pad(x, ((0, b), (0, 0)))


def _per_row(lhs, rhs, group_sizes, spec):
  """Each row times its group's matrix: `spec` is 'td,df->tf' or 'td,fd->tf'."""
  num_rows = lhs.shape[0]
  b, num_tiles, first, group, end = _tiles(group_sizes, num_rows)
  lhs = _pad(lhs, b)
  width = rhs.shape[2] if spec == 'td,df->tf' else rhs.shape[1]
  dtype = jnp.promote_types(lhs.dtype, jnp.float32)

  def tile(i, out):
    x, live = _rows(lhs, first[i], end[i], b)
    y = jnp.einsum(spec, x, rhs[group[i]], preferred_element_type=dtype)
    # after a partial tile the next one begins within these b rows, and overwrites them
    y = jnp.where(live, y.astype(out.dtype), 0)
    return jax.lax.dynamic_update_slice_in_dim(out, y, first[i], 0)

  out = jnp.zeros((num_rows + b, width), lhs.dtype)
  return jax.lax.fori_loop(0, num_tiles, tile, out)[:num_rows]


def _per_group(lhs, d_out, group_sizes, like):
  """Σ over a group's rows of lhsᵀ d_out: [E, D, F]; 0 for an empty group."""
  b, num_tiles, first, group, end = _tiles(group_sizes, lhs.shape[0])
  lhs, d_out = _pad(lhs, b), _pad(d_out, b)
  dtype = jnp.promote_types(lhs.dtype, jnp.float32)

  def tile(i, acc):
    x, _ = _rows(lhs, first[i], end[i], b)
    y, _ = _rows(d_out, first[i], end[i], b)
    update = jnp.einsum('td,tf->df', x, y, preferred_element_type=dtype)
    return acc.at[group[i]].add(update)

  zeros = jnp.zeros(like.shape, dtype)
  return jax.lax.fori_loop(0, num_tiles, tile, zeros).astype(like.dtype)


@jax.custom_vjp
def matmul(lhs, rhs, group_sizes):
  """Same contract as `reference.matmul`."""
  return _per_row(lhs, rhs, group_sizes, 'td,df->tf')


def _fwd(lhs, rhs, group_sizes):
  return matmul(lhs, rhs, group_sizes), (lhs, rhs, group_sizes)


def _bwd(residuals, d_out):
  lhs, rhs, group_sizes = residuals
  d_lhs = _per_row(d_out, rhs, group_sizes, 'td,fd->tf')
  return d_lhs, _per_group(lhs, d_out, group_sizes, rhs), None


matmul.defvjp(_fwd, _bwd)
