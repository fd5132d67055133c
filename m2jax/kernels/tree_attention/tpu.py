"""Forest attention on TPU: Pallas Mosaic kernels that visit only blocks that are seen.

Queries and keys are cut into blocks. The extremes of `q_index` and `subtree_end` in a
block decide what a pair of blocks is: no pair of tokens seen, all of them, or some. The
pairs that are seen are listed in a table of one int32 each, which is prefetched to
scalar memory; the grid is as long as the list, so that neither a step nor a copy of
keys and values is spent on a pair that nobody sees. Where all tokens of a pair are seen
no mask is computed.

The rest is FlashAttention (arXiv:2205.14135, 2307.08691): an online softmax forward;
backward one kernel for d_q that visits by query block, and one for d_k and d_v that
visits by key block, both of which recompute the weights. Scores are kept transposed,
[keys, queries]: statistics of a query are then rows, which broadcast over sublanes and
lie in HBM without padding. Tensors are [B·S, heads·H]: the copy of a block cuts out the
columns of one key/value head and its queries, and nothing is transposed in HBM.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
m, n blocks of a row; in kernels k, q tokens of a key and of a query block.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from m2jax.kernels import block_sizes, pallas
from m2jax.kernels.tree_attention.visibility import Visibility
from m2jax.kernels.tree_attention.visits import (
  ID_BITS,
  MASKED,
  WHOLE,
  block_kinds,
  block_of,
  partner_of,
  visits,
)

_LANES = 128
_DTYPES = (jnp.bfloat16, jnp.float32)
_TABLE = 160 * 1024  # visits in one table, at most: 640 KiB of scalar memory


class _Static(NamedTuple):
  scale: float
  rows: int
  kv_heads: int
  group: int
  dim: int
  block_q: int
  block_k: int
  key_blocks: int  # of a row


def _each_visit(table, init, mask, visit, finish):
  """Runs this step's visit, `init` before a block's first, `finish` after its last."""
  step, last_step = pl.program_id(1), pl.num_programs(1) - 1
  entry = table[step]
  before = table[jnp.maximum(step - 1, 0)]
  after = table[jnp.minimum(step + 1, last_step)]
  pl.when((step == 0) | (block_of(before) != block_of(entry)))(init)
  pl.when(entry & 3 == WHOLE)(lambda: visit(None))
  pl.when(entry & 3 == MASKED)(lambda: visit(mask()))
  pl.when((step == last_step) | (block_of(after) != block_of(entry)))(finish)


def _column(row):
  """[1, k] int32 → [k, 1]."""
  return jnp.broadcast_to(row, (_LANES, row.shape[1])).T[:, :1]


def _seen(static: _Static, k_id, index: Visibility):
  """[k, q] bool: which keys the queries see. `index` holds refs of one block each."""
  key = lax.rem(k_id, np.int32(static.key_blocks)) * static.block_k
  key += lax.broadcasted_iota(jnp.int32, (static.block_k, static.block_q), 0)
  q = index.q_index[...]
  seen = (key <= q) & (q < _column(index.subtree_end[...]))
  if index.window is not None:
    k_at = _column(index.k_position[...])
    near = index.q_position[...] - k_at < index.window
    seen &= near | (k_at < index.sinks)
  return seen


def _scores(static: _Static, q, k, seen):
  """[k, q] fp32, -inf where not seen."""
  scores = pallas.dot(k, q, 1, 1) * static.scale
  return scores if seen is None else jnp.where(seen, scores, -jnp.inf)


def _forward_kernel(static, table, index, q, k, v, out, lse, top, total, acc):
  """Visits by query block. top, total [G, q], acc [G, H, q] live through its visits."""

  def init():
    top[...] = jnp.full_like(top, -jnp.inf)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  def visit(seen):
    for g in range(static.group):
      row, columns = pl.ds(g, 1), pl.ds(g * static.dim, static.dim)
      scores = _scores(static, q[:, columns], k[...], seen)
      old_top = top[row]
      new_top = jnp.maximum(old_top, jnp.max(scores, axis=0, keepdims=True))
      safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
      weights = jnp.exp(scores - safe)
      keep = jnp.exp(old_top - safe)
      total[row] = total[row] * keep + jnp.sum(weights, axis=0, keepdims=True)
      acc[g] = acc[g] * keep + pallas.dot(v[...], weights.astype(v.dtype), 0, 0)
      top[row] = new_top

  def finish():
    # +inf where a query saw nothing: its weights recompute to exactly 0
    some = total[...] > 0
    divisor = jnp.where(some, total[...], 1.0)
    lse[...] = jnp.where(some, top[...] + jnp.log(divisor), jnp.inf)
    for g in range(static.group):
      columns = pl.ds(g * static.dim, static.dim)
      out[:, columns] = (acc[g] / divisor[g : g + 1]).T.astype(out.dtype)

  k_id = partner_of(table[pl.program_id(1)])
  _each_visit(table, init, lambda: _seen(static, k_id, index), visit, finish)


def _d_scores(static, q, k, v, d_out, lse, delta, seen):
  """Weights and cotangents of the scores before scaling, [k, q] fp32."""
  weights = jnp.exp(_scores(static, q, k, seen) - lse)
  return weights, weights * (pallas.dot(v, d_out, 1, 1) - delta)


def _d_q_kernel(static, table, index, q, k, v, out, d_out, lse, d_q, delta, acc):
  """Visits by query block. delta [G, q] is Σ_h out · d_out, which d_k needs as well."""

  def init():
    for g in range(static.group):
      columns = pl.ds(g * static.dim, static.dim)
      o, d_o = (x[:, columns].astype(jnp.float32) for x in (out, d_out))
      delta[pl.ds(g, 1)] = jnp.sum((o * d_o).T, axis=0, keepdims=True)
    acc[...] = jnp.zeros_like(acc)

  def visit(seen):
    for g in range(static.group):
      row, columns = pl.ds(g, 1), pl.ds(g * static.dim, static.dim)
      heads = q[:, columns], k[...], v[...], d_out[:, columns]
      _, d_scores = _d_scores(static, *heads, lse[row], delta[row], seen)
      acc[g] += pallas.dot(k[...], d_scores.astype(k.dtype), 0, 0)

  def finish():
    for g in range(static.group):
      columns = pl.ds(g * static.dim, static.dim)
      d_q[:, columns] = (acc[g] * static.scale).T.astype(d_q.dtype)

  k_id = partner_of(table[pl.program_id(1)])
  _each_visit(table, init, lambda: _seen(static, k_id, index), visit, finish)


def _d_kv_kernel(static, table, index, q, k, v, d_out, lse, delta, d_k, d_v, *accs):
  """Visits by key block."""
  d_k_acc, d_v_acc = accs

  def init():
    d_k_acc[...] = jnp.zeros_like(d_k_acc)
    d_v_acc[...] = jnp.zeros_like(d_v_acc)

  def visit(seen):
    for g in range(static.group):
      row, columns = pl.ds(g, 1), pl.ds(g * static.dim, static.dim)
      heads = q[:, columns], k[...], v[...], d_out[:, columns]
      weights, d_scores = _d_scores(static, *heads, lse[row], delta[row], seen)
      d_v_acc[...] += pallas.dot(weights.astype(q.dtype), d_out[:, columns], 1, 0)
      d_k_acc[...] += pallas.dot(d_scores.astype(q.dtype), q[:, columns], 1, 0)

  def finish():
    d_k[...] = (d_k_acc[...] * static.scale).astype(d_k.dtype)
    d_v[...] = d_v_acc[...].astype(d_v.dtype)

  k_id = block_of(table[pl.program_id(1)])
  _each_visit(table, init, lambda: _seen(static, k_id, index), visit, finish)


class _Specs(NamedTuple):
  """Blocks of one visit and one key/value head."""

  q: pl.BlockSpec  # of [rows · Q, K·G·H]
  k: pl.BlockSpec  # of [rows · S, K·H]
  statistic: pl.BlockSpec  # of [K, G, rows · Q]
  index: Visibility


def _specs(static: _Static, index: Visibility, by_query: bool) -> _Specs:
  q_id, k_id = (block_of, partner_of) if by_query else (partner_of, block_of)
  q, k = static.block_q, static.block_k
  q_row = pl.BlockSpec((1, q), lambda h, t, table: (0, q_id(table[t])))
  k_row = pl.BlockSpec((1, k), lambda h, t, table: (0, k_id(table[t])))
  return _Specs(
    pl.BlockSpec((q, static.group * static.dim), lambda h, t, m: (q_id(m[t]), h)),
    pl.BlockSpec((k, static.dim), lambda h, t, table: (k_id(table[t]), h)),
    pl.BlockSpec((None, static.group, q), lambda h, t, table: (h, 0, q_id(table[t]))),
    index.map(lambda *_: q_row, lambda *_: k_row),
  )


def _call(kernel, static, kinds, in_specs, inputs, out_specs, outs, scratch, dots):
  """One kernel over K heads x the visits that `kinds` lists."""
  table, count = visits(kinds)
  pairs = static.kv_heads * static.group * kinds.size * static.block_q * static.block_k
  size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((inputs, outs)))
  return pl.pallas_call(
    functools.partial(kernel, static),
    out_shape=outs,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(static.kv_heads, count),
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary')),
    # as if causal: how much is seen is not known here
    cost_estimate=pl.CostEstimate(
      flops=dots * pairs * static.dim, transcendentals=pairs // 2, bytes_accessed=size
    ),
    name=f'tree_attention{kernel.__name__[:-7]}',
  )(table, *inputs)


def _like(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


# jit: kernels are traced once for all layers of a shape, also where another platform's
# implementation is then lowered
@functools.partial(jax.jit, static_argnums=0)
def _forward(static, q, k, v, index):
  """q [rows·Q, N·H], k, v [rows·S, K·H] → out like q, logsumexp [K, G, rows·Q] fp32."""
  by = _specs(static, index, by_query=True)
  group, dim, block = static.group, static.dim, static.block_q
  lse = jax.ShapeDtypeStruct((static.kv_heads, group, len(q)), jnp.float32)
  return _call(
    _forward_kernel,
    static,
    block_kinds(static, index),
    [by.index, by.q, by.k, by.k],
    [index, q, k, v],
    [by.q, by.statistic],
    [_like(q), lse],
    [(group, block), (group, block), (group, dim, block)],
    dots=2,
  )


@functools.partial(jax.jit, static_argnums=0)
def _backward(static, q, k, v, index, out, lse, d_out):
  """Cotangents of q, k and v."""
  by = _specs(static, index, by_query=True)
  kinds = block_kinds(static, index)
  d_q, delta = _call(
    _d_q_kernel,
    static,
    kinds,
    [by.index, by.q, by.k, by.k, by.q, by.q, by.statistic],
    [index, q, k, v, out, d_out, lse],
    [by.q, by.statistic],
    [_like(q), _like(lse)],
    [(static.group, static.dim, static.block_q)],
    dots=3,
  )
  by = _specs(static, index, by_query=False)
  d_k, d_v = _call(
    _d_kv_kernel,
    static,
    kinds.swapaxes(1, 2),
    [by.index, by.q, by.k, by.k, by.q, by.statistic, by.statistic],
    [index, q, k, v, d_out, lse, delta],
    [by.k, by.k],
    [_like(k), _like(v)],
    [(static.block_k, static.dim)] * 2,
    dots=4,
  )
  return d_q, d_k, d_v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q, k, v, index):
  return _forward(static, q, k, v, index)[0]


def _attend_fwd(static, q, k, v, index):
  out, lse = _forward(static, q, k, v, index)
  return out, (q, k, v, index, out, lse)


def _attend_bwd(static, residuals, d_out):
  return *_backward(static, *residuals, d_out), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _most_tokens(q, k):
  """Tokens of a query and of a key block, at most; group blocks are halved in fp32."""
  sizes = block_sizes.get('tpu', 'tree_attention')
  group = q.shape[2] // k.shape[2]
  most_q = sizes['group_tokens'] * 2 // q.dtype.itemsize // group // _LANES * _LANES
  return min(sizes['tokens'], max(most_q, _LANES)), sizes['tokens']


def _block_sizes(q, k):
  queries, keys = q.shape[1], k.shape[1]
  most_q, most_k = _most_tokens(q, k)
  return min(most_q, queries + -queries % _LANES), min(most_k, keys + -keys % _LANES)


def _rows_together(rows, query_blocks, key_blocks):
  """Rows whose visits fit one table, a divisor of `rows`; 0 if not one fits."""
  for together in range(rows, 0, -1):
    fits = together * query_blocks * key_blocks <= _TABLE
    fits &= together * max(query_blocks, key_blocks) <= 2**ID_BITS
    if fits and rows % together == 0:
      return together
  return 0


def refusal(q, k, v) -> str | None:
  """Why the kernel does not take these tensors; None where it does."""
  if not (q.dtype == k.dtype == v.dtype) or q.dtype not in _DTYPES:
    return f'{q.dtype}, {k.dtype}, {v.dtype}: must all be bfloat16 or all float32'
  block_q, block_k = _block_sizes(q, k)
  blocks = -(-q.shape[1] // block_q), -(-k.shape[1] // block_k)
  if not _rows_together(1, *blocks):
    return (
      f'{blocks[0]} blocks of queries by {blocks[1]} of keys are more pairs than the '
      f'{_TABLE} that fit scalar memory; attend with fewer queries at a time (q_index)'
    )
  return None


def _flat(x, block, rows, fill=0):
  """[B, S, …] → [B / rows, rows · padded length, …]."""
  pad = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, pad, constant_values=fill)
  return x.reshape(x.shape[0] // rows, -1, *x.shape[2:])


def attend(q, k, v, visibility: Visibility, *, scale):
  """Same contract as `reference.attend`.

  Raises:
    ValueError: what `refusal` says: not all of bfloat16 or all of float32, or more
      blocks in a row than fit scalar memory, past 207,000 queries by as many keys.
  """
  if reason := refusal(q, k, v):
    raise ValueError(f'attend on TPU: {reason}')
  batch, queries, heads, dim = q.shape
  keys, kv_heads = k.shape[1:3]
  group = heads // kv_heads
  block_q, block_k = _block_sizes(q, k)
  query_blocks, key_blocks = -(-queries // block_q), -(-keys // block_k)
  rows = _rows_together(batch, query_blocks, key_blocks)
  padded_dim = dim + -dim % _LANES

  def tensor(x, block):
    x = jnp.pad(x, ((0, 0),) * 3 + ((0, padded_dim - dim),))
    return _flat(x.reshape(*x.shape[:2], -1), block, rows)

  def integers(block):
    return lambda x, padding: _flat(x, block, rows, padding).astype(jnp.int32)[:, None]

  arrays = (
    tensor(q, block_q),
    tensor(k, block_k),
    tensor(v, block_k),
    visibility.map(integers(block_q), integers(block_k)),
  )
  static = _Static(
    scale,
    rows,
    kv_heads,
    group,
    padded_dim,
    block_q,
    block_k,
    key_blocks,
  )
  call = functools.partial(_attend, static)
  if rows == batch:
    out = call(*jax.tree.map(lambda x: x[0], arrays))
  else:
    out = lax.map(lambda xs: call(*xs), arrays)
  out = out.reshape(batch, query_blocks * block_q, heads, padded_dim)
  return out[:, :queries, :, :dim]
