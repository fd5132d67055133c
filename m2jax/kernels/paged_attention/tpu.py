"""Paged attention on TPU: a Pallas Mosaic kernel that copies pages by their tables.

An item of work is a block of a row's queries and one key/value head. For each the
kernel runs over blocks of the row's pages with an online softmax (FlashAttention,
arXiv:2205.14135): tables and lengths are prefetched to scalar memory, and tell it which
pages to copy from HBM, and that no page beyond the last position that a query sees is
copied. While a block is computed the next one is copied, of the next item at the end of
one. Blocks that all queries see whole are not masked. The cache stays in HBM, with all
its layers.

The items are divided over the two cores of a chip by turns, so that with a causal chunk
both have as much to do.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, G = N/K, H head
dim, n pages of a table; m blocks of a row's queries; in the kernel q rows of a block of
queries (token by token, G heads each), k positions of a block of pages.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m2jax.kernels import block_sizes, pallas
from m2jax.kernels.paged_attention.cache import Cache, ancestors

LANES = 128
_SUBLANES = 16  # of a tile of bf16; fp32 has 8
_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_ENTRIES = 160 * 1024  # of a table: 640 KiB of scalar memory
_MOST_TREE = 32  # tokens of a chunk that is a tree: one bit each


class _Static(NamedTuple):
  scale: float
  rows: int  # of a call
  kv_heads: int
  group: int
  queries: int  # tokens of a block of queries
  query_blocks: int  # m
  page: int
  pages: int  # of a block
  table: int  # n
  cores: int

  @property
  def items(self) -> int:
    return self.rows * self.kv_heads * self.query_blocks

  @property
  def padded(self) -> int:
    """Rows of a block of queries, as stored: whole tiles."""
    rows = self.queries * self.group
    return rows + -rows % _SUBLANES

  @property
  def block(self) -> int:
    """Positions of a block of pages."""
    return self.pages * self.page


class _Scalars(NamedTuple):
  """Prefetched to scalar memory, int32.

  Attributes:
    layer: [1].
    tables: [P·n].
    length: [P·m] positions that some query of a block sees.
    unmasked: [P·m] positions that all its queries see, but for padding.
    start: [P] of the chunk.
  """

  layer: Any
  tables: Any
  length: Any
  unmasked: Any
  start: Any


class _Refs(NamedTuple):
  """In the order in which Pallas passes them, after the scalars."""

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


def _item(static: _Static, core, step) -> _Item:
  """The last item again in a step past it."""
  at = jnp.minimum(step * static.cores + core, static.items - 1)
  of_row, m = np.int32(static.kv_heads * static.query_blocks), static.query_blocks
  rest = lax.rem(at, of_row)
  return _Item(
    lax.div(at, of_row), lax.div(rest, np.int32(m)), lax.rem(rest, np.int32(m))
  )


def _length(static: _Static, scalars: _Scalars, item: _Item):
  return scalars.length[item.row * static.query_blocks + item.query_block]


def _each_copy(static, scalars: _Scalars, refs: _Refs, item, block, slot, act):
  """`act` on the copies of a block's pages; none for a block past the item's last."""
  pages = pl.cdiv(_length(static, scalars, item), static.page)
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
          refs.semaphores.at[slot, which],
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
    jnp.clip(at, 0, _MOST_TREE - 1),
  )
  return seen & ((at < 0) | ((bit & 1) == 1))


def _add(static: _Static, scalars, refs: _Refs, item: _Item, block, slot, masked):
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


def _kernel(static: _Static, tree: bool, *refs):
  """Grid: cores, items of a core."""
  scalars, refs = _Scalars(*refs[:5]), list(refs[5:])
  if not tree:
    refs.insert(1, None)
  refs = _Refs(*refs)
  core, step = pl.program_id(0), pl.program_id(1)
  item, following = _item(static, core, step), _item(static, core, step + 1)
  live = step * static.cores + core < static.items
  more = (step + 1) * static.cores + core < static.items
  copies = functools.partial(_each_copy, static, scalars, refs)
  start, wait = lambda copy: copy.start(), lambda copy: copy.wait()

  @pl.when(step == 0)
  def _():
    refs.slot[0] = 0
    pl.when(live)(lambda: copies(item, 0, 0, start))

  @pl.when(live)
  def _():
    _begin(refs)
    blocks = pl.cdiv(_length(static, scalars, item), static.block)
    at = item.row * static.query_blocks + item.query_block
    whole = lax.div(scalars.unmasked[at], np.int32(static.block))
    first = refs.slot[0]
    after = lax.rem(first + blocks, 2)

    def one(masked, block, _):
      slot = lax.rem(first + block, 2)
      last = block + 1 == blocks
      pl.when(~last)(lambda: copies(item, block + 1, 1 - slot, start))
      pl.when(last & more)(lambda: copies(following, 0, 1 - slot, start))
      copies(item, block, slot, wait)
      _add(static, scalars, refs, item, block, slot, masked)
      return _

    lax.fori_loop(0, whole, functools.partial(one, False), 0)
    lax.fori_loop(whole, blocks, functools.partial(one, True), 0)
    pl.when((blocks == 0) & more)(lambda: copies(following, 0, after, start))
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
  some = (refs.total[...] > 0) & (refs.columns[0] >= 0)
  divisor = jnp.where(some, refs.total[...], 1.0)
  lse = jnp.where(some, refs.top[...] + jnp.log(divisor), jnp.inf)
  refs.lse[...] = lse.T[:1]
  rows = refs.q.shape[0]
  out = jnp.where(some[:rows, :1], refs.acc[...] / divisor[:rows, :1], 0.0)
  refs.out[...] = out.astype(refs.out.dtype)


def _specs(static: _Static, dim: int):
  """Of q, of position [P, m, 1, lanes] and of lse [P, K, m, 1, lanes]."""
  lanes = _lanes(static)

  def spec(shape, index):
    at = lambda core, step, *_: index(_item(static, core, step))
    return pl.BlockSpec(shape, at)

  return (
    spec((None, None, static.padded, dim), lambda i: (i.row, i.head, i.query_block, 0)),
    spec((None, None, 1, lanes), lambda i: (i.row, i.query_block, 0, 0)),
    spec(
      (None, None, None, 1, lanes), lambda i: (i.row, i.head, i.query_block, 0, 0)
    ),
  )


def _lanes(static: _Static) -> int:
  return static.padded + -static.padded % LANES


@functools.partial(jax.jit, static_argnums=0)
def _call(static: _Static, q, k, v, scalars: _Scalars, position, tree):
  """q [P, K, m·q, H] → out like q, logsumexp [P, K, m, 1, lanes] fp32."""
  dim, lanes = q.shape[3], _lanes(static)
  q_spec, position_spec, lse_spec = _specs(static, dim)
  stack = pl.BlockSpec(memory_space=pl.ANY)
  trees = [] if tree is None else [tree]
  shape = static.rows, static.kv_heads, static.query_blocks, 1, lanes
  pairs = q.size // dim * static.table * static.page
  pages = static.items * static.table * static.page * dim
  lse_bytes = 4 * static.items * lanes
  buffer = 2, static.pages, static.page, dim
  statistic = pltpu.VMEM((lanes, LANES), jnp.float32)
  return pl.pallas_call(
    functools.partial(_kernel, static, bool(trees)),
    out_shape=[
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(scalars),
      grid=(static.cores, pl.cdiv(static.items, static.cores)),
      in_specs=[*[position_spec] * (1 + len(trees)), q_spec, stack, stack],
      out_specs=[q_spec, lse_spec],
      scratch_shapes=[
        pltpu.VMEM(buffer, k.dtype),
        pltpu.VMEM(buffer, v.dtype),
        pltpu.SemaphoreType.DMA((2, 2)),
        pltpu.SMEM((1,), jnp.int32),
        pltpu.VMEM((2, lanes, LANES), jnp.int32),
        statistic,
        statistic,
        pltpu.VMEM((static.padded, dim), jnp.float32),
      ],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      vmem_limit_bytes=block_sizes.get('tpu', 'paged_attention')['vmem_bytes'],
    ),
    # as if tables were full: how much is seen is not known here
    cost_estimate=pl.CostEstimate(
      flops=4 * pairs * dim,
      transcendentals=pairs,
      bytes_accessed=2 * (q.nbytes + pages * k.dtype.itemsize) + lse_bytes,
    ),
    name='paged_attention',
  )(*scalars, position, *trees, q, k, v)


def _rows_together(rows: int, table: int) -> int:
  """Rows of one call, a divisor of `rows`; 0 if one row's table does not fit."""
  fits = (n for n in range(rows, 0, -1) if rows % n == 0 and n * table <= _MOST_ENTRIES)
  return next(fits, 0)


