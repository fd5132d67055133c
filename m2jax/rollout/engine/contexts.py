"""Keys and values of one call's rows, copied out contiguously, for decoding on a CPU.

A call copies its rows' pages out of the cache, decodes several steps, and writes the
new entries back; every step reads keys and values in place. A row that the previous
call left here is not copied again (`refresh`, and `serving.kept_contexts` on the host).
Elsewhere kernels read pages through their tables. `Contexts` has the methods of `Pages`
that `forward.extend` needs.

Axes: those of pages.py.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.kernels.paged_attention import cpu as paged_attention
from m2jax.rollout.engine import masked_attention
from m2jax.rollout.engine.pages import EXPERT_DTYPE, Pages, Places, as_stored


class Contexts(NamedTuple):
  """k [K, P, H, S], v [K, P, S, H] of each layer, which XLA would copy out of a stack;
  tokens [P, S]; experts [L, P, S, top_k] or None; with modules states [mtp, P, n, D]
  and depth [P, S], else None."""

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  tokens: jax.Array
  experts: jax.Array | None
  states: jax.Array | None = None
  depth: jax.Array | None = None

  @property
  def page_tokens(self) -> int:
    return self.tokens.shape[1] // self.states.shape[2]

  def places(self, tables, positions, live) -> Places:
    """Row and position; one beyond the last for those that are not live."""
    del tables
    P, S = self.tokens.shape
    row = jnp.broadcast_to(jnp.arange(P)[:, None], positions.shape)
    return Places(row, jnp.where(live, positions, S))

  def write(self, layer: int, at: Places, k, v) -> Contexts:
    def set_(stack, at, new):
      new = at.set(as_stored(new, stack[layer].dtype), mode='drop')
      return (*stack[:layer], new, *stack[layer + 1 :])

    return self._replace(
      k=set_(self.k, self.k[layer].at[:, at.page, :, at.offset], k),
      v=set_(self.v, self.v[layer].at[:, at.page, at.offset], v.transpose(2, 0, 1, 3)),
    )

  def write_tokens(self, at: Places, tokens) -> Contexts:
    stored = self.tokens.at[at.page, at.offset].set(tokens, mode='drop')
    return self._replace(tokens=stored)

  def write_experts(self, at: Places, ids) -> Contexts:
    if self.experts is None:
      return self
    stored = self.experts.at[:, at.page, at.offset]
    return self._replace(experts=stored.set(ids.astype(EXPERT_DTYPE), mode='drop'))

  def attend(self, layer: int, q, tables, position, visible=None) -> jax.Array:
    del tables
    keys, values = self.k[layer].astype(q.dtype), self.v[layer].astype(q.dtype)
    if visible is not None:
      return masked_attention.short_chunk(q, keys, values, position, visible)
    return paged_attention.short_chunk(q, keys, values, position)[0]

  def read_tokens(self, tables) -> jax.Array:
    del tables
    return self.tokens

  def write_depth(self, at: Places, depth) -> Contexts:
    stored = self.depth.at[at.page, at.offset]
    return self._replace(depth=stored.set(depth.astype(self.depth.dtype), mode='drop'))

  def read_depth(self, tables) -> jax.Array:
    del tables
    return self.depth

  def write_states(self, module: int, at: Places, states) -> Contexts:
    at = self.states.at[module, at.page, at.offset // self.page_tokens]
    return self._replace(states=at.set(states.astype(self.states.dtype), mode='drop'))

  def read_states(self, module: int, tables, position) -> jax.Array:
    index = jnp.clip(position // self.page_tokens, 0, tables.shape[1] - 1)
    return self.states[module, jnp.arange(len(index)), index]


@jax.named_scope('contexts')
def take(pages: Pages, tables, layers: int) -> Contexts:
  """The contexts in the pages of tables [P, n], of the first layers."""
  layers = [pages.read(layer, tables) for layer in range(layers)]
  tokens, ids = pages.read_tokens(tables), pages.experts
  if ids is not None:  # of what is there already nothing reads them
    ids = jnp.zeros((len(ids), *tokens.shape, ids.shape[-1]), ids.dtype)
  k = tuple(keys.swapaxes(2, 3) for keys, _ in layers)
  states = depth = None
  if pages.states is not None:
    states, depth = pages.states[:, tables], pages.read_depth(tables)
  return Contexts(k, tuple(v for _, v in layers), tokens, ids, states, depth)


def empty(pages: Pages, rows: int, n: int, layers: int) -> Contexts:
  """Empty contexts for `rows` tables of n pages."""
  tables = jax.ShapeDtypeStruct((rows, n), jnp.int32)
  like = jax.eval_shape(lambda *x: take(*x, layers), pages, tables)
  return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)


@jax.named_scope('contexts')
def refresh(contexts: Contexts, pages: Pages, tables, stale) -> Contexts:
  """Takes the rows that are `stale` [P] out of their pages; keeps the others."""
  rows = jnp.argsort(~stale)  # these first

  def one(i, contexts):
    row = rows[i]
    new = take(pages, tables[row][None], len(contexts.k))
    set_ = lambda axis, into, x: lax.dynamic_update_slice_in_dim(into, x, row, axis)
    return jax.tree.map(set_, axes(contexts), contexts, new)

  return lax.fori_loop(0, jnp.sum(stale, dtype=jnp.int32), one, contexts)


def axes(contexts: Contexts) -> Contexts:
  """The axis of the rows in each array."""
  layers = (1,) * len(contexts.k)
  axis = Contexts(layers, layers, 0, 1, 1, 0)
  return Contexts(
    *(None if x is None else a for a, x in zip(axis, contexts, strict=True))
  )


@jax.named_scope('contexts')
def put_back(pages: Pages, contexts: Contexts, tables, starts, counts, most: int):
  """The pages, with positions starts … starts + counts - 1 [P] of the contexts.

  Args:
    most: upper bound on `counts`.
  """
  P, S = contexts.tokens.shape
  positions = starts[:, None] + jnp.arange(most)
  at = pages.places(tables, positions, jnp.arange(most) < counts[:, None])
  row, positions = jnp.arange(P)[:, None], jnp.minimum(positions, S - 1)
  for layer, (k, v) in enumerate(zip(contexts.k, contexts.v, strict=True)):
    k, v = k[:, row, :, positions], v[:, row, positions].transpose(1, 2, 0, 3)
    pages = pages.write(layer, at, k, v)
  if pages.experts is not None:
    pages = pages.write_experts(at, contexts.experts[:, row, positions])
  if pages.states is not None:
    pages = pages.write_depth(at, contexts.depth[row, positions])
    # Rows that share a page have read the same of it.
    pages = pages._replace(states=pages.states.at[:, tables].set(contexts.states))
  return pages.write_tokens(at, contexts.tokens[row, positions])
