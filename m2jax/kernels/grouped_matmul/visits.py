"""Which tiles of rows meet which groups: the order of work of the TPU kernels.

Axes: T rows sorted by group, E groups.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
  tile: jax.Array  # [visits] int32, sorted
  group: jax.Array  # [visits] int32, sorted
  bounds: jax.Array  # [E + 1] int32: group g has rows bounds[g] … bounds[g + 1] - 1


def visits(group_sizes, rows, tile, by_group) -> tuple[Visits, jax.Array]:
  """The visits, in order, and how many there are; the rest of the table is void.

  Results are written at the last visit of a tile, or of a group, so each has at least
  one, if need be without a row of that group in that tile.
  """
  groups, tiles = len(group_sizes), -(-rows // tile)
  ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
  starts = ends - group_sizes
  first, last = starts // tile, (ends - 1) // tile
  empty = group_sizes == 0
  number = jnp.where(empty, int(by_group), last - first + 1)
  first = jnp.minimum(first, tiles - 1)
  ids = jnp.arange(groups, dtype=jnp.int32)
  if not by_group:  # tiles without a row come last, with the last group that has one
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
  return Visits(jnp.clip(tile_of, 0, tiles - 1), ids[entry], bounds), at[-1]
