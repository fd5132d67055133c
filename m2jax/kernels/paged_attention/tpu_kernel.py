"""The kernel body of paged attention on TPU; tpu.py has the algorithm and the call.

Axes: P rows, K key/value heads, G query heads of each, H head dim, n pages of a table;
m blocks of a row's queries, q rows of a block (see blocks.py), k positions of a block
of pages.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m2jax.kernels import pallas
from m2jax.kernels.paged_attention.blocks import MOST_TREE, Blocks

LANES = 128


class Static(NamedTuple):
  scale: float
  rows: int  # of a call
  blocks: Blocks
  page: int
  pages: int  # of a block
  table: int  # n
  cores: int

  @property
  def items(self) -> int:
    return self.rows * self.blocks.kv_heads * self.blocks.number

  @property
  def lanes(self) -> int:
    """q, as a row of whole tiles."""
    return self.blocks.rows + -self.blocks.rows % LANES

  @property
  def block(self) -> int:
    """Positions of a block of pages."""
    return self.pages * self.page


class Scalars(NamedTuple):
  """Prefetched to scalar memory, int32; see `blocks.Seen`."""

  layer: Any  # [1]
  tables: Any  # [P·n]
  length: Any  # [P·m]
  unmasked: Any  # [P·m]
  start: Any  # [P]


class _Refs(NamedTuple):
  """The kernel's refs, in the order in which Pallas passes them, after the scalars."""

  position: Any  # [1, q], lanes padded
  tree: Any  # like position: bits of the tokens that a query sees; None: a chain
  q: Any  # [q, H]
  k: Any  # [L, K, pages, page, H] in HBM
  v: Any
  out: Any  # like q
  lse: Any  # like position, fp32
  k_buffer: Any  # [2, pages of a block, page, H]
  v_buffer: Any
  semaphores: Any  # [2, k and v]
  slot: Any  # [1] in scalar memory: the buffer of this item's first block
  columns: Any  # [2, q, lanes] int32: position and tree
  top: Any  # [q, lanes] fp32
  total: Any
  acc: Any  # [q, H] fp32


class _Item(NamedTuple):
  row: Any
  head: Any
  query_block: Any


def item_of(static: Static, core, step) -> _Item:
  """The last item again in a step past it."""
  at = jnp.minimum(step * static.cores + core, static.items - 1)
  m = np.int32(static.blocks.number)
  of_row = np.int32(static.blocks.kv_heads) * m
  rest = lax.rem(at, of_row)
  return _Item(lax.div(at, of_row), lax.div(rest, m), lax.rem(rest, m))


def _length(static: Static, scalars: Scalars, item: _Item):
  return scalars.length[item.row * static.blocks.number + item.query_block]


def _ceil(n, size: int):
  """n / size, rounded up; int32 under x64, too."""
  return lax.div(n + np.int32(size - 1), np.int32(size))


def _each_copy(static, scalars: Scalars, refs: _Refs, item, block, slot, act):
  """`act` on the copies of a block's pages; none for a block past the item's last."""
  pages = _ceil(_length(static, scalars, item), static.page)
  count = jnp.clip(pages - block * static.pages, 0, static.pages)
  first = item.row * static.table + block * static.pages

  def one(i, _):
    page = scalars.tables[first + i]
    for which, (stack, buffer) in enumerate(
      ((refs.k, refs.k_buffer), (refs.v, refs.v_buffer))
    ):
      act(
        pltpu.make_async_copy(
          stack.at[scalars.layer[0], item.head, page],
          buffer.at[slot, i],
          refs.semaphores.at[slot, np.int32(which)],
        )
      )
    return _

  lax.fori_loop(0, count, one, 0)


