"""The key/value cache of the engine's slots, and moving rows in and out of it.

A call does not write to the cache while it attends: it gathers its rows once, collects
the new entries in a short tail, and writes them back at the end (see forward.py).
Updating the cache at every step costs several times as much on CPU, where XLA copies
and transposes it for the matmul. Keys are stored transposed, so that the score matmul
reads them sequentially.

Rows are copied by loops over slices with a traced trip count: padding rows cost
nothing, and XLA updates the donated cache in place.

Recorded expert ids are stored with the keys and values of their token and copied with
them: a request that takes over a prefix gets its ids.

Axes: L layers, S slots, P rows of a call, C cached positions, N positions of a tail,
K key/value heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.config import ModelConfig

EXPERT_DTYPE = jnp.int16


class KvCache(NamedTuple):
  """k [L, S, K, H, C], v [L, S, K, C, H], experts [L, S, C, top_k] int16 or None."""

  k: jax.Array
  v: jax.Array
  experts: jax.Array | None = None


class Tail(NamedTuple):
  """New entries of P rows: k, v [L, P, N, K, H], experts [L, P, N, top_k] or None."""

  k: jax.Array
  v: jax.Array
  experts: jax.Array | None = None


def _context_axes(cache: KvCache) -> KvCache:
  """The axis of positions in each array."""
  return KvCache(k=4, v=3, experts=None if cache.experts is None else 2)


def init(
  cfg: ModelConfig,
  slots: int,
  context_tokens: int,
  dtype=None,
  *,
  record_experts: bool = False,
) -> KvCache:
  """An empty cache of `dtype`; None is the activations' dtype."""
  kv, head, dtype = cfg.num_kv_heads, cfg.head_dim, dtype or cfg.dtype
  ids = (cfg.num_layers, slots, context_tokens, cfg.experts_per_token)
  return KvCache(
    k=jnp.zeros((cfg.num_layers, slots, kv, head, context_tokens), dtype),
    v=jnp.zeros((cfg.num_layers, slots, kv, context_tokens, head), dtype),
    experts=jnp.zeros(ids, EXPERT_DTYPE) if record_experts else None,
  )


def gather(cache: KvCache, rows: jax.Array, context: int, *, split: bool):
  """Keys and values of the first `context` positions of slots `rows` [P].

  Returns:
    A KvCache of P slots; with `split`, a tuple over layers of KvCaches without the
    leading axis, so that a loop over steps need not slice them out each time.
  """
  cache = cache._replace(experts=None)
  axes = _context_axes(cache)

  def take(axis, x):
    x = lax.slice_in_dim(x, 0, context, axis=axis)
    return x.take(rows, axis=1, mode='clip')

  if not split:
    return jax.tree.map(take, axes, cache)

  def layer(l):
    one = jax.tree.map(lambda x: x[l : l + 1], cache)
    return jax.tree.map(lambda axis, x: take(axis, x)[0], axes, one)

  return tuple(layer(l) for l in range(len(cache.k)))


def empty_tail(
  cfg: ModelConfig,
  rows: int,
  tokens: int,
  *,
  split: bool,
  record_experts: bool = False,
  head_shards: int = 1,
):
  """A Tail of zeros in the activations' dtype; with `split` a tuple over layers.

  `head_shards`: of the key/value heads, of which the tail has one.
  """
  lead = () if split else (cfg.num_layers,)
  shape = (*lead, rows, tokens, cfg.num_kv_heads // head_shards, cfg.head_dim)
  ids = (*lead, rows, tokens, cfg.experts_per_token)
  tail = Tail(
    k=jnp.zeros(shape, cfg.dtype),
    v=jnp.zeros(shape, cfg.dtype),
    experts=jnp.zeros(ids, EXPERT_DTYPE) if record_experts else None,
  )
  return (tail,) * cfg.num_layers if split else tail


def stacked(tail) -> Tail:
  """A Tail with the axis of layers, of one that may be split."""
  if isinstance(tail, Tail):
    return tail
  return jax.tree.map(lambda *layers: jnp.stack(layers), *tail)


def append(
  cache: KvCache, tail, rows: jax.Array, num_rows: jax.Array, starts: jax.Array
) -> KvCache:
  """Writes the tail's N positions at starts [P] of slots `rows` [P].

  starts + N must not exceed the length of the cache.
  """
  tail = stacked(tail)
  transposed = KvCache(
    k=tail.k.transpose(0, 1, 3, 4, 2),
    v=tail.v.transpose(0, 1, 3, 2, 4),
    experts=tail.experts,
  )

  def leaf(axis, x, new):
    new = new.astype(x.dtype)

    def body(p, x):
      row = lax.dynamic_slice_in_dim(new, p, 1, axis=1)
      return lax.dynamic_update_slice(x, row, _at(x, axis, rows[p], starts[p]))

    return lax.fori_loop(0, num_rows, body, x)

  return jax.tree.map(leaf, _context_axes(cache), cache, transposed)


def insert(cache: KvCache, one: KvCache, slot: jax.Array) -> KvCache:
  """Writes a cache of one slot and equally many positions to `slot`."""
  put = lambda axis, x, new: lax.dynamic_update_slice(x, new, _at(x, axis, slot, 0))
  return jax.tree.map(put, _context_axes(cache), cache, one)


def pad(cache: KvCache, positions: int) -> KvCache:
  """Appends `positions` positions of zeros."""

  def leaf(axis, x):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, positions)
    return jnp.pad(x, widths)

  return jax.tree.map(leaf, _context_axes(cache), cache)


def crop(cache: KvCache, positions: int) -> KvCache:
  """The first `positions` positions."""
  cut = lambda axis, x: lax.slice_in_dim(x, 0, positions, axis=axis)
  return jax.tree.map(cut, _context_axes(cache), cache)


def copy(
  cache: KvCache,
  sources: jax.Array,
  targets: jax.Array,
  num_rows: jax.Array,
  context: int,
) -> KvCache:
  """Copies the first `context` positions of sources [P] to targets [P], in order."""

  def leaf(axis, x):
    sizes = _resized(x.shape, axis, 1, context)

    def body(p, x):
      row = lax.dynamic_slice(x, _at(x, axis, sources[p], 0), sizes)
      return lax.dynamic_update_slice(x, row, _at(x, axis, targets[p], 0))

    return lax.fori_loop(0, num_rows, body, x)

  return jax.tree.map(leaf, _context_axes(cache), cache)


def _resized(shape, axis: int, slots: int, context: int) -> tuple[int, ...]:
  shape = list(shape)
  shape[1], shape[axis] = slots, context
  return tuple(shape)


def _at(x: jax.Array, axis: int, slot, context) -> list[jax.Array]:
  starts = [jnp.int32(0)] * x.ndim
  starts[1], starts[axis] = jnp.int32(slot), jnp.int32(context)
  return starts
