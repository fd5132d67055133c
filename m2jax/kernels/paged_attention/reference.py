"""Paged attention in plain jnp: gathers the pages and materialises every score.

Axes: P rows, C new tokens of a row, N query heads, K key/value heads, G = N/K, H head
dim, S positions.
"""

from __future__ import annotations

import jax.numpy as jnp

from m2jax.axes import Array, Float, Int
from m2jax.kernels.paged_attention.cache import Cache, gather, visible


def attend(
  q: Float[Array, 'P C N H'],
  cache: Cache,
  position: Int[Array, 'P C'],
  subtree_end: Int[Array, 'P C'] | None = None,
  *,
  scale: float,
) -> tuple[Float[Array, 'P C N H'], Float[Array, 'P C N']]:
  """`api.attend`'s output and logsumexp."""
  P, C, N, H = q.shape
  keys, values = (x.astype(q.dtype) for x in gather(cache))
  K, _, S, _ = keys.shape
  wide = jnp.promote_types(q.dtype, jnp.float32)
  q = q.reshape(P, C, K, N // K, H)
  scores = jnp.einsum('pckgh,kpsh->pckgs', q, keys, preferred_element_type=wide)
  seen = visible(position, S, subtree_end)[:, :, None, None]
  scores = jnp.where(seen, scores * scale, -jnp.inf)
  top = jnp.max(scores, axis=-1, keepdims=True)
  top = jnp.where(jnp.isfinite(top), top, 0)
  weights = jnp.exp(scores - top)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  divisor = jnp.where(total > 0, total, 1)
  # What no query of a row sees may be anything: 0 times it must be 0.
  stored = jnp.any(seen, axis=1)[:, 0, 0]
  values = jnp.where(stored[None, :, :, None], values, 0)
  out = jnp.einsum('pckgs,kpsh->pckgh', (weights / divisor).astype(q.dtype), values)
  lse = jnp.where(total > 0, top + jnp.log(divisor), jnp.inf)
  return out.reshape(P, C, N, H), lse.reshape(P, C, N)
