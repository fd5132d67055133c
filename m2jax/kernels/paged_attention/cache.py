"""Where the keys and values of a call's rows are stored, and what its queries see.

Axes: L layers, K key/value heads, pages, page tokens of a page, H head dim, P rows of a
call, n pages of a table, C new tokens of a row (its chunk), S = n·page positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from m2jax.axes import Array, Bool, Float, Int, Int32


class Cache(NamedTuple):
  """Keys and values in pages, of a stack of layers, and the page tables of P rows.

  The whole stack is an argument, with the layer's index, because XLA would copy a layer
  that is sliced out of the stack.

  Attributes:
    k, v: keys and values of all layers, or of one layer, [K, pages, page, H], if
      `layer` is None.
    tables: pages of each row's positions; unused entries must name a page that exists.
    layer: index into the stack.
  """

  k: Float[Array, '*L K pages page H']
  v: Float[Array, '*L K pages page H']
  tables: Int32[Array, 'P n']
  layer: Int[Array, ''] | int | None = None

  def stacked(self) -> Cache:
    """The cache with a stack of layers and the index of one as int32."""
    if self.layer is None:
      return Cache(self.k[None], self.v[None], self.tables, jnp.int32(0))
    return self._replace(layer=jnp.asarray(self.layer, jnp.int32))

  @property
  def page_tokens(self) -> int:
    return self.k.shape[-2]

  @property
  def positions(self) -> int:
    """S: of a row."""
    return self.tables.shape[1] * self.page_tokens


def gather(
  cache: Cache,
) -> tuple[Float[Array, 'K P S H'], Float[Array, 'K P S H']]:
  """Keys and values of the rows in order: copies, by one gather of whole pages."""
  cache = cache.stacked()
  L, K, pages, page, H = cache.k.shape
  rows = len(cache.tables)
  heads = (cache.layer * K + jnp.arange(K)) * pages
  index = heads[:, None, None] + cache.tables
  take = lambda x: (
    x.reshape(L * K * pages, page, H)
    .at[index]
    .get(mode='promise_in_bounds')
    .reshape(K, rows, -1, H)
  )
  return take(cache.k), take(cache.v)


def visible(
  position: Int[Array, 'P C'],
  keys: int,
  subtree_end: Int[Array, 'P C'] | None = None,
) -> Bool[Array, 'P C S']:
  """Which of `keys` positions each query sees; see `api.attend`."""
  key = jnp.arange(keys)
  seen = key <= position[..., None]
  if subtree_end is None:
    return seen
  index = key - position[:, :1]  # in the chunk, [P, keys]
  C = subtree_end.shape[1]
  end = jnp.take_along_axis(subtree_end, jnp.clip(index, 0, C - 1), axis=1)
  end = jnp.where((index >= 0) & (index < C), end, C)
  return seen & (jnp.arange(C)[:, None] < end[:, None])


def ancestors(subtree_end: Int[Array, 'P C']) -> Int32[Array, 'P C']:
  """Bit j of entry i: whether token i of the chunk sees token j; C is at most 32."""
  at = jnp.arange(subtree_end.shape[1])
  seen = (at <= at[:, None]) & (at[:, None] < subtree_end[:, None])
  bits = jnp.where(seen, jnp.uint32(1) << at.astype(jnp.uint32), 0)
  return jnp.sum(bits, axis=-1, dtype=jnp.uint32).astype(jnp.int32)
