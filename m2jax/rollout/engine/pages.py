"""The key/value cache of the engine: pages of tokens, found through page tables.

A sequence's tokens are in pages that can be anywhere; its page table lists them. Page 0
belongs to no sequence: discarded entries are written there (padding, and rows that have
finished). Recorded expert ids are stored with the keys and values of their token, so a
request that shares a prefix gets its ids.

With MTP modules (`modules`) their layers follow the trunk's. A page also has
the states after its last stored token, and of each token how many modules have stored
keys and values.

Writes and reads index the whole arrays, layers included: XLA updates the donated cache
in place, and no layer is copied out of the stack.

Axes: L layers, with those of mtp modules, K key/value heads, pages, page tokens of a
page, H head dim, D model, P rows of a call, n pages of a table, C new tokens of a row,
S = n·page positions.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.config import ModelConfig
from m2jax.kernels import paged_attention
from m2jax.rollout.engine import masked_attention

EXPERT_DTYPE, DEPTH_DTYPE = jnp.int16, jnp.int8
UNUSED = 0  # the page of what is not kept


def as_stored(x: jax.Array, dtype) -> jax.Array:
  """Keys or values in the cache's dtype; in e4m3 clamped, which a cast does not do."""
  if dtype == jnp.float8_e4m3fn:
    largest = float(jnp.finfo(dtype).max)
    x = jnp.clip(x, -largest, largest)
  return x.astype(dtype)


class Places(NamedTuple):
  """Where the new tokens of a call are stored: page and offset, [P, C] int32."""

  page: jax.Array
  offset: jax.Array


