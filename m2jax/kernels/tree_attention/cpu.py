"""Forest attention in XLA that skips what no query of a block can see.

Queries are divided into blocks, keys into smaller ones. For each block of queries the
key blocks with something to see are listed and processed in steps of p: a gather, a
batched matmul for scores, one elementwise pass, and a matmul that adds to the result;
the scores of a step stay in a core's cache. Key blocks are small because the ancestors
of a block of queries are short runs scattered over the row. There is no online softmax:
the scores need no shift if none can leave the range of exp, which the norms of queries
and keys bound; otherwise a loop before finds the maximum of each query. The backward
pass recomputes the weights from the logsumexp (arXiv:2205.14135), transposed, with keys
along the rows, so that most of its matmuls read contiguous operands.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
m, n query and key blocks of all rows, b tokens of a key block, r = G · tokens of a
query block, p key blocks of a step, c = p·b keys of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.kernels.tree_attention.block_pairs import block_kinds
from m2jax.kernels.tree_attention.visibility import Visibility

_KEY_BLOCK = 16  # tokens
# Tokens of a query block and keys of a step, in rows of up to _SHORT_ROW keys and in
# longer ones, which fill longer steps: less time goes into gathering and adding.
_SHORT_ROW = 1024
_SHORT, _LONG = (128, 128), (64, 384)
# Scores this far from 0 need no shift: sums of their exp are far from fp32's limits.
_SAFE = 30.0


class _Static(NamedTuple):
  rows: int
  block_q: int
  block_k: int
  key_blocks: int  # of a row
  step_blocks: int  # key blocks of a step


class _Plan(NamedTuple):
  """The steps, and the integers of which their masks are made.

  Blocks are numbered through all rows. Key block n, the last, is padding: it fills
  steps that have fewer than p key blocks.

  Attributes:
    count: number of steps.
    query: [most steps] the block of queries; sorted.
    keys: [most steps, p] key blocks.
    index: by block: of queries [m, r], of keys [n + 1, b].
  """

  count: jax.Array
  query: jax.Array
  keys: jax.Array
  index: Visibility


def _sizes(queries: int, keys: int) -> tuple[int, int]:
  """Tokens of a query block and keys of a step, no more than a row has."""
  block_q, step = _SHORT if keys <= _SHORT_ROW else _LONG
  return (
    min(block_q, -(-queries // 16) * 16),  # full vectors
    min(step, -(-keys // _KEY_BLOCK) * _KEY_BLOCK),
  )


def _pad(x, block, fill=0):
  """[B, S, …] → padded to full blocks."""
  pad = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, pad, constant_values=fill)


def _split_queries(x, block, kv_heads):
  """[B, Q, K·G, H] → [m, K, r, H]: a contiguous matrix per key/value head."""
  x = _pad(x, block)
  x = x.reshape(-1, block, kv_heads, x.shape[2] // kv_heads, x.shape[3])
  return x.swapaxes(1, 2).reshape(len(x), kv_heads, -1, x.shape[-1])


def _join_queries(x, like, block):
  """Inverse of `_split_queries`, in shape and dtype of `like`."""
  batch, length, heads, head_dim = like.shape
  kv_heads = x.shape[1]
  x = x.reshape(len(x), kv_heads, block, heads // kv_heads, head_dim).swapaxes(1, 2)
  x = x.reshape(batch, -1, heads, head_dim)[:, :length]
  return x.astype(like.dtype)


def _split_keys(x, block):
  """[B, S, K, H] → [K, n + 1, b, H]; the last block is 0."""
  x = _pad(x, block)
  x = x.reshape(-1, block, *x.shape[2:]).transpose(2, 0, 1, 3)
  return jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0)))


def _join_keys(x, like):
  """Inverse of `_split_keys`, in shape and dtype of `like`."""
  batch, length, heads, head_dim = like.shape
  x = x[:, :-1].transpose(1, 2, 0, 3).reshape(batch, -1, heads, head_dim)
  return x[:, :length].astype(like.dtype)


def _plan(static: _Static, index: Visibility, group: int) -> _Plan:
  seen = block_kinds(static, index) != 0
  rows, m, n = seen.shape
  seen = seen.reshape(rows * m, n)
  steps = -(-jnp.sum(seen, axis=1, dtype=jnp.int32) // static.step_blocks)
  most = rows * m * -(-n // static.step_blocks)
  first = static.step_blocks * (jnp.cumsum(steps) - steps)
  # a block's place in the list; unseen blocks go past its end
  slot = first[:, None] + jnp.cumsum(seen, axis=1, dtype=jnp.int32) - 1
  slot = jnp.where(seen, slot, most * static.step_blocks)
  block = jnp.arange(rows * n, dtype=jnp.int32).reshape(rows, 1, n)
  block = jnp.broadcast_to(block, (rows, m, n)).reshape(slot.shape)
  keys = jnp.full((most * static.step_blocks,), rows * n, jnp.int32)
  keys = keys.at[slot].set(block, mode='drop')
  query = jnp.arange(rows * m, dtype=jnp.int32)

  def of_queries(x, _):
    return jnp.repeat(x.reshape(rows * m, -1), group, axis=1)

  def of_keys(x, padding):
    pad = (0, 1), (0, 0)
    return jnp.pad(x.reshape(rows * n, -1), pad, constant_values=padding)

  return _Plan(
    jnp.sum(steps),
    jnp.repeat(query, steps, total_repeat_length=most),
    keys.reshape(most, static.step_blocks),
    index.map(of_queries, of_keys),
  )


def _item(x, i):
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _set_item(x, value, i):
  return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)


def _gather(x, blocks):
  """[K, n + 1, b, H] → [K, c, H] of blocks [p]."""
  x = x.at[:, blocks].get(mode='promise_in_bounds')
  return x.reshape(len(x), -1, x.shape[-1])


def _add(x, value, blocks):
  """[K, n + 1, b, H] plus value [K, c, H] at blocks [p]."""
  value = value.reshape(len(x), -1, *x.shape[2:])
  return x.at[:, blocks].add(value, mode='promise_in_bounds')


def _seen(static: _Static, plan: _Plan, i, keys_first: bool):
  """[r, c] bool, or [c, r]: which keys the queries of step i see."""
  query, blocks = plan.query[i], plan.keys[i]
  of_q = (lambda x: x[None]) if keys_first else (lambda x: x[:, None])
  of_k = (lambda x: x[:, None]) if keys_first else (lambda x: x[None])
  index = plan.index
  q = of_q(_item(index.q_index, query))
  first = blocks % static.key_blocks * static.block_k
  k = first[:, None] + jnp.arange(static.block_k, dtype=jnp.int32)
  seen = (of_k(k.reshape(-1)) <= q) & (q < of_k(index.subtree_end[blocks].reshape(-1)))
  if index.window is not None:
    q_at = of_q(_item(index.q_position, query))
    k_at = of_k(index.k_position[blocks].reshape(-1))
    seen &= (q_at - k_at < index.window) | (k_at < index.sinks)
  return seen


def _scores(static, q, k, plan: _Plan, i):
  """[K, r, c] of step i; -inf where nothing is seen."""
  scores = jnp.einsum('krh,kch->krc', _item(q, plan.query[i]), _gather(k, plan.keys[i]))
  seen = _seen(static, plan, i, keys_first=False)
  return jnp.where(seen, scores, -jnp.inf)


def _shift(static, q, k, plan: _Plan):
  """[m, K, r]: what is subtracted from the scores of each query before exp.

  Either way it depends on nothing but the scores that the query sees.
  """
  zeros = jnp.zeros(q.shape[:3], q.dtype)
  norms = [jnp.max(jnp.sum(x * x, axis=-1)) for x in (q, k)]

  def maximum():
    def step(i, top):
      query = plan.query[i]
      found = jnp.max(_scores(static, q, k, plan, i), axis=-1)
      return _set_item(top, jnp.maximum(_item(top, query), found), query)

    top = jax.lax.fori_loop(0, plan.count, step, jnp.full_like(zeros, -jnp.inf))
    return jnp.where((jnp.abs(top) <= _SAFE) | (top == -jnp.inf), 0, top)

  return jax.lax.cond(norms[0] * norms[1] <= _SAFE**2, lambda: zeros, maximum)


def _forward(static, q, k, v, plan: _Plan):
  """Blocked q [m, K, r, H] (scaled), k, v [K, n + 1, b, H] → out like q, logsumexp."""
  shift = _shift(static, q, k, plan)

  def step(i, state):
    out, total = state
    query = plan.query[i]
    scores = _scores(static, q, k, plan, i)
    weights = jnp.exp(scores - _item(shift, query)[..., None])
    update = jnp.einsum('krc,kch->krh', weights, _gather(v, plan.keys[i]))
    total = _set_item(total, _item(total, query) + jnp.sum(weights, axis=-1), query)
    return _set_item(out, _item(out, query) + update, query), total

  out, total = jax.lax.fori_loop(
    0, plan.count, step, (jnp.zeros_like(q), jnp.zeros_like(shift))
  )
  divisor = jnp.where(total > 0, total, 1)
  # +inf where a query saw nothing: its weights recompute to exactly 0
  return out / divisor[..., None], jnp.where(
    total > 0, shift + jnp.log(divisor), jnp.inf
  )


def _backward(static, residuals, d_out):
  """Cotangents of blocked q, k, v."""
  q, k, v, plan, out, lse = residuals
  delta = jnp.sum(out * d_out, axis=-1)

  def step(i, state):
    d_q, d_k, d_v = state
    query, blocks = plan.query[i], plan.keys[i]
    q_block, d_block, keys = _item(q, query), _item(d_out, query), _gather(k, blocks)
    scores = jnp.einsum('kch,krh->kcr', keys, q_block)
    d_weights = jnp.einsum('kch,krh->kcr', _gather(v, blocks), d_block)
    seen = _seen(static, plan, i, keys_first=True)
    scores = jnp.where(seen, scores - _item(lse, query)[:, None], -jnp.inf)
    weights = jnp.exp(scores)
    d_scores = weights * (d_weights - _item(delta, query)[:, None])
    d_v = _add(d_v, jnp.einsum('kcr,krh->kch', weights, d_block), blocks)
    d_k = _add(d_k, jnp.einsum('kcr,krh->kch', d_scores, q_block), blocks)
    # an explicit transpose, kept apart from the matmul, makes its operands contiguous
    transposed = jax.lax.optimization_barrier(keys.swapaxes(1, 2))
    update = jnp.einsum('khc,kcr->khr', transposed, d_scores)
    return _set_item(d_q, _item(d_q, query) + update, query), d_k, d_v

  state = jnp.zeros_like(q.swapaxes(2, 3)), jnp.zeros_like(k), jnp.zeros_like(v)
  d_q, d_k, d_v = jax.lax.fori_loop(0, plan.count, step, state)
  return d_q.swapaxes(2, 3), d_k, d_v


class _Blocks(NamedTuple):
  """Inputs in blocks, the queries scaled."""

  static: _Static
  q: jax.Array  # [m, K, r, H]
  k: jax.Array  # [K, n + 1, b, H]
  v: jax.Array
  plan: _Plan


def _blocks(q, k, v, visibility: Visibility, scale) -> _Blocks:
  block_q, step = _sizes(q.shape[1], k.shape[1])
  index = visibility.map(
    lambda x, padding: _pad(x, block_q, padding),
    lambda x, padding: _pad(x, _KEY_BLOCK, padding),
  )
  static = _Static(
    rows=len(q),
    block_q=block_q,
    block_k=_KEY_BLOCK,
    key_blocks=index.subtree_end.shape[1] // _KEY_BLOCK,
    step_blocks=step // _KEY_BLOCK,
  )
  wide = jnp.promote_types(q.dtype, jnp.float32)
  return _Blocks(
    static,
    _split_queries(q.astype(wide) * scale, block_q, k.shape[2]),
    _split_keys(k.astype(wide), _KEY_BLOCK),
    _split_keys(v.astype(wide), _KEY_BLOCK),
    _plan(static, index, q.shape[2] // k.shape[2]),
  )


def forward(q, k, v, visibility: Visibility, *, scale):
  """Same contract as `reference.forward`."""
  static, *arrays = _blocks(q, k, v, visibility, scale)
  out, lse = _forward(static, *arrays)
  like = jax.ShapeDtypeStruct((*q.shape[:3], 1), lse.dtype)
  lse = _join_queries(lse[..., None], like, static.block_q)
  return _join_queries(out, q, static.block_q), lse[..., 0].swapaxes(1, 2)


def backward(q, k, v, visibility: Visibility, out, lse, d_out, *, scale):
  """Same contract as `reference.backward`."""
  static, *arrays = _blocks(q, k, v, visibility, scale)
  # as `_forward` leaves it where a query saw nothing
  pad = (0, 0), (0, 0), (0, -lse.shape[2] % static.block_q)
  lse = jnp.pad(lse, pad, constant_values=jnp.inf).swapaxes(1, 2)[..., None]

  def split(x):
    return _split_queries(x.astype(lse.dtype), static.block_q, k.shape[2])

  residuals = *arrays, split(out), split(lse)[..., 0]
  d_q, d_k, d_v = _backward(static, residuals, split(d_out))
  return (
    _join_queries(d_q * scale, q, static.block_q),
    _join_keys(d_k, k),
    _join_keys(d_v, v),
  )
