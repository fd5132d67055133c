"""Attention over contiguous keys with a mask by position, for MTP modules.

A query sees the keys up to its position that are `visible` [P, S], and its own. At a
position below 0, of padding, the result is undefined but finite.

Axes: P rows, C new tokens of a row, S positions, K key/value heads, G query heads per
K, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.kernels import tree_attention

# Rows of at least this many new tokens use tree attention, which stores no scores.
_LONG_CHUNK = 512


def attend(q, keys, values, position, visible) -> jax.Array:
  """q [P, C, K·G, H], keys, values [K, P, S, H], position [P, C] → [P, C, K·G, H]."""
  if q.shape[1] >= _LONG_CHUNK:
    return _long_chunk(q, keys, values, position, visible)
  return short_chunk(q, keys.swapaxes(2, 3), values, position, visible)


def short_chunk(q, keys, values, position, visible) -> jax.Array:
  """The same for keys [K, P, H, S]; scores and softmax at least fp32."""
  (P, C, heads, H), (K, _, _, S) = q.shape, keys.shape
  wide = jnp.promote_types(q.dtype, jnp.float32)
  # One matrix per (kv head, row): on CPU several times as fast as einsum's order.
  q = q.reshape(P, C, K, heads // K, H).transpose(2, 0, 1, 3, 4).reshape(K, P, -1, H)
  scores = jnp.einsum('kpqh,kphs->kpqs', q, keys, preferred_element_type=wide)
  scores = scores.reshape(K, P, C, heads // K, S) * H**-0.5
  position = jnp.clip(position, 0, S - 1)[..., None]
  own = jnp.arange(S) == position  # [P, C, S]
  seen = own | (visible[:, None] & (jnp.arange(S) <= position))
  weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, -jnp.inf), axis=-1)
  weights = weights.astype(q.dtype).reshape(K, P, -1, S)
  out = jnp.einsum('kpqs,kpsh->kpqh', weights, values)
  return out.reshape(K, P, C, -1, H).transpose(1, 2, 0, 3, 4).reshape(P, C, heads, H)


def _long_chunk(q, keys, values, position, visible) -> jax.Array:
  """Uses tree attention; a query that sees no key, not even its own, gets 0."""
  S = keys.shape[2]
  last = jnp.max(position, axis=1, keepdims=True)
  live = (jnp.arange(S) <= last) & visible
  subtree_end = jnp.where(live, S, 0).astype(jnp.int32)
  position = jnp.clip(position, 0, S - 1).astype(jnp.int32)
  visibility = tree_attention.Visibility(subtree_end, position)
  keys, values = (x.transpose(1, 2, 0, 3) for x in (keys, values))
  return tree_attention.attend(q, keys, values, visibility)
