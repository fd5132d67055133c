"""Attention whose sums follow a query's path, in blocks fixed by position.

A tile of queries is a run of one path: in a forest up to the next branch, in an
engine's pages up to the end of the chunk. The keys of the path, in order, are read in
blocks of `KEYS` positions; what is added up depends on the path alone. Keys that a
query does not see add exact zeros. `kernels.invariant` has the reasons.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
tiles of t queries, r = t·G; blocks of c keys.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float, Int
from m2jax.kernels.invariant import TILE
from m2jax.kernels.tree_attention.visibility import Visibility

KEYS = 64  # positions of a block


def tile(
  q: Float[Array, 'T N H'],
  position: Int[Array, 'T'],
  kv_heads: int,
  take: Callable,
  *,
  scale: float,
) -> tuple[Float[Array, 'T N H'], Float[Array, 'T N']]:
  """Output and logsumexp of queries of one path; 0 and +inf of those that see nothing.

  Args:
    q: queries, `TILE` of them.
    position: of each query, which sees the keys up to its own; -1: none.
    kv_heads: K.
    take: block number → keys [K, H, c], values [K, c, H], and [c] bool: the positions
      that have a key that is not hidden.
    scale: factor on the scores.
  """
  (t, heads, H), wide = q.shape, jnp.promote_types(q.dtype, jnp.float32)
  group = heads // kv_heads
  split = lambda x: x.reshape(t, kv_heads, group, -1).swapaxes(0, 1)
  q_KxrxH = split(q.astype(wide) * scale).reshape(kv_heads, t * group, H)
  q_KxrxH = lax.optimization_barrier(q_KxrxH)
  row_position = jnp.repeat(position, group)

  def block(i, state):
    k, v, there = take(i)
    at = i * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
    seen = there & (at <= row_position[:, None])
    arrays = lax.optimization_barrier((q_KxrxH, k.astype(wide), v.astype(wide), seen))
    return lax.optimization_barrier(_add_block(*arrays, *state))

  rows = kv_heads, t * group
  top = jnp.full(rows, jnp.finfo(wide).min / 2, wide)
  state = top, jnp.zeros(rows, wide), jnp.zeros((*rows, H), wide)
  blocks = jnp.max(position) // KEYS + 1
  top, total, out = lax.fori_loop(0, blocks, block, state)
  divisor = jnp.where(total > 0, total, 1)
  lse = jnp.where(total > 0, top + jnp.log(divisor), jnp.inf)
  join = lambda x: (
    x.reshape(kv_heads, t, group, -1).swapaxes(0, 1).reshape(t, heads, -1)
  )
  return join(out / divisor[..., None]).astype(q.dtype), join(lse)[..., 0]


def _add_block(q, k, v, seen, top, total, out):
  """The largest score, the sum of weights and that of values, with one block more."""
  scores = jnp.einsum('krh,khc->krc', q, k)
  best = jnp.max(jnp.where(seen, scores, top[..., None]), axis=-1)
  best = jnp.maximum(best, top)
  weights = jnp.where(seen, jnp.exp(scores - best[..., None]), 0)
  kept = jnp.exp(top - best)
  out = out * kept[..., None] + jnp.einsum('krc,kch->krh', weights, v)
  return best, total * kept + jnp.sum(weights, axis=-1), out


def forward(q, k, v, visibility: Visibility, *, scale):
  """Same contract as `reference.forward`; the visibility has positions.

  A query whose own key is hidden must see nothing.
  """
  batch, queries, heads, H = q.shape
  length = k.shape[1]
  slots = -(-length // KEYS) * KEYS
  k_position, wide = visibility.k_position, jnp.promote_types(q.dtype, jnp.float32)
  first, count, live = _tiles(visibility)
  flat = lambda x: jnp.pad(
    x.reshape(-1, *x.shape[2:]), [(0, TILE)] + [(0, 0)] * (x.ndim - 2)
  )
  q_flat, index, q_position = map(flat, (q, visibility.q_index, visibility.q_position))
  of_tile = flat(first)
  starts = jnp.nonzero(
    live.reshape(-1) & (first.reshape(-1) == jnp.arange(first.size)),
    size=first.size,
    fill_value=0,
  )[0]

  def one(i, state):
    at = starts[i]
    cut = lambda x: lax.dynamic_slice_in_dim(x, at, TILE)
    row = at // queries
    mine = (cut(of_tile) == at) & (at + jnp.arange(TILE) < first.size)
    last = jnp.max(jnp.where(mine, cut(index), -1))
    end, places = visibility.subtree_end[row], k_position[row]
    seen = (jnp.arange(length) <= last) & (last < end)
    path = jnp.full(slots, length, jnp.int32)
    path = path.at[jnp.where(seen, places, slots)].set(
      jnp.arange(length, dtype=jnp.int32), mode='drop'
    )
    position = jnp.where(mine, cut(q_position), -1)

    def take(b):
      keys = lax.dynamic_slice_in_dim(path, b * KEYS, KEYS)
      there = keys < length
      keys = jnp.minimum(keys, length - 1)
      return k[row, keys].transpose(1, 2, 0), v[row, keys].swapaxes(0, 1), there

    new = tile(cut(q_flat), position, k.shape[2], take, scale=scale)
    set_ = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, at, 0)
    return jax.tree.map(set_, state, new)

  state = jnp.zeros_like(q_flat), jnp.zeros(q_flat.shape[:2], wide)
  out, lse = lax.fori_loop(0, count, one, state)
  out = out[: first.size].reshape(q.shape)
  lse = lse[: first.size].reshape(q.shape[:3])
  out = jnp.where(live[..., None, None], out, 0)
  return out, jnp.where(live[..., None], lse, jnp.inf).swapaxes(1, 2)


def _tiles(visibility: Visibility):
  """The flat number of the first query of each query's tile, [B, Q], the number of
  tiles, and which queries see anything."""
  index, end = visibility.q_index, visibility.subtree_end
  batch, queries = index.shape
  own = jnp.take_along_axis(end, jnp.maximum(index, 0), axis=1)
  live = (index >= 0) & (own > index)
  before = lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]
  chained = live & before(live) & (index == before(index) + 1) & (before(own) > index)
  at = jnp.arange(queries, dtype=jnp.int32)[None]
  begin = lax.cummax(jnp.where(chained, 0, at), axis=1)
  first = at - (at - begin) % TILE + queries * jnp.arange(batch)[:, None]
  count = jnp.sum(live & (first == at + queries * jnp.arange(batch)[:, None]))
  return first, count.astype(jnp.int32), live
