"""Paged attention in the order of sums of `tree_attention.invariant`.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, H head dim, S
positions; g tiles at once of t tokens of a row, blocks of c positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.kernels.paged_attention.cache import Cache
from m2jax.kernels.tree_attention.invariant import KEYS, QUERIES, TILES, tiles


def attend(q, cache: Cache, position, subtree_end=None, *, scale):
  """Same contract as `reference.attend`, for chunks that are chains."""
  if subtree_end is not None:
    raise ValueError("attend: implementation='invariant' has no trees of new tokens")
  (P, C, _, H), (_, K, pages, page, _) = q.shape, cache.stacked().k.shape
  of_row = -(-C // QUERIES)  # tiles
  groups = -(-P * of_row // TILES)

  def split(x, fill):
    """[P, C, …] → [groups, g, t, …]."""
    pad = [(0, 0), (0, of_row * QUERIES - C)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad, constant_values=fill)
    x = x.reshape(P * of_row, QUERIES, *x.shape[2:])
    x = jnp.pad(
      x, [(0, groups * TILES - len(x))] + pad[2:] + [(0, 0)], constant_values=fill
    )
    return x.reshape(groups, TILES, *x.shape[1:])

  position = split(jnp.minimum(position, cache.positions - 1), -1)
  queries = split(q, 0)
  tables = split(jnp.repeat(cache.tables[:, None], C, axis=1), 0)[:, :, 0]
  cache = cache.stacked()
  layers = ((cache.layer * K + jnp.arange(K)) * pages)[:, None]

  def some(i, state):
    def take(b):
      at = jnp.minimum(b * KEYS + jnp.arange(KEYS), cache.positions - 1)
      index = (layers + tables[i][:, None, at // page]) * page + at % page
      read = lambda x: x.reshape(-1, H).at[index].get(mode='promise_in_bounds')
      there = jnp.ones((TILES, KEYS), bool)
      return read(cache.k).swapaxes(2, 3), read(cache.v), there

    new = tiles(queries[i], position[i], K, take, scale=scale)
    set_ = lambda x, y: lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), i, 0)
    return jax.tree.map(set_, state, new)

  wide = jnp.promote_types(q.dtype, jnp.float32)
  state = jnp.zeros_like(queries), jnp.zeros(queries.shape[:4], wide)
  out, lse = lax.fori_loop(0, groups, some, state)
  join = lambda x: x.reshape(-1, *x.shape[3:])[: P * of_row * QUERIES]
  join_rows = lambda x: join(x).reshape(P, -1, *x.shape[3:])[:, :C]
  return join_rows(out), join_rows(lse)
