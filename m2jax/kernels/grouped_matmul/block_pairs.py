"""Block pairs of the TPU kernels: which tiles of rows are multiplied by which matrices.

A block pair is a tile of rows and a group; a group's block is its matrix.

Axes: T rows sorted by group, E groups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.kernels import pallas


class BlockPairs(NamedTuple):
  tile: jax.Array  # [pairs] int32, sorted
  group: jax.Array  # [pairs] int32, sorted
  bounds: jax.Array  # [E + 1] int32: group g has rows bounds[g] … bounds[g + 1] - 1
  parts: jax.Array  # [2] or [3] int32: bounds of the parts of one or two cores

  @property
  def steps(self) -> jax.Array:
    """Pairs of the longest part."""
    return jnp.max(jnp.diff(self.parts))


def block_pairs(group_sizes, rows, tile, by_group, split=False) -> BlockPairs:
  """The pairs in order; table entries past the last part are unspecified.

  Every tile and group that share a row are a pair. A kernel writes a result at the last
  pair of each tile, or of each group (`by_group`), so that each has at least one pair,
  if necessary one without a common row. With `split`, and two tiles or groups, there
  are two parts of nearly equal length, each of whole tiles, or groups (`by_group`).
  """
  groups, tiles = len(group_sizes), -(-rows // tile)
  ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
  starts = ends - group_sizes
  first, last = starts // tile, (ends - 1) // tile
  empty = group_sizes == 0
  number = jnp.where(empty, int(by_group), last - first + 1)
  first = jnp.minimum(first, tiles - 1)
  ids = jnp.arange(groups, dtype=jnp.int32)
  if not by_group:  # tiles without a row come last, with the last non-empty group
    live = -(-ends[-1:] // tile)
    first = jnp.concatenate([first, live])
    number = jnp.concatenate([number, tiles - live])
    ids = jnp.append(ids, jnp.max(jnp.where(empty, 0, ids)))
  at = jnp.cumsum(number, dtype=jnp.int32)
  step = jnp.arange(tiles + groups, dtype=jnp.int32)
  entry = jnp.sum(at <= step[:, None], axis=1, dtype=jnp.int32)
  entry = jnp.minimum(entry, len(ids) - 1)
  tile_of = first[entry] + step - (at - number)[entry]
  bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
  tile_of, group = jnp.clip(tile_of, 0, tiles - 1), ids[entry]
  if split and (groups if by_group else tiles) > 1:
    parts = pallas.halves(group if by_group else tile_of, at[-1])
  else:
    parts = jnp.concatenate([jnp.zeros(1, jnp.int32), at[-1:]])
  return BlockPairs(tile_of, group, bounds, parts)
