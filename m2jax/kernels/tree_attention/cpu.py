"""Forest attention in XLA that skips blocks no query of a block can see.

Queries and keys are cut into blocks, small enough that all of a pair's scores stay in a
core's cache. The pairs with anything to see are listed, as for the Pallas kernels
(visits.py), and one loop goes through them, a pair a turn: a batched matmul for scores,
one elementwise pass, and a matmul that adds to the result. There is no online softmax:
the scores need no shift where none can leave the range of exp, which the norms of
queries and keys tell; else a loop before finds the maximum of each query. The backward
pass recomputes the weights from the logsumexp (arXiv:2205.14135) with keys along the
rows, so that all but one of its five matmuls read memory as it lies.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
m, n query and key blocks of all rows, b tokens of a block, r = b·G queries of a block
and a key/value head.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.kernels.tree_attention.visits import Index, block_kinds

_BLOCK = 128  # tokens of a query or key block, at most
# Scores this far from 0 need no shift: sums of their exp are far from what fp32 holds.
_SAFE = 30.0


class _Static(NamedTuple):
  rows: int
  block_q: int
  block_k: int
  key_blocks: int  # of a row
  window: int | None
  sinks: int


class _Plan(NamedTuple):
  """What is visited, and what the mask of a visit needs.

  Attributes:
    count: visits.
    query, key: [visits at most] blocks, numbered through all rows; sorted by query.
    q_index, q_position: [m, r]; -1 on padding; positions are None without a window.
    end, k_position: [n, b]; 0 on padding.
  """

  count: jax.Array
  query: jax.Array
  key: jax.Array
  q_index: jax.Array
  q_position: jax.Array | None
  end: jax.Array
  k_position: jax.Array | None


def _block(length: int) -> int:
  """Tokens of a block: no more than the row has, in whole vectors."""
  return min(_BLOCK, -(-length // 16) * 16)


def _pad(x, block, fill=0):
  """[B, S, …] → padded to whole blocks."""
  pad = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
  return jnp.pad(x, pad, constant_values=fill)


def _split(x, block, kv_heads):
  """[B, S, K·G, H] → [blocks, K, b·G, H]: a contiguous matrix a key/value head."""
  x = _pad(x, block)
  x = x.reshape(-1, block, kv_heads, x.shape[2] // kv_heads, x.shape[3])
  return x.swapaxes(1, 2).reshape(len(x), kv_heads, -1, x.shape[-1])


def _join(x, like, block):
  """Inverse of `_split`, in shape and dtype of `like`."""
  batch, length, heads, head_dim = like.shape
  kv_heads = x.shape[1]
  x = x.reshape(len(x), kv_heads, block, heads // kv_heads, head_dim).swapaxes(1, 2)
  x = x.reshape(batch, -1, heads, head_dim)[:, :length]
  return x.astype(like.dtype)


def _plan(static: _Static, index: Index, group: int) -> _Plan:
  kinds = block_kinds(static, index)
  _, m, n = kinds.shape
  at = jnp.nonzero(kinds.reshape(-1), size=kinds.size, fill_value=0)[0]
  at = at.astype(jnp.int32)

  def blocks(x, size, repeats=1):
    return None if x is None else jnp.repeat(x.reshape(-1, size), repeats, axis=1)

  return _Plan(
    jnp.sum(kinds != 0, dtype=jnp.int32),
    at // n,
    at // (m * n) * n + at % n,
    blocks(index.q_index, static.block_q, group),
    blocks(index.q_position, static.block_q, group),
    blocks(index.subtree_end, static.block_k),
    blocks(index.k_position, static.block_k),
  )


def _at(x, i):
  return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x, value, i):
  return jax.lax.dynamic_update_index_in_dim(x, value, i, 0)


def _seen(static: _Static, plan: _Plan, i, keys_first: bool):
  """[r, b] bool, or [b, r]: which keys the queries of visit i see."""
  query, key = plan.query[i], plan.key[i]
  # numbers, then queries and keys along their axes
  of_q = (lambda x: x[None]) if keys_first else (lambda x: x[:, None])
  of_k = (lambda x: x[:, None]) if keys_first else (lambda x: x[None])
  q = of_q(_at(plan.q_index, query))
  k = key % static.key_blocks * static.block_k
  k = of_k(k + jnp.arange(static.block_k, dtype=jnp.int32))
  seen = (k <= q) & (q < of_k(_at(plan.end, key)))
  if static.window is not None:
    q_at = of_q(_at(plan.q_position, query))
    k_at = of_k(_at(plan.k_position, key))
    seen &= (q_at - k_at < static.window) | (k_at < static.sinks)
  return seen


def _scores(static, q, k, plan: _Plan, i):
  """[K, r, b] of visit i; -inf where nothing is seen."""
  scores = jnp.einsum('krh,kbh->krb', _at(q, plan.query[i]), _at(k, plan.key[i]))
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
  """Blocked q [m, K, r, H] (scaled), k, v [n, K, b, H] → out like q, logsumexp."""
  shift = _shift(static, q, k, plan)

  def visit(i, state):
    out, total = state
    query, key = plan.query[i], plan.key[i]
    scores = _scores(static, q, k, plan, i)
    weights = jnp.exp(scores - _at(shift, query)[..., None])
    update = jnp.einsum('krb,kbh->krh', weights, _at(v, key))
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
  k_columns = k.swapaxes(2, 3)

  def visit(i, state):
    d_q, d_k, d_v = state
    query, key = plan.query[i], plan.key[i]
    q_block, d_block = _at(q, query), _at(d_out, query)
    scores = jnp.einsum('kbh,krh->kbr', _at(k, key), q_block)
    d_weights = jnp.einsum('kbh,krh->kbr', _at(v, key), d_block)
    seen = _seen(static, plan, i, keys_first=True)
    scores = jnp.where(seen, scores - _at(lse, query)[:, None], -jnp.inf)
    weights = jnp.exp(scores)
    d_scores = weights * (d_weights - _at(delta, query)[:, None])
    d_v = _put(d_v, _at(d_v, key) + jnp.einsum('kbr,krh->kbh', weights, d_block), key)
    d_k = _put(d_k, _at(d_k, key) + jnp.einsum('kbr,krh->kbh', d_scores, q_block), key)
    update = jnp.einsum('khb,kbr->khr', _at(k_columns, key), d_scores)
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


def attend(
  q, k, v, subtree_end, q_index, *, window, sinks, q_position, k_position, scale
):
  """Same contract as `reference.attend`."""
  kv_heads = k.shape[2]
  block_q, block_k = _block(q.shape[1]), _block(k.shape[1])
  end = _pad(subtree_end, block_k)
  static = _Static(len(q), block_q, block_k, end.shape[1] // block_k, window, sinks)
  index = Index(
    _pad(q_index, block_q, fill=-1),
    end,
    None if window is None else _pad(q_position, block_q),
    None if window is None else _pad(k_position, block_k),
  )
  wide = jnp.promote_types(q.dtype, jnp.float32)
  out = _attend(
    static,
    _split(q.astype(wide) * scale, block_q, kv_heads),
    _split(k.astype(wide), block_k, kv_heads),
    _split(v.astype(wide), block_k, kv_heads),
    _plan(static, index, q.shape[2] // kv_heads),
  )
  return _join(out, q, block_q)
