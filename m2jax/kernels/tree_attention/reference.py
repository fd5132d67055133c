"""Forest attention in plain jnp: materialises every score.

Key j is seen by query i iff `j <= q_index[i] < subtree_end[j]` (law 1).

Axes: B rows, Q queries, S keys, N query heads, K key/value heads, G = N/K, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Bool, Float, Int
from m2jax.kernels.tree_attention.visibility import Visibility


def visible(
  visibility: Visibility, *, k_index: Int[Array, 'B S'] | None = None
) -> Bool[Array, 'B Q S']:
  """Which keys each query of a complete Visibility sees; `k_index` if not 0 … S-1."""
  if k_index is None:
    k_index = jnp.arange(visibility.subtree_end.shape[1])[None]
  q = visibility.q_index[:, :, None]
  seen = (k_index[:, None] <= q) & (q < visibility.subtree_end[:, None])
  if visibility.window is not None:
    k_position = visibility.k_position[:, None]
    near = visibility.q_position[:, :, None] - k_position < visibility.window
    seen &= near | (k_position < visibility.sinks)
  return seen


def attend(
  q: Float[Array, 'B Q N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  visibility: Visibility,
  *,
  scale: float,
) -> Float[Array, 'B Q N H']:
  """Softmax attention; 0 for a query that sees no key."""
  return forward(q, k, v, visibility, scale=scale)[0]


def forward(
  q: Float[Array, 'B Q N H'],
  k: Float[Array, 'B S K H'],
  v: Float[Array, 'B S K H'],
  visibility: Visibility,
  *,
  scale: float,
) -> tuple[Float[Array, 'B Q N H'], Float[Array, 'B N Q']]:
  """`attend`'s result and the logsumexp of each query's scores, at least fp32.

  The logsumexp is +inf where a query sees no key.
  """
  batch, queries, heads, head_dim = q.shape
  kv_heads = k.shape[2]
  at_least_fp32 = jnp.promote_types(q.dtype, jnp.float32)
  q = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
  scores = jnp.einsum('bqkgh,bskh->bkgqs', q, k, preferred_element_type=at_least_fp32)
  seen = visible(visibility)[:, None, None]
  scores = jnp.where(seen, scores * scale, -jnp.inf)
  top = jnp.max(scores, axis=-1, keepdims=True)
  top = jnp.where(jnp.isfinite(top), top, 0)
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  divisor = jnp.where(total > 0, total, 1)
  out = jnp.einsum('bkgqs,bskh->bqkgh', (weights / divisor).astype(v.dtype), v)
  lse = jnp.where(total > 0, top + jnp.log(divisor), jnp.inf)
  return out.reshape(batch, queries, heads, head_dim), lse.reshape(batch, heads, -1)


def backward(q, k, v, visibility: Visibility, out, lse, d_out, *, scale: float):
  """Cotangents of q, k and v; `out` and `lse` are `forward`'s results."""
  del out, lse
  _, vjp = jax.vjp(lambda *x: attend(*x, visibility, scale=scale), q, k, v)
  return vjp(d_out)
