"""The trunk over cached chains: new tokens see the cache and the tail before them.

The same blocks as `model.trunk`, with attention over two parts that share one softmax:
the cached prefix, read only, and the tail, the entries made since it was gathered.
Prefill is a tail of a whole chunk, decoding one of a few steps that fills one by one.
With a mesh it works on shards, inside `shard_map`: rows, heads, experts and words of
this device (`rollout.on_mesh`).

Axes: P rows, C new tokens of a row, S cached positions, N tail positions, T = P·C,
D model, L layers, K key/value heads, G query heads per K, H head dim.
"""

from __future__ import annotations

import operator

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

# From this many new tokens a row on, scores are not stored: forest attention instead.
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
  lengths[p] and tail positions up to offset + i, where its own entry is written.

  Args:
    tokens: [P, C] int32.
    cached: k [L, P, K, H, S], v [L, P, K, S, H]; like the tail a tuple over layers when
      cfg.unroll_layers.
    lengths: [P] int32, cached positions that are visible.
    tail: offset entries of it are in use; offset + C <= N.
    sharding: all else is this device's part where it has a mesh.

  Returns:
    hidden [P, C, D] after the final norm, and the tail with C more entries, the
    experts' ids among them where it has room for them.
  """
  params = variables['params']
  P, C = tokens.shape
  index = offset + jnp.arange(C)
  position = (lengths[:, None] + index).reshape(-1)
  tables = rope.tables(position, cfg.rotary_dim, cfg.rope_theta, cfg.dtype)
  S = (cached[0] if cfg.unroll_layers else cached).k.shape[-1]
  N = (tail[0] if cfg.unroll_layers else tail).k.shape[-3]
  before = jnp.arange(S) < lengths[:, None]  # [P, S]
  if C < _LONG_CHUNK:
    recent = jnp.arange(N) <= index[:, None]  # [C, N]
    seen = jnp.concatenate(
      [
        jnp.broadcast_to(before[:, None], (P, C, S)),
        jnp.broadcast_to(recent, (P, C, N)),
      ],
      axis=-1,
    )
  else:  # a row of S + N tokens, of which cached ones past the length are padding
    recent = jnp.broadcast_to(jnp.arange(N) < offset + C, (P, N))
    live = jnp.concatenate([before, recent], axis=1)
    subtree_end = jnp.where(live, S + N, 0).astype(jnp.int32)
    q_index = jnp.broadcast_to((S + index).astype(jnp.int32), (P, C))
    visibility = tree_attention.Visibility(subtree_end, q_index)

  def body(x, layer):
    p, bias, cached, tail = layer

    def attend(x, p):
      qkv = attention.project(x, p, cfg, tables, sharding)
      q, k, v = (a.reshape(P, C, *a.shape[1:]) for a in qkv)
      longer = Tail(
        lax.dynamic_update_slice_in_dim(tail.k, k, offset, axis=1),
        lax.dynamic_update_slice_in_dim(tail.v, v, offset, axis=1),
      )
      if C < _LONG_CHUNK:
        out = _attend(q, cached, longer, seen)
      else:
        keys = jnp.concatenate([cached.k.transpose(0, 3, 1, 2), longer.k], axis=1)
        values = jnp.concatenate([cached.v.transpose(0, 2, 1, 3), longer.v], axis=1)
        keys, values = keys.astype(q.dtype), values.astype(q.dtype)
        out = tree_attention.attend(q, keys, values, visibility)
      out = out.reshape(P * C, -1) @ p['o'].astype(x.dtype)
      return sharding.psum(out, 'heads'), longer

    ones = jnp.ones_like(position)
    x, longer, routing = block.apply(x, p, bias, cfg, attend, ones, sharding=sharding)
    if tail.experts is not None:
      ids = routing.ids.reshape(P, C, -1).astype(EXPERT_DTYPE)
      ids = lax.dynamic_update_slice_in_dim(tail.experts, ids, offset, axis=1)
      longer = longer._replace(experts=ids)
    return x, longer

  x = embed(cfg, params, tokens, sharding)
  weights = (params['layers'], variables['router']['layers'])
  if cfg.unroll_layers:
    tails = []
    for l in range(cfg.num_layers):
      p, bias = jax.tree.map(operator.itemgetter(l), weights)
      x, one = body(x, (p, bias, cached[l], tail[l]))
      tails.append(one)
    tail = tuple(tails)
  else:
    x, tail = lax.scan(body, x, (*weights, cached, tail))
  x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps)
  return x.reshape(P, C, -1), tail


def _attend(q, cached: KvCache, tail: Tail, seen) -> jax.Array:
  """q [P, C, K·G, H], cached k [P, K, H, S], v [P, K, S, H], tail [P, N, K, H] each,
  seen [P, C, S + N] → [P, C, K·G, H]; scores and softmax at least fp32."""
  P, C, heads, H = q.shape
  K, S = cached.k.shape[1], cached.k.shape[-1]
  wide = jnp.promote_types(q.dtype, jnp.float32)
  # One matrix per (row, kv head): on CPU several times as fast as einsum's own order.
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
