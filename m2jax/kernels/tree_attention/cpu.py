"""Forest attention in XLA that skips what no query of a block can see.

Queries are cut into blocks and keys into smaller ones. For each block of queries the
key blocks with anything to see are listed, gathered so many at a time, and visited: a
batched matmul for scores, one elementwise pass, and a matmul that adds to the result;
scores of a visit stay in a core's cache. Key blocks are small because the ancestors of
a block of queries lie in short pieces all over the row. There is no online softmax: the
scores need no shift where none can leave the range of exp, which the norms of queries
and keys tell; else a loop before finds the maximum of each query. The backward pass
recomputes the weights from the logsumexp (arXiv:2205.14135) with keys along the rows,
so that most of its matmuls read memory as it lies.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
m, n query and key blocks of all rows, b tokens of a key block, r = G · tokens of a
query block, p key blocks of a visit, c = p·b keys of a visit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.kernels.tree_attention.visibility import Visibility
from m2jax.kernels.tree_attention.visits import block_kinds

_KEY_BLOCK = 16  # tokens
# Tokens of a query block and keys of a visit, in rows of up to _SHORT_ROW keys and in
# longer ones, which fill longer visits: less time goes into gathering and adding up.
_SHORT_ROW = 1024
_SHORT, _LONG = (128, 128), (64, 384)
# Scores this far from 0 need no shift: sums of their exp are far from what fp32 holds.
_SAFE = 30.0


class _Static(NamedTuple):
  rows: int
  block_q: int
  block_k: int
  key_blocks: int  # of a row
  at_once: int  # key blocks of a visit


class _Plan(NamedTuple):
  """What is visited, and what the mask of a visit needs.

  Blocks are numbered through all rows. Key block n, the last, is of padding: it fills
  visits that have fewer than p.

  Attributes:
    count: visits.
    query: [visits at most] the block of queries; sorted.
    keys: [visits at most, p] key blocks.
    index: by block: of queries [m, r], of keys [n + 1, b].
  """

  count: jax.Array
  query: jax.Array
  keys: jax.Array
  index: Visibility


def _sizes(queries: int, keys: int) -> tuple[int, int]:
  """Tokens of a query block and keys of a visit, no more than a row has."""
  block_q, visit = _SHORT if keys <= _SHORT_ROW else _LONG
  return (
    min(block_q, -(-queries // 16) * 16),  # in whole vectors
    min(visit, -(-keys // _KEY_BLOCK) * _KEY_BLOCK),
  )


def _pad(x, block, fill=0):
  """[B, S, …] → padded to whole blocks."""
  pad = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, pad, constant_values=fill)


def _split_queries(x, block, kv_heads):
  """[B, Q, K·G, H] → [m, K, r, H]: a contiguous matrix a key/value head."""
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


def _plan(static: _Static, index: Visibility, group: int) -> _Plan:
  seen = block_kinds(static, index) != 0
  rows, m, n = seen.shape
  seen = seen.reshape(rows * m, n)
  visits = -(-jnp.sum(seen, axis=1, dtype=jnp.int32) // static.at_once)
  most = rows * m * -(-n // static.at_once)
  first = static.at_once * (jnp.cumsum(visits) - visits)
  # where in the list a block stands; the others go past its end
  slot = first[:, None] + jnp.cumsum(seen, axis=1, dtype=jnp.int32) - 1
  slot = jnp.where(seen, slot, most * static.at_once)
  block = jnp.arange(rows * n, dtype=jnp.int32).reshape(rows, 1, n)
  block = jnp.broadcast_to(block, (rows, m, n)).reshape(slot.shape)
  keys = jnp.full((most * static.at_once,), rows * n, jnp.int32)
  keys = keys.at[slot].set(block, mode='drop')
  query = jnp.arange(rows * m, dtype=jnp.int32)

  def of_queries(x, _):
    return jnp.repeat(x.reshape(rows * m, -1), group, axis=1)

  def of_keys(x, padding):
    pad = (0, 1), (0, 0)
    return jnp.pad(x.reshape(rows * n, -1), pad, constant_values=padding)

  return _Plan(
    jnp.sum(visits),
    jnp.repeat(query, visits, total_repeat_length=most),
    keys.reshape(most, static.at_once),
    index.map(of_queries, of_keys),
  )


def _at(x, i):
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x, value, i):
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
  """[r, c] bool, or [c, r]: which keys the queries of visit i see."""
  query, blocks = plan.query[i], plan.keys[i]
  # numbers, then queries and keys along their axes
  of_q = (lambda x: x[None]) if keys_first else (lambda x: x[:, None])
  of_k = (lambda x: x[:, None]) if keys_first else (lambda x: x[None])
  index = plan.index
  q = of_q(_at(index.q_index, query))
  first = blocks % static.key_blocks * static.block_k
  k = first[:, None] + jnp.arange(static.block_k, dtype=jnp.int32)
  seen = (of_k(k.reshape(-1)) <= q) & (q < of_k(index.subtree_end[blocks].reshape(-1)))
  if index.window is not None:
    q_at = of_q(_at(index.q_position, query))
    k_at = of_k(index.k_position[blocks].reshape(-1))
    seen &= (q_at - k_at < index.window) | (k_at < index.sinks)
  return seen


def _scores(static, q, k, plan: _Plan, i):
  """[K, r, c] of visit i; -inf where nothing is seen."""
  scores = jnp.einsum('krh,kch->krc', _at(q, plan.query[i]), _gather(k, plan.keys[i]))
  seen = _seen(static, plan, i, keys_first=False)
  return jnp.where(seen, scores, -jnp.inf)


def _shift(static, q, k, plan: _Plan):
  """[m, K, r]: what to take from the scores of each query before exp.

  It depends on nothing but the scores that the query sees, whichever way it is found.
  """
  zeros = jnp.zeros(q.shape[:3], q.dtype)
  norms = [jnp.max(jnp.sum(x * x, axis=-1)) for x in (q, k)]

  def maximum():
    def visit(i, top):
      query = plan.query[i]
      found = jnp.max(_scores(static, q, k, plan, i), axis=-1)
      return _put(top, jnp.maximum(_at(top, query), found), query)

    top = jax.lax.fori_loop(0, plan.count, visit, jnp.full_like(zeros, -jnp.inf))
    return jnp.where((jnp.abs(top) <= _SAFE) | (top == -jnp.inf), 0, top)

  return jax.lax.cond(norms[0] * norms[1] <= _SAFE**2, lambda: zeros, maximum)


def _forward(static, q, k, v, plan: _Plan):
  """Blocked q [m, K, r, H] (scaled), k, v [K, n + 1, b, H] → out like q, logsumexp."""
  shift = _shift(static, q, k, plan)

  def visit(i, state):
    out, total = state
    query = plan.query[i]
    scores = _scores(static, q, k, plan, i)
    weights = jnp.exp(scores - _at(shift, query)[..., None])
    update = jnp.einsum('krc,kch->krh', weights, _gather(v, plan.keys[i]))
    total = _put(total, _at(total, query) + jnp.sum(weights, axis=-1), query)
    return _put(out, _at(out, query) + update, query), total

  out, total = jax.lax.fori_loop(
    0, plan.count, visit, (jnp.zeros_like(q), jnp.zeros_like(shift))
  )
  some = jnp.where(total > 0, total, 1)
  # +inf where a query saw nothing: its weights recompute to exactly 0
  return out / some[..., None], jnp.where(total > 0, shift + jnp.log(some), jnp.inf)


def _backward(static, q, k, v, plan: _Plan, out, lse, d_out):
  """Cotangents of blocked q, k, v."""
  delta = jnp.sum(out * d_out, axis=-1)

  def visit(i, state):
    d_q, d_k, d_v = state
    query, blocks = plan.query[i], plan.keys[i]
    q_block, d_block, keys = _at(q, query), _at(d_out, query), _gather(k, blocks)
    scores = jnp.einsum('kch,krh->kcr', keys, q_block)
    d_weights = jnp.einsum('kch,krh->kcr', _gather(v, blocks), d_block)
    seen = _seen(static, plan, i, keys_first=True)
    scores = jnp.where(seen, scores - _at(lse, query)[:, None], -jnp.inf)
    weights = jnp.exp(scores)
    d_scores = weights * (d_weights - _at(delta, query)[:, None])
    d_v = _add(d_v, jnp.einsum('kcr,krh->kch', weights, d_block), blocks)
    d_k = _add(d_k, jnp.einsum('kcr,krh->kch', d_scores, q_block), blocks)
    # a matmul whose operands lie as they are read is faster: keys are turned apart
    columns = jax.lax.optimization_barrier(keys.swapaxes(1, 2))
    update = jnp.einsum('khc,kcr->khr', columns, d_scores)
    return _put(d_q, _at(d_q, query) + update, query), d_k, d_v

  state = jnp.zeros_like(q.swapaxes(2, 3)), jnp.zeros_like(k), jnp.zeros_like(v)
  d_q, d_k, d_v = jax.lax.fori_loop(0, plan.count, visit, state)
  return d_q.swapaxes(2, 3), d_k, d_v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q, k, v, plan):
  return _forward(static, q, k, v, plan)[0]


def _attend_fwd(static, q, k, v, plan):
  out, lse = _forward(static, q, k, v, plan)
  return out, (q, k, v, plan, out, lse)


def _attend_bwd(static, residuals, d_out):
  return *_backward(static, *residuals, d_out), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(q, k, v, visibility: Visibility, *, scale):
  """Same contract as `reference.attend`."""
  block_q, visit = _sizes(q.shape[1], k.shape[1])
  index = visibility.map(
    lambda x, padding: _pad(x, block_q, padding),
    lambda x, padding: _pad(x, _KEY_BLOCK, padding),
  )
  static = _Static(
    rows=len(q),
    block_q=block_q,
    block_k=_KEY_BLOCK,
    key_blocks=index.subtree_end.shape[1] // _KEY_BLOCK,
    at_once=visit // _KEY_BLOCK,
  )
  wide = jnp.promote_types(q.dtype, jnp.float32)
  out = _attend(
    static,
    _split_queries(q.astype(wide) * scale, block_q, k.shape[2]),
    _split_keys(k.astype(wide), _KEY_BLOCK),
    _split_keys(v.astype(wide), _KEY_BLOCK),
    _plan(static, index, q.shape[2] // k.shape[2]),
  )
  return _join_queries(out, q, block_q)