def _column(row):
  """[1, q] → [q, lanes]."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _seen(refs: _Refs, start, first, k):
  """[q, k] bool: which of the positions from `first` on the queries see."""
  rows = refs.q.shape[0]
  key = first + lax.broadcasted_iota(jnp.int32, (rows, k), 1)
  seen = key <= refs.columns[0, :rows, :1]
  if refs.tree is None:
    return seen
  at = key - start
  bit = lax.shift_right_logical(
    jnp.broadcast_to(refs.columns[1, :rows, :1], at.shape),
    jnp.clip(at, 0, MOST_TREE - 1),
  )
  return seen & ((at < 0) | ((bit & 1) == 1))


def _add(static: Static, scalars, refs: _Refs, item: _Item, block, slot, masked):
  """A block of pages in the online softmax."""
  q, k = refs.q[...], static.block
  keys = refs.k_buffer[slot].reshape(k, -1).astype(q.dtype)
  values = refs.v_buffer[slot].reshape(k, -1).astype(q.dtype)
  scores = pallas.dot(q, keys, 1, 1) * static.scale
  if masked:
    first = block * k
    seen = _seen(refs, scalars.start[item.row], first, k)
    scores = jnp.where(seen, scores, -jnp.inf)
    # what was not copied may be anything
    at = first + lax.broadcasted_iota(jnp.int32, values.shape, 0)
    values = jnp.where(at < _length(static, scalars, item), values, 0)
  rows = pl.ds(0, q.shape[0])
  top = refs.top[rows, :1]
  new_top = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
  safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
  weights = jnp.exp(scores - safe)
  keep = jnp.exp(top - safe)
  total = refs.total[rows, :1] * keep + jnp.sum(weights, axis=1, keepdims=True)
  refs.top[rows] = jnp.broadcast_to(new_top, (q.shape[0], LANES))
  refs.total[rows] = jnp.broadcast_to(total, (q.shape[0], LANES))
  update = pallas.dot(weights.astype(values.dtype), values, 1, 0)
  refs.acc[...] = refs.acc[...] * keep + update


def kernel(static: Static, tree: bool, *refs):
  """Grid: cores, items of a core."""
  scalars, refs = Scalars(*refs[:5]), list(refs[5:])
  if not tree:
    refs.insert(1, None)
  refs = _Refs(*refs)
  core, step = pl.program_id(0), pl.program_id(1)
  item, following = item_of(static, core, step), item_of(static, core, step + 1)
  live = step * static.cores + core < static.items
  more = (step + 1) * static.cores + core < static.items
  copies = functools.partial(_each_copy, static, scalars, refs)
  start, wait = lambda copy: copy.start(), lambda copy: copy.wait()
  zero = np.int32(0)  # int32 under x64, too

  @pl.when(step == 0)
  def _():
    refs.slot[0] = 0
    pl.when(live)(lambda: copies(item, zero, zero, start))

  @pl.when(live)
  def _():
    _begin(refs)
    blocks = _ceil(_length(static, scalars, item), static.block)
    at = item.row * static.blocks.number + item.query_block
    whole = lax.div(scalars.unmasked[at], np.int32(static.block))
    first = refs.slot[0]
    after = lax.rem(first + blocks, np.int32(2))

    def one(masked, block, _):
      slot = lax.rem(first + block, np.int32(2))
      last = block + 1 == blocks
      pl.when(~last)(lambda: copies(item, block + 1, 1 - slot, start))
      pl.when(last & more)(lambda: copies(following, zero, 1 - slot, start))
      copies(item, block, slot, wait)
      _add(static, scalars, refs, item, block, slot, masked)
      return _

    lax.fori_loop(0, whole, functools.partial(one, False), 0)
    lax.fori_loop(whole, blocks, functools.partial(one, True), 0)
    pl.when((blocks == 0) & more)(lambda: copies(following, zero, after, start))
    refs.slot[0] = after
    _finish(refs)


def _begin(refs: _Refs):
  refs.top[...] = jnp.full_like(refs.top, -jnp.inf)
  refs.total[...] = jnp.zeros_like(refs.total)
  refs.acc[...] = jnp.zeros_like(refs.acc)
  refs.columns[0] = _column(refs.position[...])
  if refs.tree is not None:
    refs.columns[1] = _column(refs.tree[...])


def _finish(refs: _Refs):
  # Padding was not masked where all others see a block whole.
  nonempty = (refs.total[...] > 0) & (refs.columns[0] >= 0)
  divisor = jnp.where(nonempty, refs.total[...], 1.0)
  lse = jnp.where(nonempty, refs.top[...] + jnp.log(divisor), jnp.inf)
  refs.lse[...] = lse.T[:1]
  rows = refs.q.shape[0]
  out = jnp.where(nonempty[:rows, :1], refs.acc[...] / divisor[:rows, :1], 0.0)
  refs.out[...] = out.astype(refs.out.dtype)
