"""The trunk over cached chains: new tokens see the cache and the tail before them.

The blocks are those of `model.trunk`, with one softmax over two parts: the cached
prefix, which is read-only, and the tail, the entries added since the prefix was
gathered. In prefill the tail is a whole chunk; in decoding it has a few positions,
which are filled one by one. On a mesh the functions run inside `shard_map`, on this
device's rows, heads, experts and part of the vocabulary (`rollout.calls`).

Axes: P rows, C new tokens of a row, S cached positions, N tail positions, T = P·C,
D model, L layers, K key/value heads, G query heads per K, H head dim.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.config import ModelConfig
from m2jax.kernels import tree_attention
from m2jax.layers import attention, block, rope
from m2jax.layers.embed import embed
from m2jax.layers.norm import rms_norm
from m2jax.rollout.kv_cache import EXPERT_DTYPE, KvCache, Tail
from m2jax.sharding import ONE_DEVICE, Sharding

# Rows of at least this many new tokens use tree attention, which stores no scores.
_LONG_CHUNK = 512


def extend(
  cfg: ModelConfig,
  variables,
  tokens: jax.Array,
  cached: KvCache | tuple[KvCache, ...],
  lengths: jax.Array,
  tail: Tail | tuple[Tail, ...],
  offset: jax.Array | int,
  sharding: Sharding = ONE_DEVICE,
) -> tuple[jax.Array, Tail]:
  """Consumes C tokens of each row.

  Token i of row p has position lengths[p] + offset + i. It sees cached positions below
  lengths[p] and tail positions up to offset + i, its own.

  Args:
    tokens: [P, C] int32.
    cached: k [L, P, K, H, S], v [L, P, K, S, H]; like the tail a tuple over layers when
      cfg.unroll_layers.
    lengths: [P] int32, cached positions that are visible.
    tail: its first `offset` entries are in use; offset + C <= N.
    sharding: with a mesh, all other arguments are this device's part.

  Returns:
    hidden [P, C, D] after the final norm, and the tail with C more entries, including
    expert ids if the tail has an array for them.
  """
  params, (P, C) = variables['params'], tokens.shape
  index = offset + jnp.arange(C)
  position = (lengths[:, None] + index).reshape(-1)
  tables = rope.tables(position, cfg.rotary_dim, cfg.rope_theta, cfg.dtype)
  S = (cached[0] if cfg.unroll_layers else cached).k.shape[-1]
  N = (tail[0] if cfg.unroll_layers else tail).k.shape[-3]
  attention_over = _short_chunk if C < _LONG_CHUNK else _long_chunk
  over_cache_and_tail = attention_over(lengths, index, S, N)

  def body(x, layer):
    p, bias, cached, tail = layer

    def attend(x, p):
      qkv = attention.project(x, p, cfg, tables, sharding)
      q, k, v = (a.reshape(P, C, *a.shape[1:]) for a in qkv)
      longer = _extended(tail, offset, k=k, v=v)
      out = over_cache_and_tail(q, cached, longer)
      out = out.reshape(P * C, -1) @ p['o'].astype(x.dtype)
      return sharding.psum(out, 'heads'), longer

    ones = jnp.ones_like(position)
    x, longer, routing = block.apply(x, p, bias, cfg, attend, ones, sharding=sharding)
    if tail.experts is not None:
      ids = routing.ids.reshape(P, C, -1).astype(EXPERT_DTYPE)
      longer = _extended(longer, offset, experts=ids)
    return x, longer

  x = embed(cfg, params, tokens, sharding)
  weights = (params['layers'], variables['router']['layers'])
  x, tail = _through_layers(cfg, body, x, weights, cached, tail)
  x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps)
  return x.reshape(P, C, -1), tail


def _extended(tail: Tail, offset, **entries: jax.Array) -> Tail:
  """The tail with new entries [P, C, …] of the named arrays at `offset`."""
  return tail._replace(
    **{
      name: lax.dynamic_update_slice_in_dim(getattr(tail, name), new, offset, axis=1)
      for name, new in entries.items()
    }
  )


def _through_layers(cfg: ModelConfig, body, x, weights, cached, tail):
  """Applies `body` to every layer, unrolled or scanned; returns x and the tail."""
  if not cfg.unroll_layers:
    return lax.scan(body, x, (*weights, cached, tail))
  tails = []
  for l in range(cfg.num_layers):
    p, bias = jax.tree.map(operator.itemgetter(l), weights)
    x, longer = body(x, (p, bias, cached[l], tail[l]))
    tails.append(longer)
  return x, tuple(tails)


def _short_chunk(lengths, index, S: int, N: int) -> Callable[..., jax.Array]:
  """Attention (q, cached, tail) → out of tokens at tail positions `index` [C]."""
  P, C = len(lengths), len(index)
  before = jnp.arange(S) < lengths[:, None]  # [P, S]
  recent = jnp.arange(N) <= index[:, None]  # [C, N]
  seen = jnp.concatenate(
    [
      jnp.broadcast_to(before[:, None], (P, C, S)),
      jnp.broadcast_to(recent, (P, C, N)),
    ],
    axis=-1,
  )
  return lambda q, cached, tail: _attend(q, cached, tail, seen)


def _long_chunk(lengths, index, S: int, N: int) -> Callable[..., jax.Array]:
  """The same by tree attention, over rows of S + N tokens.

  Cached positions at or beyond the length, and tail positions not yet in use, are
  padding.
  """
  P, C = len(lengths), len(index)
  before = jnp.arange(S) < lengths[:, None]  # [P, S]
  recent = jnp.broadcast_to(jnp.arange(N) <= index[-1], (P, N))
  live = jnp.concatenate([before, recent], axis=1)
  subtree_end = jnp.where(live, S + N, 0).astype(jnp.int32)
  q_index = jnp.broadcast_to((S + index).astype(jnp.int32), (P, C))
  visibility = tree_attention.Visibility(subtree_end, q_index)

  def attend(q, cached, tail):
    keys = jnp.concatenate([cached.k.transpose(0, 3, 1, 2), tail.k], axis=1)
    values = jnp.concatenate([cached.v.transpose(0, 2, 1, 3), tail.v], axis=1)
    keys, values = keys.astype(q.dtype), values.astype(q.dtype)
    return tree_attention.attend(q, keys, values, visibility)

  return attend


def _attend(q, cached: KvCache, tail: Tail, seen) -> jax.Array:
  """q [P, C, K·G, H], cached k [P, K, H, S], v [P, K, S, H], tail [P, N, K, H] each,
  seen [P, C, S + N] → [P, C, K·G, H]; scores and softmax at least fp32."""
  P, C, heads, H = q.shape
  K, S = cached.k.shape[1], cached.k.shape[-1]
  wide = jnp.promote_types(q.dtype, jnp.float32)
  # One matrix per (row, kv head): on CPU several times as fast as einsum's order.
  q = q.reshape(P, C, K, heads // K, H).transpose(0, 2, 1, 3, 4).reshape(P, K, -1, H)
  scores = jnp.concatenate(
    [
      jnp.einsum('pkqh,pkhs->pkqs', q, cached.k, preferred_element_type=wide),
      jnp.einsum('pkqh,pnkh->pkqn', q, tail.k, preferred_element_type=wide),
    ],
    axis=-1,
  )
  scores = scores.reshape(P, K, C, heads // K, -1) * H**-0.5
  scores = jnp.where(seen[:, None, :, None], scores, -jnp.inf)
  weights = (
    jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(P, K, q.shape[2], -1)
  )
  out = jnp.einsum('pkqs,pksh->pkqh', weights[..., :S], cached.v.astype(q.dtype))
  out += jnp.einsum('pkqn,pnkh->pkqh', weights[..., S:], tail.v.astype(q.dtype))
  return out.reshape(P, K, C, -1, H).transpose(0, 2, 1, 3, 4).reshape(P, C, heads, H)
