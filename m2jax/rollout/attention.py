"""Attention of new tokens over the stored keys and values of their rows.

Axes: P rows, C new tokens of a row, S positions, K key/value heads, G query heads per
K, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.kernels import tree_attention

# Rows of at least this many new tokens use tree attention, which stores no scores.
_LONG_CHUNK = 512


def attend(q, keys, values, position) -> jax.Array:
  """q [P, C, K·G, H], keys, values [K, P, S, H], position [P, C] → [P, C, K·G, H]."""
  if q.shape[1] >= _LONG_CHUNK:
    return _long_chunk(q, keys, values, position)
  return short_chunk(q, keys.swapaxes(2, 3), values, position)


def short_chunk(q, keys, values, position) -> jax.Array:
  """The same for keys [K, P, H, S]; scores and softmax at least fp32."""
  (P, C, heads, H), (K, _, _, S) = q.shape, keys.shape
  wide = jnp.promote_types(q.dtype, jnp.float32)
  # One matrix per (kv head, row): on CPU several times as fast as einsum's order.
  q = q.reshape(P, C, K, heads // K, H).transpose(2, 0, 1, 3, 4).reshape(K, P, -1, H)
  scores = jnp.einsum('kpqh,kphs->kpqs', q, keys, preferred_element_type=wide)
  scores = scores.reshape(K, P, C, heads // K, S) * H**-0.5
  seen = jnp.arange(S) <= position[..., None]  # [P, C, S]
  weights = jax.nn.softmax(jnp.where(seen[:, :, None], scores, -jnp.inf), axis=-1)
  weights = weights.astype(q.dtype).reshape(K, P, -1, S)
  out = jnp.einsum('kpqs,kpsh->kpqh', weights, values)
  return out.reshape(K, P, C, -1, H).transpose(1, 2, 0, 3, 4).reshape(P, C, heads, H)


def _long_chunk(q, keys, values, position) -> jax.Array:
  """By tree attention; positions after a row's last are padding."""
  S = keys.shape[2]
  live = jnp.arange(S) <= position[:, -1:]
  subtree_end = jnp.where(live, S, 0).astype(jnp.int32)
  visibility = tree_attention.Visibility(subtree_end, position.astype(jnp.int32))
  keys, values = (x.transpose(1, 2, 0, 3) for x in (keys, values))
  return tree_attention.attend(q, keys, values, visibility)
