"""Forest attention in XLA that skips blocks no query of a block can see.

Queries and keys are cut into blocks. A pair of blocks is visited only if some key of
one may be visible to some query of the other, which two numbers a block decide: a key
block is skipped when all of its subtrees end before the query block begins, or when it
begins after the query block ends. The visits of a block are listed first; blocks with
similar numbers of visits are then run together, with the online softmax of
FlashAttention (arXiv:2205.14135). The backward pass recomputes the weights once, keeps
d_q of the blocks at hand and adds d_k and d_v to their blocks.

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim;
n blocks, b tokens of a block, r = G·b query rows of a block, g blocks run together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.kernels.tree_attention import reference

_BLOCK = 64  # tokens of a query or key block
_TOGETHER = 16  # blocks run together


class _Static(NamedTuple):
  window: int | None
  sinks: int
  scale: float


class _Blocks(NamedTuple):
  """Blocked integer metadata; leading axis n = B · blocks of a row."""

  q_index: jax.Array  # [n, b]; -1 on padding
  q_position: jax.Array
  k_index: jax.Array
  k_position: jax.Array
  subtree_end: jax.Array  # 0 on padding


def _split(x, fill=0):
  """[B, S, …] → [B · blocks, b, …], padded with `fill`."""
  pad = -x.shape[1] % _BLOCK
  x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
  return x.reshape(-1, _BLOCK, *x.shape[2:])


def _split_heads(x, kv_heads):
  """[B, S, K·G, H] → [n, K, G·b, H]: one contiguous matrix a block and head group."""
  x = _split(x)
  n, b, heads, head_dim = x.shape
  x = x.reshape(n, b, kv_heads, heads // kv_heads, head_dim)
  return x.transpose(0, 2, 3, 1, 4).reshape(n, kv_heads, -1, head_dim)


def _join_heads(x, batch, length, group):
  """Inverse of `_split_heads`."""
  n, kv_heads, _, head_dim = x.shape
  x = x.reshape(n, kv_heads, group, _BLOCK, head_dim).transpose(0, 3, 1, 2, 4)
  x = x.reshape(batch, -1, kv_heads * group, head_dim)
  return x[:, :length]


class _Visits(NamedTuple):
  """Which key blocks each query block visits; those with like counts together."""

  order: jax.Array  # [steps, g] query blocks, most visits first; n is none at all
  count: jax.Array  # [steps, g] their visits
  partner: jax.Array  # [n, key blocks of a row], visited first


def _visits(seen):
  """seen [B, query blocks, key blocks] bool → visits of every query block."""
  batch, rows, partners = seen.shape
  partner = jnp.argsort(~seen, axis=-1, stable=True)
  partner += partners * jnp.arange(batch)[:, None, None]
  count = jnp.sum(seen, axis=-1).reshape(-1)
  order = jnp.argsort(-count)
  pad = (0, -len(order) % _TOGETHER)
  sorted_count = jnp.pad(count[order], pad)
  order = jnp.pad(order, pad, constant_values=len(order))
  return _Visits(
    order.reshape(-1, _TOGETHER),
    sorted_count.reshape(-1, _TOGETHER),
    partner.reshape(batch * rows, partners),
  )


def _seen_blocks(blocks: _Blocks, batch):
  """[B, query blocks, key blocks] bool: some pair may be visible (conservative)."""
  first_q = jnp.min(
    jnp.where(blocks.q_index < 0, jnp.iinfo(jnp.int32).max, blocks.q_index), axis=1
  ).reshape(batch, -1, 1)
  last_q = jnp.max(blocks.q_index, axis=1).reshape(batch, -1, 1)
  first_k = jnp.min(blocks.k_index, axis=1).reshape(batch, 1, -1)
  last_end = jnp.max(blocks.subtree_end, axis=1).reshape(batch, 1, -1)
  return (first_k <= last_q) & (first_q < last_end)


def _pair_mask(blocks: _Blocks, static: _Static, q_ids, k_ids, group):
  """[g, 1, r, b] bool: which keys of block k_ids[i] queries of block q_ids[i] see."""
  seen = reference.visible(
    blocks.subtree_end[k_ids],
    blocks.q_index[q_ids],
    k_index=blocks.k_index[k_ids],
    window=static.window,
    sinks=static.sinks,
    q_position=None if static.window is None else blocks.q_position[q_ids],
    k_position=None if static.window is None else blocks.k_position[k_ids],
  )
  return jnp.tile(seen, (1, group, 1))[:, None]


def _dot(spec, a, b):
  dtype = jnp.promote_types(a.dtype, jnp.float32)
  return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _run(visits: _Visits, shared, init, visit, finish, outs):
  """Runs every block's visits, blocks of `_TOGETHER` at a time.

  `visit(shared, carry, ids, partner ids, live) -> (shared, carry)`: `shared` lives
  through all visits, `carry` starts as `init()` for each set of blocks and
  `finish(carry)` is written to their places in `outs`, arrays [n, …].
  """

  def step(state, block):
    shared, outs = state
    ids, count = block

    def body(state):
      t, shared, carry = state
      return t + 1, *visit(shared, carry, ids, visits.partner[ids, t], t < count)

    _, shared, carry = jax.lax.while_loop(
      lambda s: s[0] < count[0], body, (0, shared, init())
    )
    outs = tuple(
      o.at[ids].set(x.astype(o.dtype), mode='drop')
      for o, x in zip(outs, finish(carry), strict=True)
    )
    return (shared, outs), None

  return jax.lax.scan(step, (shared, outs), (visits.order, visits.count))[0]


def _forward(static, q, k, v, blocks, batch):
  """Blocked q [n, K, r, H], k, v [m, K, b, H] → out like q, logsumexp [n, K, r]."""
  n, kv_heads, rows, head_dim = q.shape
  group = rows // _BLOCK
  dtype = jnp.promote_types(q.dtype, jnp.float32)
  shape = (_TOGETHER, kv_heads, rows)

  def init():
    return (
      jnp.full(shape, -jnp.inf, dtype),
      jnp.zeros(shape, dtype),
      jnp.zeros((*shape, head_dim), dtype),
    )

  def visit(shared, carry, q_ids, k_ids, live):
    top, total, acc = carry
    scores = _dot('nkrh,nksh->nkrs', q[q_ids], k[k_ids]) * static.scale
    seen = _pair_mask(blocks, static, q_ids, k_ids, group)
    seen &= live[:, None, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    safe = jnp.where(new_top == -jnp.inf, 0, new_top)
    weights = jnp.exp(scores - safe[..., None])
    keep = jnp.exp(top - safe)
    total = total * keep + jnp.sum(weights, axis=-1)
    update = _dot('nkrs,nksh->nkrh', weights.astype(v.dtype), v[k_ids])
    return shared, (new_top, total, acc * keep[..., None] + update)

  def finish(carry):
    top, total, acc = carry
    out = acc / jnp.where(total > 0, total, 1)[..., None]
    # +inf where a query saw nothing: its weights recompute to exactly 0
    lse = jnp.where(total > 0, top + jnp.log(jnp.where(total > 0, total, 1)), jnp.inf)
    return out, lse

  visits = _visits(_seen_blocks(blocks, batch))
  outs = (jnp.zeros_like(q), jnp.zeros((n, kv_heads, rows), dtype))
  return _run(visits, (), init, visit, finish, outs)[1]


def _backward(static, q, k, v, blocks, batch, out, lse, d_out):
  """Cotangents of blocked q, k, v."""
  dtype = jnp.promote_types(q.dtype, jnp.float32)
  kv_heads, rows, head_dim = q.shape[1:]
  group = rows // _BLOCK
  delta = jnp.sum(out.astype(dtype) * d_out.astype(dtype), axis=-1)

  def visit(shared, carry, q_ids, k_ids, live):
    d_k, d_v = shared
    q_block, d_block = q[q_ids], d_out[q_ids]
    scores = _dot('nkrh,nksh->nkrs', q_block, k[k_ids]) * static.scale
    seen = _pair_mask(blocks, static, q_ids, k_ids, group)
    seen &= live[:, None, None, None]
    weights = jnp.where(seen, jnp.exp(scores - lse[q_ids][..., None]), 0)
    d_weights = _dot('nkrh,nksh->nkrs', d_block, v[k_ids])
    d_scores = weights * (d_weights - delta[q_ids][..., None]) * static.scale
    weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
    d_k = d_k.at[k_ids].add(_dot('nkrs,nkrh->nksh', d_scores, q_block))
    d_v = d_v.at[k_ids].add(_dot('nkrs,nkrh->nksh', weights, d_block))
    return (d_k, d_v), carry + _dot('nkrs,nksh->nkrh', d_scores, k[k_ids])

  (d_k, d_v), (d_q,) = _run(
    _visits(_seen_blocks(blocks, batch)),
    (jnp.zeros(k.shape, dtype), jnp.zeros(v.shape, dtype)),
    lambda: jnp.zeros((_TOGETHER, kv_heads, rows, head_dim), dtype),
    visit,
    lambda d_q: (d_q,),
    (jnp.zeros_like(q),),
  )
  return d_q, d_k.astype(k.dtype), d_v.astype(v.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5))
def _attend(static, q, k, v, blocks, batch):
  return _forward(static, q, k, v, blocks, batch)[0]


def _attend_fwd(static, q, k, v, blocks, batch):
  out, lse = _forward(static, q, k, v, blocks, batch)
  return out, (q, k, v, blocks, out, lse)


def _attend_bwd(static, batch, residuals, d_out):
  q, k, v, blocks, out, lse = residuals
  return *_backward(static, q, k, v, blocks, batch, out, lse, d_out), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def attend(
  q, k, v, subtree_end, q_index, *, window, sinks, q_position, k_position, scale
):
  """Same contract as `reference.attend`."""
  batch, queries, heads, _ = q.shape
  kv_heads = k.shape[2]
  k_index = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), subtree_end.shape)
  zeros = jnp.zeros((), jnp.int32)
  blocks = _Blocks(
    q_index=_split(q_index, fill=-1),
    q_position=zeros if window is None else _split(q_position),
    k_index=_split(k_index),
    k_position=zeros if window is None else _split(k_position),
    subtree_end=_split(subtree_end),
  )
  out = _attend(
    _Static(window, sinks, scale),
    _split_heads(q, kv_heads),
    _split_heads(k, kv_heads),
    _split_heads(v, kv_heads),
    blocks,
    batch,
  )
  return _join_heads(out, batch, queries, heads // kv_heads)
