"""Forest attention on TPU: Pallas Mosaic kernels that skip blocks that are not seen.

Queries and keys are divided into blocks. The extremes of `q_index` and `subtree_end` in
a block decide whether the tokens of a block pair see none, all or part of each other.
Visible pairs are listed in a table, one int32 each, prefetched to scalar memory; the
grid is as long as the list, so an invisible pair costs neither a grid step nor a copy
of keys and values. Full pairs are not masked. Two cores of a chip share the heads;
where the number of heads is odd, as on one of eight tensor-parallel devices, each core
has half of the list.

The rest is FlashAttention (arXiv:2205.14135, 2307.08691): an online softmax forward;
backward one kernel for d_q over pairs by query block, and one for d_k and d_v over
pairs by key block, both of which recompute the weights. Tensors are [B·S, heads·H]: the
copy of a block selects the columns of one key/value head and its queries, and nothing
is transposed in HBM.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
m, n blocks of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m2jax.kernels import block_sizes, pallas
from m2jax.kernels.pallas import Blocked, blocked
from m2jax.kernels.tree_attention import tpu_kernels
from m2jax.kernels.tree_attention.block_pairs import (
  ID_BITS,
  BlockPairs,
  block_kinds,
  block_of,
  block_pairs,
  partner_of,
)
from m2jax.kernels.tree_attention.tpu_kernels import LANES, Static
from m2jax.kernels.tree_attention.visibility import Visibility

_DTYPES = (jnp.bfloat16, jnp.float32)
_MOST_PAIRS = 160 * 1024  # in one table: 640 KiB of scalar memory


class _Pairs(NamedTuple):
  """Block pairs, by query block and by key block."""

  by_query: BlockPairs
  by_key: BlockPairs


class _Specs(NamedTuple):
  """Blocks of one pair and one key/value head."""

  q: pl.BlockSpec  # of [rows · Q, K·G·H]
  k: pl.BlockSpec  # of [rows · S, K·H]
  statistic: pl.BlockSpec  # of [K, G, rows · Q]
  index: Visibility


def _specs(static: Static, index: Visibility, by_query: bool) -> _Specs:
  q_id, k_id = (block_of, partner_of) if by_query else (partner_of, block_of)
  q, k = static.block_q, static.block_k

  def spec(shape, index):
    """`index`: (head, entry of the table) → the block's index."""

    def at(lead, step, table, parts):
      pair = table[pallas.entry(parts, lead, step).at]
      return index(pallas.block_of(parts, lead), pair)

    return pl.BlockSpec(shape, at)

  q_row = spec((1, q), lambda h, pair: (0, q_id(pair)))
  k_row = spec((1, k), lambda h, pair: (0, k_id(pair)))
  return _Specs(
    spec((q, static.group * static.dim), lambda h, pair: (q_id(pair), h)),
    spec((k, static.dim), lambda h, pair: (k_id(pair), h)),
    spec((None, static.group, q), lambda h, pair: (h, 0, q_id(pair))),
    index.map(lambda *_: q_row, lambda *_: k_row),
  )


def _call(
  kernel: Callable,
  static: Static,
  pairs: BlockPairs,
  inputs: list[Blocked],
  outs: list[Blocked],
  scratch: list[tuple[int, ...]],
  products: int,
):
  """One kernel over K heads x parts, block pairs; `products` matmuls for each.

  A chip of two cores divides the first axis between them.
  """
  arrays, out_shape = [x.array for x in inputs], [x.array for x in outs]
  scores = static.kv_heads * static.group * pairs.table.size
  scores *= static.block_q * static.block_k
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, out_shape)))
  return pl.pallas_call(
    functools.partial(kernel, static),
    out_shape=out_shape,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(pairs),
      grid=(static.kv_heads * (len(pairs.parts) - 1), pairs.steps),
      in_specs=[x.spec for x in inputs],
      out_specs=[x.spec for x in outs],
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    # as if causal: how much is seen is not known here
    cost_estimate=pl.CostEstimate(
      flops=products * scores * static.dim,
      transcendentals=scores // 2,
      bytes_accessed=size,
    ),
    name=f'tree_attention_{kernel.__name__.removesuffix("_kernel")}',
  )(*pairs, *arrays)


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


