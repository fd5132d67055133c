"""The trunk over cached chains: new tokens see cached positions and the tail before them.

The same blocks as `model.trunk`, with attention split in two parts that share one softmax:
the cached prefix, read only, and the tail, the entries made since it was gathered. Prefill
is a tail of a whole chunk, decoding one of a few steps that fills token by token.

Axes: P rows, C new tokens of a row, S cached positions, N tail positions, T = P·C,
D model, L layers, K key/value heads, G query heads per K, H head dim.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from m2jax.config import ModelConfig
from m2jax.layers import attention
from m2jax.layers import block
from m2jax.layers import rope
from m2jax.layers.norm import rms_norm
from m2jax.rollout.kv_cache import KvCache
from m2jax.rollout.kv_cache import Tail


def empty_tail(cfg: ModelConfig, rows: int, tokens: int) -> Tail:
  """[L, P, N, K, H] of zeros in the activations' dtype."""
  shape = (cfg.num_layers, rows, tokens, cfg.num_kv_heads, cfg.head_dim)
  return Tail(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))


def extend(
  cfg: ModelConfig,
  variables,
  tokens: jax.Array,
  cached: KvCache,
  lengths: jax.Array,
  tail: Tail,
  offset: jax.Array | int,
) -> tuple[jax.Array, Tail]:
  """Consumes C tokens of each row.

  Token i of row p has position lengths[p] + offset + i. It sees cached positions below
  lengths[p] and tail positions up to offset + i, where its own entry is written.

  Args:
    tokens: [P, C] int32.
    cached: k [L, P, K, H, S], v [L, P, K, S, H].
    lengths: [P] int32, cached positions that are visible.
    tail: offset entries of it are in use; offset + C <= N.

  Returns:
    hidden [P, C, D] after the final norm, and the tail with C more entries.
  """
  params = variables['params']
  P, C = tokens.shape
  index = offset + jnp.arange(C)
  position = (lengths[:, None] + index).reshape(-1)
  tables = rope.tables(position, cfg.rotary_dim, cfg.rope_theta, cfg.dtype)
  S, N = cached.k.shape[-1], tail.k.shape[2]
  before = jnp.arange(S) < lengths[:, None]  # [P, S]
  recent = jnp.arange(N) <= index[:, None]  # [C, N]
  seen = jnp.concatenate(
    [
      jnp.broadcast_to(before[:, None], (P, C, S)),
      jnp.broadcast_to(recent, (P, C, N)),
    ],
    axis=-1,
  )

  def body(x, layer):
    p, bias, cached, tail = layer

    def attend(x, p):
      q, k, v = (a.reshape(P, C, *a.shape[1:]) for a in attention.project(x, p, cfg, tables))
      tail_k = lax.dynamic_update_slice_in_dim(tail.k, k, offset, axis=1)
      tail_v = lax.dynamic_update_slice_in_dim(tail.v, v, offset, axis=1)
      out = _attend(q, cached, Tail(tail_k, tail_v), seen)
      return out.reshape(P * C, -1) @ p['o'].astype(x.dtype), Tail(tail_k, tail_v)

    x, tail, _ = block.apply(x, p, bias, cfg, attend, jnp.ones_like(position))
    return x, tail

  x = jnp.take(params['embed'], tokens.reshape(-1), axis=0).astype(cfg.dtype)
  layers = (params['layers'], variables['router']['layers'], cached, tail)
  if cfg.unroll_layers:
    tails = []
    for l in range(cfg.num_layers):
      x, one = body(x, jax.tree.map(lambda a: a[l], layers))
      tails.append(one)
    tail = jax.tree.map(lambda *a: jnp.stack(a), *tails)
  else:
    x, tail = lax.scan(body, x, layers)
  x = rms_norm(x, params['final_norm'], cfg.rms_norm_eps)
  return x.reshape(P, C, -1), tail


def _attend(q, cached: KvCache, tail: Tail, seen) -> jax.Array:
  """q [P, C, K·G, H], cached k [P, K, H, S], v [P, K, S, H], tail [P, N, K, H] each,
  seen [P, C, S + N] → [P, C, K·G, H]; scores and softmax at least fp32."""
  P, C, heads, H = q.shape
  K, S = cached.k.shape[1], cached.k.shape[-1]
  q = q.reshape(P, C, K, heads // K, H)
  wide = jnp.promote_types(q.dtype, jnp.float32)
  scores = jnp.concatenate(
    [
      jnp.einsum('pckgh,pkhs->pkgcs', q, cached.k, preferred_element_type=wide),
      jnp.einsum('pckgh,pnkh->pkgcn', q, tail.k, preferred_element_type=wide),
    ],
    axis=-1,
  )
  scores = jnp.where(seen[:, None, None], scores * H**-0.5, -jnp.inf)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  out = jnp.einsum('pkgcs,pksh->pckgh', weights[..., :S], cached.v.astype(q.dtype))
  out += jnp.einsum('pkgcn,pnkh->pckgh', weights[..., S:], tail.v)
  return out.reshape(P, C, heads, H)