def unsupported_reason(q, cache: Cache, position, subtree_end=None) -> str | None:
  """Why the kernel does not support these tensors; None where it does."""
  del position
  k, v = cache.k, cache.v
  if q.dtype not in _DTYPES or k.dtype not in _DTYPES or k.dtype != v.dtype:
    return (
      f'{q.dtype}, {k.dtype}, {v.dtype}: must be bfloat16 or float32, the same of keys '
      'and values'
    )
  sublanes = 32 // k.dtype.itemsize
  if q.shape[3] % LANES or cache.page_tokens % sublanes:
    return (
      f'pages of {cache.page_tokens} tokens by {q.shape[3]} dims: must be whole tiles '
      f'of {sublanes} by {LANES}'
    )
  table = cache.tables.shape[1]
  if not _rows_together(1, table):
    return f'tables of {table} pages: at most {_MOST_ENTRIES} fit scalar memory'
  if subtree_end is not None and q.shape[1] > _MOST_TREE:
    return f'a tree of {q.shape[1]} tokens: at most {_MOST_TREE}'
  return None


def _static(q, cache: Cache, scale: float) -> _Static:
  sizes = block_sizes.get('tpu', 'paged_attention')
  (P, C, N, _), K = q.shape, cache.k.shape[1]
  table, page = cache.tables.shape[1], cache.page_tokens
  group = N // K
  most = sizes['queries'] // group // _SUBLANES * _SUBLANES
  queries = min(C, max(most * 2 // q.dtype.itemsize, _SUBLANES))
  rows = _rows_together(P, table)
  blocks = -(-C // queries)
  return _Static(
    scale=scale,
    rows=rows,
    kv_heads=K,
    group=group,
    queries=queries,
    query_blocks=blocks,
    page=page,
    pages=max(1, min(table, sizes['tokens'] // page)),
    table=table,
    cores=2 if rows * K * blocks > 1 else 1,
  )


def _blocks(static: _Static, x, fill):
  """[P, C] → [P, m, queries]."""
  pad = static.query_blocks * static.queries - x.shape[1]
  x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=fill)
  return x.reshape(len(x), static.query_blocks, static.queries)


def _per_head(static: _Static, x):
  """[P, m, queries] → [P, m, 1, lanes], each value once per head of the group."""
  x = jnp.repeat(x, static.group, axis=2)
  pad = _lanes(static) - x.shape[2]
  return jnp.pad(x, ((0, 0), (0, 0), (0, pad)), constant_values=-1)[:, :, None]


def attend(q, cache: Cache, position, subtree_end=None, *, scale):
  """Same contract as `reference.attend`.

  Raises:
    ValueError: `unsupported_reason`: dtypes other than bfloat16 and float32, pages that
      are no whole tiles, tables that do not fit scalar memory, or a large tree.
  """
  cache = cache.stacked()
  if reason := unsupported_reason(q, cache, position, subtree_end):
    raise ValueError(f'attend on TPU: {reason}')
  if not q.size:  # a grid must have a step
    return jnp.zeros_like(q), jnp.zeros(q.shape[:3], jnp.float32)
  static = _static(q, cache, scale)
  P, C, N, H = q.shape
  K, G, m = static.kv_heads, static.group, static.query_blocks
  position = _blocks(static, jnp.asarray(position, jnp.int32), -1)
  length = jnp.clip(jnp.max(position, 2) + 1, 0, cache.positions)
  least = jnp.where(position < 0, cache.positions, position + 1)
  unmasked = jnp.minimum(jnp.min(least, 2), length)
  start, tree = position[:, 0, 0], None
  if subtree_end is not None:
    tree = _per_head(static, _blocks(static, ancestors(subtree_end), 0))
    unmasked = jnp.minimum(unmasked, jnp.maximum(start, 0)[:, None])
  # [P, C, N, H] → [P, K, m·q, H]; with one head or one token no copy
  pad = ((0, 0), (0, m * static.queries - C), (0, 0), (0, 0))
  q = jnp.pad(q, pad).reshape(P, m, static.queries, K, G, H)
  q = q.transpose(0, 3, 1, 2, 4, 5).reshape(P, K, m, -1, H)
  pad = ((0, 0),) * 3 + ((0, static.padded - q.shape[3]), (0, 0))
  q = jnp.pad(q, pad).reshape(P, K, -1, H)

  def run(arrays):
    q, tables, length, unmasked, start, position, tree = arrays
    flat = (x.reshape(-1) for x in (tables, length, unmasked, start))
    scalars = _Scalars(cache.layer[None], *flat)
    return _call(static, q, cache.k, cache.v, scalars, position, tree)

  per_row = q, cache.tables, length, unmasked, start, _per_head(static, position), tree
  out, lse = _over_rows(static, P, run, per_row)
  used = static.queries * G
  out = out.reshape(P, K, m, static.padded, H)[:, :, :, :used]
  out = out.reshape(P, K, -1, G, H)[:, :, :C].transpose(0, 2, 1, 3, 4)
  lse = lse.reshape(P, K, m, -1)[..., :used].reshape(P, K, -1, G)[:, :, :C]
  return out.reshape(P, C, N, H), lse.transpose(0, 2, 1, 3).reshape(P, C, N)


def _over_rows(static: _Static, rows: int, function, arrays):
  """function(arrays), of `static.rows` rows at a time."""
  if static.rows == rows:
    return function(arrays)
  split = lambda x: x.reshape(-1, static.rows, *x.shape[1:])
  out = lax.map(function, jax.tree.map(split, arrays))
  return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), out)