# jit: kernels are traced once for all layers of a shape, also where another platform's
# implementation is then lowered
@functools.partial(jax.jit, static_argnums=0)
def _forward(static, q, k, v, index, pairs: _Pairs):
  """q [rows·Q, N·H], k, v [rows·S, K·H] → out like q, logsumexp [K, G, rows·Q] fp32."""
  by = _specs(static, index, by_query=True)
  group, dim, block = static.group, static.dim, static.block_q
  lse = jax.ShapeDtypeStruct((static.kv_heads, group, len(q)), jnp.float32)
  return _call(
    tpu_kernels.forward_kernel,
    static,
    pairs.by_query,
    blocked((index, q, k, v), (by.index, by.q, by.k, by.k)),
    blocked((_like(q), lse), (by.q, by.statistic)),
    [(group, block), (group, block), (group, dim, block)],
    products=2,
  )


@functools.partial(jax.jit, static_argnums=0)
def _backward(static, residuals, d_out):
  """Cotangents of q, k and v."""
  q, k, v, index, pairs, out, lse = residuals

  by = _specs(static, index, by_query=True)
  d_q, delta = _call(
    tpu_kernels.d_q_kernel,
    static,
    pairs.by_query,
    blocked(
      (index, q, k, v, out, d_out, lse),
      (by.index, by.q, by.k, by.k, by.q, by.q, by.statistic),
    ),
    blocked((_like(q), _like(lse)), (by.q, by.statistic)),
    [(static.group, static.dim, static.block_q)],
    products=3,
  )
  by = _specs(static, index, by_query=False)
  d_k, d_v = _call(
    tpu_kernels.d_kv_kernel,
    static,
    pairs.by_key,
    blocked(
      (index, q, k, v, d_out, lse, delta),
      (by.index, by.q, by.k, by.k, by.q, by.statistic, by.statistic),
    ),
    blocked((_like(k), _like(v)), (by.k, by.k)),
    [(static.block_k, static.dim)] * 2,
    products=4,
  )
  return d_q, d_k, d_v


def _most_tokens(q, k):
  """Most tokens of a query block, smaller for fp32 and large groups, and key block."""
  sizes = block_sizes.get('tpu', 'tree_attention')
  group = q.shape[2] // k.shape[2]
  most_q = sizes['group_tokens'] * 2 // q.dtype.itemsize // group // LANES * LANES
  return min(sizes['tokens'], max(most_q, LANES)), sizes['tokens']


def _block_sizes(q, k):
  queries, keys = q.shape[1], k.shape[1]
  most_q, most_k = _most_tokens(q, k)
  return min(most_q, queries + -queries % LANES), min(most_k, keys + -keys % LANES)


def _rows_together(rows, query_blocks, key_blocks):
  """The rows that share a table of block pairs, a divisor of `rows`; 0 if none fits."""
  for together in range(rows, 0, -1):
    fits = together * query_blocks * key_blocks <= _MOST_PAIRS
    fits &= together * max(query_blocks, key_blocks) <= 2**ID_BITS
    if fits and rows % together == 0:
      return together
  return 0


