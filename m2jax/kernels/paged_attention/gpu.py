"""Paged attention on GPU: a Pallas Triton kernel that reads pages through their tables.

A program computes a block of a row's queries for one key/value head, over one of
several parts of the row's pages: with few rows to decode the parts occupy the device
(FlashDecoding). It loops over the pages that a query sees with an online softmax. The
parts of a row are added up outside, by their logsumexps.

Triton is what jax 0.10 lowers and interprets on any machine; Pallas has deprecated it
since jax 0.11, in favour of Mosaic GPU.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, G = N/K, H head
dim, n pages of a table; m blocks of a row's queries; in the kernel q rows of a block of
queries (token by token, G heads each), k tokens of a page.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from m2jax.kernels import block_sizes
from m2jax.kernels.pallas import dot
from m2jax.kernels.paged_attention.cache import Cache, ancestors

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_LEAST = 16  # of each side of a product
_MOST_TREE = 32  # tokens of a chunk that is a tree: one bit each


class _Static(NamedTuple):
  scale: float
  kv_heads: int
  group: int
  queries: int  # tokens of a block of queries
  query_blocks: int  # m
  rows: int  # of a block of queries, a power of two
  parts: int  # of a row's pages


class _Refs(NamedTuple):
  """In the order in which Pallas passes them."""

  layer: Any  # [1]
  table: Any  # [n]
  length: Any  # positions that some query of the block sees
  start: Any  # of the chunk
  position: Any  # [q]
  tree: Any  # [q] bits of the tokens that a query sees; None: a chain
  q: Any  # [q, H]
  k: Any  # [L, pages, k, H]
  v: Any
  out: Any  # like q, fp32
  lse: Any  # [q] fp32


def _seen(refs: _Refs, first, page):
  """[q, k] bool: which of the positions from `first` on the queries see."""
  key = first + lax.iota(jnp.int32, page)[None]
  seen = key <= refs.position[...][:, None]
  if refs.tree is None:
    return seen
  at = key - refs.start[...]
  bits = jnp.broadcast_to(refs.tree[...][:, None], seen.shape)
  at = jnp.broadcast_to(at, seen.shape)
  bit = lax.shift_right_logical(bits, jnp.clip(at, 0, _MOST_TREE - 1)) & 1
  return seen & ((at < 0) | (bit == 1))


def _kernel(static: _Static, tree: bool, *refs):
  """Grid: rows x key/value heads, blocks of queries, parts."""
  refs = list(refs)
  if not tree:
    refs.insert(5, None)
  refs = _Refs(*refs)
  layer, length, q = refs.layer[0], refs.length[...], refs.q[...]
  page, dim = refs.k.shape[2:]
  pages = lax.div(length + np.int32(page - 1), np.int32(page))
  per = lax.div(pages + np.int32(static.parts - 1), np.int32(static.parts))
  begin = jnp.minimum(pl.program_id(2) * per, pages)
  end = jnp.minimum(begin + per, pages)

  def add(i, carry):
    top, total, acc = carry
    at, first = refs.table[i], i * np.int32(page)
    keys = refs.k[layer, at].astype(q.dtype)
    values = refs.v[layer, at]
    stored = first + lax.iota(jnp.int32, page)[:, None] < length
    values = jnp.where(stored, values, 0).astype(q.dtype)
    scores = dot(q, keys, 1, 1) * static.scale
    scores = jnp.where(_seen(refs, first, page), scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    weights = jnp.exp(scores - safe[:, None])
    keep = jnp.exp(top - safe)
    update = dot(weights.astype(q.dtype), values, 1, 0)
    total = total * keep + jnp.sum(weights, axis=1)
    return new_top, total, acc * keep[:, None] + update

  none = jnp.full(static.rows, -jnp.inf, jnp.float32)
  init = none, jnp.zeros_like(none), jnp.zeros((static.rows, dim), jnp.float32)
  top, total, acc = lax.fori_loop(begin, end, add, init)
  some = total > 0
  divisor = jnp.where(some, total, 1.0)
  refs.lse[...] = jnp.where(some, top + jnp.log(divisor), -jnp.inf)
  refs.out[...] = acc / divisor[:, None]


@functools.partial(jax.jit, static_argnums=0)
def _call(static: _Static, q, cache: Cache, length, start, position, tree):
  """q [P, K, m, q, H] → per part out like q and logsumexp [P, K, m, q], fp32."""
  (P, K, m, rows, dim), (L, _, pages, page, _) = q.shape, cache.k.shape
  sizes = block_sizes.get('gpu', 'paged_attention')

  def spec(shape, index):
    """`index`: (row, head, block, part) → the block's index."""

    def at(lead, block, part):
      row, head = lax.div(lead, np.int32(K)), lax.rem(lead, np.int32(K))
      return index(row, head, block, part)

    return pl.BlockSpec(shape, at)

  of_query = spec((None, None, rows), lambda p, h, b, s: (p, b, 0))
  head = spec((L, None, pages, page, dim), lambda p, h, b, s: (0, h, 0, 0, 0))
  arrays = [
    (cache.layer[None], spec((1,), lambda p, h, b, s: (0,))),
    (cache.tables, spec((None, cache.tables.shape[1]), lambda p, h, b, s: (p, 0))),
    (length, spec((None, None), lambda p, h, b, s: (p, b))),
    (start, spec((None,), lambda p, h, b, s: (p,))),
    (position, of_query),
    *([] if tree is None else [(tree, of_query)]),
    (q, spec((None, None, None, rows, dim), lambda p, h, b, s: (p, h, b, 0, 0))),
    (cache.k, head),
    (cache.v, head),
  ]
  shape = static.parts, P, K, m, rows
  out_spec = spec(
    (None, None, None, None, rows, dim), lambda p, h, b, s: (s, p, h, b, 0, 0)
  )
  return pl.pallas_call(
    functools.partial(_kernel, static, tree is not None),
    grid=(P * K, m, static.parts),
    in_specs=[spec for _, spec in arrays],
    out_specs=[
      out_spec,
      spec((None, None, None, None, rows), lambda p, h, b, s: (s, p, h, b, 0)),
    ],
    out_shape=[
      jax.ShapeDtypeStruct((*shape, dim), jnp.float32),
      jax.ShapeDtypeStruct(shape, jnp.float32),
    ],
    compiler_params=plgpu.CompilerParams(
      num_warps=sizes['warps'], num_stages=sizes['stages']
    ),
    name='paged_attention',
  )(*(x for x, _ in arrays))