class Pages(NamedTuple):
  """k, v [L, K, pages, page, H], tokens [pages, page] int32, experts [L of the trunk,
  pages, page, top_k] int16 or None; with modules states [mtp, pages, D], the first of
  the trunk, and depth [pages, page] int8, else None."""

  k: jax.Array
  v: jax.Array
  tokens: jax.Array
  experts: jax.Array | None = None
  states: jax.Array | None = None
  depth: jax.Array | None = None

  @property
  def page_tokens(self) -> int:
    return self.k.shape[3]

  def places(self, tables, positions, live) -> Places:
    """Places of positions [P, C] by tables [P, n]; those not `live` are unused."""
    index = positions // self.page_tokens
    inside = jnp.minimum(index, tables.shape[1] - 1)
    page = jnp.take_along_axis(tables, inside, axis=1)
    live = live & (index < tables.shape[1])
    return Places(jnp.where(live, page, UNUSED), positions % self.page_tokens)

  def write(self, layer, at: Places, k, v) -> Pages:
    """Stores k, v [P, C, K, H] of a layer."""
    L, K, pages, page, H = self.k.shape
    # Single tokens of all layers' and heads' pages: for updates of several heads
    # XLA on TPU wants another layout than the kernel that reads, and copies all.
    heads = (layer * K + jnp.arange(K)) * pages
    index = (heads + at.page[..., None]) * page + at.offset[..., None]

    def set_(x, new):
      tokens = x.reshape(L * K * pages * page, H).at[index]
      new = as_stored(new, x.dtype)
      return tokens.set(new, mode='promise_in_bounds').reshape(x.shape)

    return self._replace(k=set_(self.k, k), v=set_(self.v, v))

  def write_tokens(self, at: Places, tokens) -> Pages:
    """Stores tokens [P, C]."""
    stored = self.tokens.at[at.page, at.offset].set(tokens, mode='promise_in_bounds')
    return self._replace(tokens=stored)

  def write_experts(self, at: Places, ids) -> Pages:
    """Stores expert ids [L, P, C, top_k]; nothing if they are not recorded."""
    if self.experts is None:
      return self
    ids = ids.astype(EXPERT_DTYPE)
    at = self.experts.at[:, at.page, at.offset]
    return self._replace(experts=at.set(ids, mode='promise_in_bounds'))

  def read(self, layer, tables) -> tuple[jax.Array, jax.Array]:
    """Keys and values of a layer in the pages of tables [P, n]: [K, P, S, H] each."""
    return paged_attention.gather(paged_attention.Cache(self.k, self.v, tables, layer))

  def attend(
    self, layer, q, tables, position, visible=None, implementation=None
  ) -> jax.Array:
    """Attention of q [P, C, K·G, H] at position [P, C] over each row so far.

    `visible` [P, S], if not all are: which keys a query other than their own sees.
    """
    if visible is not None:
      keys, values = (x.astype(q.dtype) for x in self.read(layer, tables))
      return masked_attention.attend(q, keys, values, position, visible)
    cache = paged_attention.Cache(self.k, self.v, tables, layer)
    return paged_attention.attend(q, cache, position, implementation=implementation)

  def read_tokens(self, tables) -> jax.Array:
    """The tokens in the pages of tables [P, n]: [P, S]."""
    found = self.tokens.at[tables].get(mode='promise_in_bounds')
    return found.reshape(len(tables), -1)

  def write_depth(self, at: Places, depth) -> Pages:
    """Stores of tokens [P, C] how many modules have their keys and values."""
    depth = depth.astype(self.depth.dtype)
    stored = self.depth.at[at.page, at.offset].set(depth, mode='promise_in_bounds')
    return self._replace(depth=stored)

  def read_depth(self, tables) -> jax.Array:
    """What `write_depth` stored in the pages of tables [P, n]: [P, S]."""
    found = self.depth.at[tables].get(mode='promise_in_bounds')
    return found.reshape(len(tables), -1)

  def write_states(self, module: int, at: Places, states) -> Pages:
    """Stores states [P, C, D] of a module, at most one of each page."""
    at = self.states.at[module, at.page]
    stored = at.set(states.astype(self.states.dtype), mode='promise_in_bounds')
    return self._replace(states=stored)

  def read_states(self, module: int, tables, position) -> jax.Array:
    """A module's states [P, D] in the pages of position [P]."""
    index = jnp.clip(position // self.page_tokens, 0, tables.shape[1] - 1)
    page = jnp.take_along_axis(tables, index[:, None], axis=1)[:, 0]
    # A gather from all modules': a slice of one's would be copied.
    modules, pages, D = self.states.shape
    flat = self.states.reshape(modules * pages, D)
    return flat.at[module * pages + page].get(mode='promise_in_bounds')


def empty(
  cfg: ModelConfig,
  pages: int,
  page_tokens: int,
  dtype=None,
  *,
  record_experts: bool = False,
  modules: int = 0,
) -> Pages:
  """Zeros of `dtype`; None is the activations' dtype.

  `modules`: MTP modules with keys and values here.
  """
  shape = (cfg.num_layers + modules, cfg.num_kv_heads, pages, page_tokens, cfg.head_dim)
  ids = (cfg.num_layers, pages, page_tokens, cfg.experts_per_token)
  dtype = dtype or cfg.dtype
  return Pages(
    k=jnp.zeros(shape, dtype),
    v=jnp.zeros(shape, dtype),
    tokens=jnp.zeros((pages, page_tokens), jnp.int32),
    experts=jnp.zeros(ids, EXPERT_DTYPE) if record_experts else None,
    states=jnp.zeros((modules, pages, cfg.embed_dim), cfg.dtype) if modules else None,
    depth=jnp.zeros((pages, page_tokens), DEPTH_DTYPE) if modules else None,
  )


def expert_ids(pages: Pages, table) -> jax.Array:
  """Expert ids [S, L, top_k] int16 in the pages of a table [n]."""
  found = pages.experts[:, table]
  return found.reshape(found.shape[0], -1, found.shape[-1]).swapaxes(0, 1)


def copy(into: Pages, targets, source: Pages, sources) -> Pages:
  """Copies pages `sources` [n] of one cache to `targets` [n] of another."""

  def one(axis, x, y):
    at = (slice(None),) * axis
    return x.at[(*at, targets)].set(y[(*at, sources)])

  return jax.tree.map(one, axes(into), into, source)


def axes(pages: Pages) -> Pages:
  """The axis of the pages in each array."""
  axis = Pages(2, 2, 0, 1, 1, 0)
  return Pages(*(None if x is None else a for a, x in zip(axis, pages, strict=True)))
