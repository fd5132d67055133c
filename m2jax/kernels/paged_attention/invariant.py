"""Paged attention in the order of sums of `tree_attention.invariant`.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, H head dim, S
positions; tiles of t tokens of a row, blocks of c positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.kernels.invariant import TILE
from m2jax.kernels.paged_attention.cache import Cache
from m2jax.kernels.tree_attention.invariant import KEYS, tile


def attend(q, cache: Cache, position, subtree_end=None, *, scale):
  """Same contract as `reference.attend`, for chunks that are chains."""
  if subtree_end is not None:
    raise ValueError("attend: implementation='invariant' has no trees of new tokens")
  P, C, heads, H = q.shape
  cache = cache.stacked()
  L, K, pages, page, _ = cache.k.shape
  pad = -C % TILE
  position = jnp.minimum(position, cache.positions - 1)
  position = jnp.pad(position, ((0, 0), (0, pad)), constant_values=-1)
  position = position.reshape(-1, TILE)
  tiles = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(-1, TILE, heads, H)
  layers = (cache.layer * K + jnp.arange(K)) * pages

  def one(i, state):
    table = cache.tables[i // ((C + pad) // TILE)]

    def take(b):
      at = jnp.minimum(b * KEYS + jnp.arange(KEYS), cache.positions - 1)
      index = (layers[:, None] + table[at // page]) * page + at % page
      read = lambda x: x.reshape(-1, H).at[index].get(mode='promise_in_bounds')
      return read(cache.k).swapaxes(1, 2), read(cache.v), jnp.ones(KEYS, bool)

    new = tile(tiles[i], position[i], K, take, scale=scale)
    set_ = lambda x, y: lax.dynamic_update_index_in_dim(x, y, i, 0)
    return jax.tree.map(set_, state, new)

  wide = jnp.promote_types(q.dtype, jnp.float32)
  state = jnp.zeros_like(tiles), jnp.zeros(tiles.shape[:3], wide)
  out, lse = lax.fori_loop(0, len(tiles), one, state)
  return (
    out.reshape(P, C + pad, heads, H)[:, :C],
    lse.reshape(P, C + pad, heads)[:, :C],
  )
