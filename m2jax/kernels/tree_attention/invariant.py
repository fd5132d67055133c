"""Attention whose sums follow a query's path, in blocks fixed by position.

A tile of queries is a run of one path: in a forest up to the next branch, in an
engine's pages up to the end of the chunk. The keys of the path, in order, are read in
blocks of `KEYS` positions; what is added up depends on the path alone. Keys that a
query does not see add exact zeros. Several tiles are computed at once, always as many.
`kernels.invariant` has the reasons.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
g tiles at once of t queries, r = t·G; blocks of c keys.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float, Int
from m2jax.kernels.tree_attention.visibility import Visibility

TILES, QUERIES, KEYS = 8, 4, 128  # g, t, c


def tiles(
  q: Float[Array, 'g t N H'],
  position: Int[Array, 'g t'],
  kv_heads: int,
  take: Callable,
  *,
  scale: float,
) -> tuple[Float[Array, 'g t N H'], Float[Array, 'g t N']]:
  """Output and logsumexp of queries; 0 and +inf of those that see nothing.

  Args:
    q: queries, `TILES` times `QUERIES` of one path.
    position: each query's; it sees the keys up to its own. -1: none.
    kv_heads: K.
    take: block number → of each tile keys [g, K, H, c], values [g, K, c, H], and
      [g, c] bool: the positions that have a key that is not hidden.
    scale: factor on the scores.
  """
  (g, t, heads, H), wide = q.shape, jnp.promote_types(q.dtype, jnp.float32)
  rows = g, kv_heads, t * (heads // kv_heads)
  q = (q.astype(wide) * scale).reshape(g, t, kv_heads, -1, H)
  q = lax.optimization_barrier(q.swapaxes(1, 2).reshape(*rows, H))
  row_position = jnp.repeat(position, heads // kv_heads, axis=1)[..., None]

  def block(i, state):
    k, v, there = take(i)
    at = i * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
    seen = (there[:, None] & (at <= row_position))[:, None]
    arrays = lax.optimization_barrier((q, k.astype(wide), v.astype(wide), seen))
    return lax.optimization_barrier(_add_block(*arrays, *state))

  top = jnp.full(rows, jnp.finfo(wide).min / 2, wide)
  state = top, jnp.zeros(rows, wide), jnp.zeros((*rows, H), wide)
  top, total, out = lax.fori_loop(0, jnp.max(position) // KEYS + 1, block, state)
  divisor = jnp.where(total > 0, total, 1)
  lse = jnp.where(total > 0, top + jnp.log(divisor), jnp.inf)

  def join(x):
    x = x.reshape(g, kv_heads, t, heads // kv_heads, -1).swapaxes(1, 2)
    return x.reshape(g, t, heads, -1)

  return join(out / divisor[..., None]), join(lse)[..., 0]


def _add_block(q, k, v, seen, top, total, out):
  """The largest score, the sum of weights and that of values, with one block more."""
  scores = jnp.einsum('gkrh,gkhc->gkrc', q, k)
  best = jnp.max(jnp.where(seen, scores, top[..., None]), axis=-1)
  best = jnp.maximum(best, top)
  weights = jnp.where(seen, jnp.exp(scores - best[..., None]), 0)
  kept = jnp.exp(top - best)
  out = out * kept[..., None] + jnp.einsum('gkrc,gkch->gkrh', weights, v)
  return best, total * kept + jnp.sum(weights, axis=-1), out


def forward(q, k, v, visibility: Visibility, *, scale):
  """Same contract as `reference.forward`; the visibility has positions.

  A query whose own key is hidden must see nothing.
  """
  queries, length = q.shape[1], k.shape[1]
  slots = -(-length // KEYS) * KEYS
  first, live = _tiles(visibility)
  size = first.size
  number = jnp.arange(size, dtype=jnp.int32).reshape(first.shape)
  begins = (live & (first == number)).reshape(-1)
  starts = jnp.nonzero(begins, size=size + TILES, fill_value=size)[0]
  flat = lambda x: x.reshape(size, *x.shape[2:])
  of_tile = flat(jnp.where(live, first, size))
  index, q_position = map(flat, (visibility.q_index, visibility.q_position))
  q_flat, numbers = flat(q), jnp.arange(length, dtype=jnp.int32)

  def find(start):
    """A tile's queries, their positions and row, and the path: position → key."""
    at = start + jnp.arange(QUERIES, dtype=jnp.int32)
    mine = (at < size) & (of_tile[jnp.minimum(at, size - 1)] == start)
    at, row = jnp.where(mine, at, size), jnp.minimum(start, size - 1) // queries
    inside = jnp.minimum(at, size - 1)
    last = jnp.max(jnp.where(mine, index[inside], -1))
    seen = (numbers <= last) & (last < visibility.subtree_end[row])
    places = jnp.where(seen, visibility.k_position[row], slots)
    path = jnp.full(slots, length, jnp.int32).at[places].set(numbers, mode='drop')
    return at, jnp.where(mine, q_position[inside], -1), row, path

  def some(i, state):
    at, position, row, path = jax.vmap(find)(
      lax.dynamic_slice_in_dim(starts, i * TILES, TILES)
    )

    def take(b):
      keys = lax.dynamic_slice_in_dim(path, b * KEYS, KEYS, axis=1)
      index = row[:, None], jnp.minimum(keys, length - 1)
      return (
        k[index].transpose(0, 2, 3, 1), v[index].swapaxes(1, 2), keys < length
      )  # fmt: skip

    given = q_flat[jnp.minimum(at, size - 1)]
    new = tiles(given, position, k.shape[2], take, scale=scale)
    set_ = lambda x, y: x.at[at].set(y.astype(x.dtype), mode='drop')
    return jax.tree.map(set_, state, new)

  wide = jnp.promote_types(q.dtype, jnp.float32)
  state = jnp.zeros_like(q_flat), jnp.full(q_flat.shape[:2], jnp.inf, wide)
  groups = -(-jnp.sum(begins, dtype=jnp.int32) // TILES)
  out, lse = lax.fori_loop(0, groups, some, state)
  return out.reshape(q.shape), lse.reshape(q.shape[:3]).swapaxes(1, 2)


def _tiles(visibility: Visibility):
  """[B, Q]: the first query of each query's tile, numbered through all rows, and which
  queries see anything."""
  index, end = visibility.q_index, visibility.subtree_end
  rows, queries = index.shape
  own = jnp.take_along_axis(end, jnp.maximum(index, 0), axis=1)
  live = (index >= 0) & (own > index)
  before = lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :-1]
  chained = live & before(live) & (index == before(index) + 1) & (before(own) > index)
  at = jnp.arange(queries, dtype=jnp.int32)[None]
  begin = lax.cummax(jnp.where(chained, 0, at), axis=1)
  row = queries * jnp.arange(rows, dtype=jnp.int32)[:, None]
  return row + at - (at - begin) % QUERIES, live
