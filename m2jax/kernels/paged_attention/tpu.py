"""Paged attention on TPU: a Pallas Mosaic kernel that copies pages by their tables.

An item of work is a block of a row's queries and one key/value head. For each the
kernel runs over blocks of the row's pages with an online softmax (FlashAttention,
arXiv:2205.14135): tables and lengths, prefetched to scalar memory, determine which
pages it copies from HBM: none beyond the last position that a query sees. While it
computes a block it copies the next one, at the end of an item the first one of the next
item. Blocks that all queries see completely are not masked. The cache stays in HBM,
with all its layers.

The two cores of a chip take items alternately, so that with a causal chunk both have
the same amount of work.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, G = N/K, H head
dim, n pages of a table; m blocks of a row's queries; in the kernel q rows of a block of
queries (token by token, G heads each), k positions of a block of pages.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m2jax.kernels import block_sizes
from m2jax.kernels.paged_attention import blocks as blocks_lib
from m2jax.kernels.paged_attention.blocks import MOST_TREE, Blocks
from m2jax.kernels.paged_attention.cache import Cache
from m2jax.kernels.paged_attention.tpu_kernel import (
  LANES,
  Scalars,
  Static,
  item_of,
  kernel,
)

_SUBLANES = 16  # of a tile of bf16; fp32 has 8
_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_ENTRIES = 160 * 1024  # of a table: 640 KiB of scalar memory


def _specs(static: Static, dim: int):
  """Specs of q, of position [P, m, 1, lanes] and of lse [P, K, m, 1, lanes]."""

  def spec(shape, index):
    at = lambda core, step, *_: index(item_of(static, core, step))
    return pl.BlockSpec(shape, at)

  row = 1, static.lanes
  return (
    spec((None, None, None, static.blocks.rows, dim), lambda i: (*i, 0, 0)),
    spec((None, None, *row), lambda i: (i.row, i.query_block, 0, 0)),
    spec((None, None, None, *row), lambda i: (*i, 0, 0)),
  )


@functools.partial(jax.jit, static_argnums=0)
def _call(static: Static, q, k, v, scalars: Scalars, position, tree):
  """q [P, K, m, q, H] → out like q, logsumexp [P, K, m, 1, lanes] fp32."""
  dim, lanes = q.shape[4], static.lanes
  q_spec, position_spec, lse_spec = _specs(static, dim)
  stack = pl.BlockSpec(memory_space=pl.ANY)
  trees = [] if tree is None else [tree]
  pairs = q.size // dim * static.table * static.page
  pages = static.items * static.table * static.page * dim
  lse_bytes = 4 * static.items * lanes
  buffer = 2, static.pages, static.page, dim
  statistic = pltpu.VMEM((lanes, LANES), jnp.float32)
  return pl.pallas_call(
    functools.partial(kernel, static, bool(trees)),
    out_shape=[
      jax.ShapeDtypeStruct(q.shape, q.dtype),
      jax.ShapeDtypeStruct((*q.shape[:3], 1, lanes), jnp.float32),
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
        pltpu.VMEM((static.blocks.rows, dim), jnp.float32),
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
  if subtree_end is not None and q.shape[1] > MOST_TREE:
    return f'a tree of {q.shape[1]} tokens: at most {MOST_TREE}'
  return None


def _static(q, cache: Cache, scale: float) -> Static:
  sizes = block_sizes.get('tpu', 'paged_attention')
  (P, C, N, _), K = q.shape, cache.k.shape[1]
  table, page = cache.tables.shape[1], cache.page_tokens
  group = N // K
  most = sizes['queries'] // group // _SUBLANES * _SUBLANES
  queries = min(C, max(most * 2 // q.dtype.itemsize, _SUBLANES))
  rows, padded = _rows_together(P, table), queries * group
  blocks = Blocks(K, group, C, queries, padded + -padded % _SUBLANES)
  return Static(
    scale=scale,
    rows=rows,
    blocks=blocks,
    page=page,
    pages=max(1, min(table, sizes['tokens'] // page)),
    table=table,
    cores=2 if rows * K * blocks.number > 1 else 1,
  )


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
  blocks = static.blocks
  seen = blocks_lib.seen(blocks, cache, position, subtree_end)

  def row(x):  # [P, m, q] → [P, m, 1, lanes]
    pad = ((0, 0), (0, 0), (0, static.lanes - blocks.rows))
    return jnp.pad(x, pad, constant_values=-1)[:, :, None]

  def run(arrays):
    q, tables, seen = arrays
    flat = (x.reshape(-1) for x in (tables, seen.length, seen.unmasked, seen.start))
    scalars = Scalars(cache.layer[None], *flat)
    return _call(static, q, cache.k, cache.v, scalars, seen.position, seen.tree)

  seen = seen._replace(
    position=row(seen.position), tree=None if seen.tree is None else row(seen.tree)
  )
  out, lse = _over_rows(static, len(q), run, (blocks.of(q), cache.tables, seen))
  return blocks.undo(out), blocks.undo(lse[..., 0, :])


def _over_rows(static: Static, rows: int, function, arrays):
  """function(arrays), of `static.rows` rows at a time."""
  if static.rows == rows:
    return function(arrays)
  split = lambda x: x.reshape(-1, static.rows, *x.shape[1:])
  out = lax.map(function, jax.tree.map(split, arrays))
  return jax.tree.map(lambda x: x.reshape(rows, *x.shape[2:]), out)
