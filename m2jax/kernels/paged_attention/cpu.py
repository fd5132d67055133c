"""Paged attention on CPUs: gathers rows' pages, then matmuls or tree attention.

Plain XLA, which other platforms also run where their kernel does not support the
tensors. Scores of a short chunk are materialised, for the positions of its table only;
a long one runs tree attention's loop over blocks, which skips unseen blocks.

Axes: P rows, C new tokens of a row, S positions, N query heads, K key/value heads, G
query heads per K, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float, Int
from m2jax.kernels import tree_attention
from m2jax.kernels.paged_attention.cache import Cache, gather, visible
from m2jax.kernels.tree_attention import cpu as tree_cpu

LONG_CHUNK = 512  # new tokens of a row from which on scores are not stored


def attend(q, cache: Cache, position, subtree_end=None, *, scale):
  """Same contract as `reference.attend`; positions of a table must be finite."""
  keys, values = (x.astype(q.dtype) for x in gather(cache))
  if q.shape[1] >= LONG_CHUNK:
    return _long_chunk(q, keys, values, position, subtree_end, scale)
  keys = keys.swapaxes(2, 3)
  return short_chunk(q, keys, values, position, subtree_end, scale=scale)


def short_chunk(
  q: Float[Array, 'P C N H'],
  keys: Float[Array, 'K P H S'],
  values: Float[Array, 'K P S H'],
  position: Int[Array, 'P C'],
  subtree_end: Int[Array, 'P C'] | None = None,
  *,
  scale: float | None = None,
) -> tuple[Float[Array, 'P C N H'], Float[Array, 'P C N']]:
  """Output and logsumexp for keys and values in order; softmax at least fp32."""
  (P, C, heads, H), (K, _, _, S) = q.shape, keys.shape
  scale = H**-0.5 if scale is None else scale
  wide = jnp.promote_types(q.dtype, jnp.float32)
  # One matrix per (kv head, row): on CPU several times as fast as einsum's order.
  q = q.reshape(P, C, K, heads // K, H).transpose(2, 0, 1, 3, 4).reshape(K, P, -1, H)
  scores = jnp.einsum('kpqh,kphs->kpqs', q, keys, preferred_element_type=wide)
  scores = scores.reshape(K, P, C, heads // K, S) * scale
  # A query at -1 reads position 0, and gets 0 below.
  seen = visible(jnp.maximum(position, 0), S, subtree_end)
  scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1)
  weights = weights.astype(q.dtype).reshape(K, P, -1, S)
  out = jnp.einsum('kpqs,kpsh->kpqh', weights, values)
  out = out.reshape(K, P, C, -1, H).transpose(1, 2, 0, 3, 4).reshape(P, C, heads, H)
  lse = jax.nn.logsumexp(scores, axis=-1).transpose(1, 2, 0, 3).reshape(P, C, heads)
  nonempty = (position >= 0)[:, :, None]
  return jnp.where(nonempty[..., None], out, 0), jnp.where(nonempty, lse, jnp.inf)


def _long_chunk(q, keys, values, position, subtree_end, scale):
  """Uses tree attention; positions after a row's last are padding."""
  S = keys.shape[2]
  position = jnp.minimum(position, S - 1)
  end = jnp.full((len(q), S), S, jnp.int32)
  if subtree_end is not None:
    start = position[:, :1]
    at = start + jnp.arange(q.shape[1])
    row = jnp.arange(len(q))[:, None]
    end = end.at[row, at].set(start + subtree_end, mode='drop')
  last = jnp.max(position, axis=1, keepdims=True)
  end = jnp.where(jnp.arange(S) <= last, end, 0).astype(jnp.int32)
  visibility = tree_attention.Visibility(end, position.astype(jnp.int32))
  keys, values = (x.transpose(1, 2, 0, 3) for x in (keys, values))
  out, lse = tree_cpu.forward(q, keys, values, visibility, scale=scale)
  return out, lse.swapaxes(1, 2)
