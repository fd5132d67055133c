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
from m2jax.kernels.paged_attention.blocks import MOST_TREE, Blocks, Seen, in_parts
from m2jax.kernels.paged_attention.cache import Cache
from m2jax.kernels.pallas import dot

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_LEAST = 16  # of each side of a product


class _Static(NamedTuple):
  scale: float
  blocks: Blocks  # their rows a power of two
  parts: int  # of a row's pages


class _Refs(NamedTuple):
  """The kernel's refs, in the order in which Pallas passes them."""

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
  bit = lax.shift_right_logical(bits, jnp.clip(at, 0, MOST_TREE - 1)) & 1
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

  none = jnp.full(static.blocks.rows, -jnp.inf, jnp.float32)
  init = none, jnp.zeros_like(none), jnp.zeros((static.blocks.rows, dim), jnp.float32)
  top, total, acc = lax.fori_loop(begin, end, add, init)
  nonempty = total > 0
  divisor = jnp.where(nonempty, total, 1.0)
  refs.lse[...] = jnp.where(nonempty, top + jnp.log(divisor), -jnp.inf)
  refs.out[...] = acc / divisor[:, None]


@functools.partial(jax.jit, static_argnums=0)
def _call(static: _Static, q, cache: Cache, seen: Seen):
  """q [P, K, m, q, H] → per part out like q and logsumexp [P, K, m, q], fp32."""
  (P, K, m, rows, dim), (L, _, pages, page, _) = q.shape, cache.k.shape
  sizes = block_sizes.get('gpu', 'paged_attention_triton')

  def spec(shape, index):
    """`index`: (row, head, block, part) → the block's index."""

    def at(lead, block, part):
      row, head = lax.div(lead, np.int32(K)), lax.rem(lead, np.int32(K))
      return index(row, head, block, part)

    return pl.BlockSpec(shape, at)

  of_query = spec((None, None, rows), lambda p, h, b, s: (p, b, 0))
  trees = [x for x in (seen.position, seen.tree) if x is not None]
  head = spec((L, None, pages, page, dim), lambda p, h, b, s: (0, h, 0, 0, 0))
  arrays = [
    (cache.layer[None], spec((1,), lambda p, h, b, s: (0,))),
    (cache.tables, spec((None, cache.tables.shape[1]), lambda p, h, b, s: (p, 0))),
    (seen.length, spec((None, None), lambda p, h, b, s: (p, b))),
    (seen.start, spec((None,), lambda p, h, b, s: (p,))),
    *((x, of_query) for x in trees),
    (q, spec((None, None, None, rows, dim), lambda p, h, b, s: (p, h, b, 0, 0))),
    (cache.k, head),
    (cache.v, head),
  ]
  shape = static.parts, P, K, m, rows
  out_spec = spec(
    (None, None, None, None, rows, dim), lambda p, h, b, s: (s, p, h, b, 0, 0)
  )
  return pl.pallas_call(
    functools.partial(_kernel, static, len(trees) > 1),
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
  if subtree_end is not None and q.shape[1] > MOST_TREE:
    return f'a tree of {q.shape[1]} tokens: at most {MOST_TREE}'
  return None


def _static(q, cache: Cache, scale: float) -> _Static:
  sizes = block_sizes.get('gpu', 'paged_attention_triton')
  (P, C, N, _), K = q.shape, cache.k.shape[1]
  group = N // K
  queries = min(C, max(1, sizes['queries'] // group))
  rows = max(_LEAST, pl.next_power_of_2(queries * group))
  blocks = Blocks(K, group, C, queries, rows)
  programs = P * K * blocks.number
  parts = max(1, min(sizes['programs'] // programs, cache.tables.shape[1]))
  return _Static(scale, blocks, parts)


def attend(q, cache: Cache, position, subtree_end=None, *, scale):
  """Same contract as `reference.attend`.

  Raises:
    ValueError: `unsupported_reason`: dtypes, pages or heads that the kernel lacks, or a
      large tree.
  """
  cache = cache.stacked()
  if reason := unsupported_reason(q, cache, position, subtree_end):
    raise ValueError(f'attend on GPU: {reason}')
  static = _static(q, cache, scale) if q.size else None
  return in_parts(_call, static, q, cache, position, subtree_end)