def unsupported_reason(q, k, v) -> str | None:
  """Why the kernel does not support these tensors; None where it does."""
  if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _DTYPES:
    return f'{q.dtype}, {k.dtype}, {v.dtype}: must all be bfloat16 or all float32'
  block_q, block_k = _block_sizes(q, k)
  blocks = -(-q.shape[1] // block_q), -(-k.shape[1] // block_k)
  if not _rows_together(1, *blocks):
    return (
      f'{blocks[0]} blocks of queries by {blocks[1]} of keys are more pairs than the '
      f'{_MOST_PAIRS} that fit scalar memory; attend with fewer queries at a time '
      '(q_index)'
    )
  return None


def _flat(x, block, rows, fill=0):
  """[B, S, …] → [B / rows, rows · padded length, …]."""
  pad = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, pad, constant_values=fill)
  return x.reshape(x.shape[0] // rows, -1, *x.shape[2:])


def _static(q, k, scale: float) -> Static:
  block_q, block_k = _block_sizes(q, k)
  query_blocks, key_blocks = -(-q.shape[1] // block_q), -(-k.shape[1] // block_k)
  return Static(
    scale=scale,
    rows=_rows_together(len(q), query_blocks, key_blocks),
    kv_heads=k.shape[2],
    group=q.shape[2] // k.shape[2],
    dim=q.shape[3] + -q.shape[3] % LANES,
    block_q=block_q,
    block_k=block_k,
    key_blocks=key_blocks,
  )


def _index(static: Static, visibility: Visibility) -> Visibility:
  """Integers [B / rows, 1, rows · padded length]."""

  def integers(block):
    def flat(x, padding):
      return _flat(x.astype(jnp.int32), block, static.rows, padding)[:, None]

    return flat

  return visibility.map(integers(static.block_q), integers(static.block_k))


def _over_rows(static: Static, rows: int, function: Callable, arrays):
  """function(one table's share of each array), results with a leading [B / rows]."""
  if static.rows == rows:
    out = function(jax.tree.map(lambda x: x[0], arrays))
    return jax.tree.map(lambda x: x[None], out)
  return lax.map(function, arrays)


def prepare(visibility: Visibility, q, k) -> _Pairs:
  """The block pairs of q and k, of which only shapes and dtypes are used."""
  static = _static(q, k, scale=1.0)

  def make(index):
    kinds = block_kinds(static, index)
    split = static.kv_heads % 2 == 1  # cores cannot share the heads equally
    by_key = block_pairs(kinds.swapaxes(1, 2), split)
    return _Pairs(block_pairs(kinds, split), by_key)

  return _over_rows(static, len(q), make, _index(static, visibility))


def forward(q, k, v, visibility: Visibility, *, scale):
  """Same contract as `reference.forward`.

  Raises:
    ValueError: `unsupported_reason`: tensors that are not all bfloat16 or all float32,
      or more blocks in a row than fit scalar memory (past 207,000 queries by 207,000
      keys).
  """
  if reason := unsupported_reason(q, k, v):
    raise ValueError(f'attend on TPU: {reason}')
  static = _static(q, k, scale)
  out, lse = _over_rows(
    static,
    len(q),
    lambda arrays: _forward(static, *arrays),
    _arrays(static, q, k, v, visibility),
  )
  # [B / rows, K, G, rows · padded Q] → [B, N, Q]
  lse = lse.reshape(*lse.shape[:3], static.rows, -1)
  lse = jnp.moveaxis(lse, 3, 1).reshape(len(q), q.shape[2], -1)
  return _unflat(out, q), lse[:, :, : q.shape[1]]


def backward(q, k, v, visibility: Visibility, out, lse, d_out, *, scale):
  """Same contract as `reference.backward`."""
  static = _static(q, k, scale)
  # as `forward` leaves it where a query saw nothing
  pad = (0, 0), (0, 0), (0, -lse.shape[2] % static.block_q)
  lse = jnp.pad(lse, pad, constant_values=jnp.inf)
  lse = lse.reshape(-1, static.rows, static.kv_heads, static.group, lse.shape[2])
  lse = jnp.moveaxis(lse, 1, 3).reshape(len(lse), static.kv_heads, static.group, -1)
  arrays = _arrays(static, q, k, v, visibility)
  out, d_out = (_tensor(static, x, static.block_q) for x in (out, d_out))
  cotangents = _over_rows(
    static,
    len(q),
    lambda arrays: _backward(static, *arrays),
    ((*arrays, out, lse), d_out),
  )
  return tuple(_unflat(d, x) for d, x in zip(cotangents, (q, k, v), strict=True))


def _tensor(static: Static, x, block):
  """[B, S, heads, H] → [B / rows, rows · padded S, heads · padded H]."""
  x = jnp.pad(x, ((0, 0),) * 3 + ((0, static.dim - x.shape[3]),))
  return _flat(x.reshape(*x.shape[:2], -1), block, static.rows)


def _unflat(x, like):
  """The inverse of `_tensor`, in the shape of `like`."""
  batch, length, heads, dim = like.shape
  x = x.reshape(batch, -1, heads, x.shape[2] // heads)
  return x[:, :length, :, :dim]


def _arrays(static: Static, q, k, v, visibility: Visibility):
  """What the kernels take, with a leading [B / rows]."""
  pairs = visibility.pairs
  return (
    _tensor(static, q, static.block_q),
    _tensor(static, k, static.block_k),
    _tensor(static, v, static.block_k),
    _index(static, visibility),
    prepare(visibility, q, k) if pairs is None else pairs,
  )