def unsupported_reason(q, cache: Cache, position, subtree_end=None) -> str | None:
  """Why the kernel does not support these tensors; None where it does."""
  del position
  k, v = cache.k, cache.v
  if q.dtype not in _DTYPES or k.dtype not in _DTYPES or k.dtype != v.dtype:
    return (
      f'{q.dtype}, {k.dtype}, {v.dtype}: must be 16-bit or 32-bit floats, the same of '
      'keys and values'
    )
  page, dim = cache.page_tokens, q.shape[3]
  for what, n, most in (('page', page, 256), ('head dim', dim, 256)):
    if n < _LEAST or n > most or n & (n - 1):
      return f'{what} {n}: must be a power of two, {_LEAST} to {most}'
  if subtree_end is not None and q.shape[1] > _MOST_TREE:
    return f'a tree of {q.shape[1]} tokens: at most {_MOST_TREE}'
  return None


def _static(q, cache: Cache, scale: float) -> _Static:
  sizes = block_sizes.get('gpu', 'paged_attention')
  (P, C, N, _), K = q.shape, cache.k.shape[1]
  group = N // K
  queries = min(C, max(1, sizes['queries'] // group))
  blocks = -(-C // queries)
  programs = P * K * blocks
  parts = max(1, min(sizes['programs'] // programs, cache.tables.shape[1]))
  rows = max(_LEAST, pl.next_power_of_2(queries * group))
  return _Static(scale, K, group, queries, blocks, rows, parts)


def _blocks(static: _Static, x, fill):
  """[P, C] → [P, m, queries]."""
  pad = static.query_blocks * static.queries - x.shape[1]
  x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=fill)
  return x.reshape(len(x), static.query_blocks, static.queries)


def _per_head(static: _Static, x):
  """[P, m, queries] → [P, m, q], each value once per head of the group."""
  x = jnp.repeat(x, static.group, axis=2)
  pad = ((0, 0), (0, 0), (0, static.rows - x.shape[2]))
  return jnp.pad(x, pad, constant_values=-1)


def attend(q, cache: Cache, position, subtree_end=None, *, scale):
  """Same contract as `reference.attend`.

  Raises:
    ValueError: `unsupported_reason`: dtypes, pages or heads that the kernel lacks, or a
      large tree.
  """
  cache = cache.stacked()
  if reason := unsupported_reason(q, cache, position, subtree_end):
    raise ValueError(f'attend on GPU: {reason}')
  static = _static(q, cache, scale)
  (P, C, N, H), K, G, m = q.shape, static.kv_heads, static.group, static.query_blocks
  position = _blocks(static, jnp.asarray(position, jnp.int32), -1)
  length = jnp.clip(jnp.max(position, 2) + 1, 0, cache.positions)
  tree = None
  if subtree_end is not None:
    tree = _per_head(static, _blocks(static, ancestors(subtree_end), 0))
  pad = ((0, 0), (0, m * static.queries - C), (0, 0), (0, 0))
  blocks = jnp.pad(q, pad).reshape(P, m, static.queries, K, G, H)
  blocks = blocks.transpose(0, 3, 1, 2, 4, 5).reshape(P, K, m, -1, H)
  pad = ((0, 0),) * 3 + ((0, static.rows - blocks.shape[3]), (0, 0))
  blocks = jnp.pad(blocks, pad)
  start = position[:, 0, 0]
  parts = _call(static, blocks, cache, length, start, _per_head(static, position), tree)
  out, lse = _total(*parts)
  used = static.queries * G
  out = out[:, :, :, :used].reshape(P, K, -1, G, H)[:, :, :C].transpose(0, 2, 1, 3, 4)
  lse = lse[:, :, :, :used].reshape(P, K, -1, G)[:, :, :C].transpose(0, 2, 1, 3)
  return out.reshape(P, C, N, H).astype(q.dtype), lse.reshape(P, C, N)


def _total(out, lse):
  """The softmax over all parts, by each part's own [parts, …] and its logsumexp."""
  top = jnp.max(lse, axis=0)
  safe = jnp.where(top == -jnp.inf, 0, top)
  weights = jnp.exp(lse - safe)
  total = jnp.sum(weights, axis=0)
  some = total > 0
  divisor = jnp.where(some, total, 1)
  out = jnp.sum(out * (weights / divisor)[..., None], axis=0)
  return out, jnp.where(some, safe + jnp.log(divisor), jnp.inf)
