"""Grouped-query attention with flat QK-norm and partial RoPE (m2-and-forge.md §1.4).

One RMSNorm over all N·H query channels and one over all K·H key channels, before the
head split and before RoPE. Activations are [T, D] matrices: one matmul a projection.
With heads split over devices a norm is still over all heads: the mean squares of q and
k, two numbers a token, are averaged over the shards.

The projections are here, for training and rollout alike; the keys that a token attends
to come from a key/value backend, `Keys`.

Axes: B rows, S tokens, T = B·S, P tokens of a cached prefix, D model, N query heads,
K key/value heads, H head dim, R rotary dim, half = R/2; sizes are those of this
device's shard.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.kernels import block_fp8, invariant, tree_attention
from m2jax.kernels.qk_norm_rope import norm_rope
from m2jax.layers import rope
from m2jax.layers.norm import mean_square
from m2jax.layers.taps import tap
from m2jax.sharding import ONE_DEVICE, Sharding

Tables = tuple[Float[Array, 'T half'], Float[Array, 'T half']]


class Keys(Protocol):
  """A key/value backend: the keys that the tokens of one pass attend to.

  Attributes:
    tables: cos, sin of RoPE at the tokens' positions.
    carry: what each layer passes to the next, such as a cache that all write; or None.
    stacked: what a layer has of its own, with leading axis L; or None.
  """

  @property
  def tables(self) -> Tables: ...

  @property
  def carry(self) -> Any: ...

  @property
  def stacked(self) -> Any: ...

  def attention(self, cfg: ModelConfig, window: int | None) -> Callable:
    """Attention of the layers with this window, prepared once for all of them.

    Returns:
      (q [T, N, H], k and v [T, K, H] of the tokens, carry=, layer= its slice of
      `stacked`) → (output of T·N·H elements, (carry, new entries or None)).
    """


@dataclasses.dataclass(frozen=True)
class ForestKeys:
  """The forest's own tokens, after those of a cached prefix.

  With a row's tokens split over devices, T are this device's and `visibility` has all
  keys of the row, which are gathered.

  Attributes:
    tables: cos, sin of RoPE.
    visibility: which keys each query sees: those of the prefix, then the tokens'.
    sharding: the mesh.
    stacked: k, v of the prefix; new entries are returned if there is one.
  """

  tables: Tables
  visibility: tree_attention.Visibility
  sharding: Sharding
  stacked: tuple[Float[Array, 'L B P K H'], Float[Array, 'L B P K H']] | None = None
  carry: None = None

  def from_position(self, depth) -> ForestKeys:
    """Without the keys at positions below `depth`."""
    seen = self.visibility
    end = jnp.where(seen.k_position >= depth, seen.subtree_end, 0)
    seen = dataclasses.replace(seen, subtree_end=end)
    return dataclasses.replace(self, visibility=seen)

  def attention(self, cfg: ModelConfig, window: int | None) -> Callable:
    """See `Keys`."""
    seen = dataclasses.replace(self.visibility, window=window, sinks=cfg.sinks)
    rows_of_queries, rows_of_keys = seen.q_position.shape, seen.subtree_end.shape
    like = lambda *shape: jax.ShapeDtypeStruct((*shape, cfg.head_dim), cfg.dtype)
    implementation = 'invariant' if cfg.invariant else None
    if not cfg.invariant:
      seen = tree_attention.prepare(
        seen,
        like(*rows_of_queries, cfg.num_heads),
        like(*rows_of_keys, cfg.num_kv_heads),
      )

    def attend(q, k, v, carry, layer):
      q, k, v = (a.reshape(*rows_of_queries, *a.shape[1:]) for a in (q, k, v))
      new = None if layer is None else (k, v)
      if layer is not None:
        k, v = (jnp.concatenate(pair, axis=1) for pair in zip(layer, new, strict=True))
      k, v = self.sharding.gather_tokens(k), self.sharding.gather_tokens(v)
      out = tree_attention.attend(q, k, v, seen, implementation=implementation)
      return out, (carry, new)

    return attend


def forest_keys(
  cfg: ModelConfig,
  batch: Forest,
  sharding: Sharding = ONE_DEVICE,
  prefix: tuple[Float[Array, 'L B P K H'], Float[Array, 'L B P K H']] | None = None,
) -> ForestKeys:
  """The keys of whole rows, which may continue a cached prefix."""
  position = jnp.asarray(batch.position)
  tables = rope.tables(
    *(position.reshape(-1), cfg.rotary_dim, cfg.rope_theta, cfg.dtype, cfg.invariant)
  )
  rows, length = position.shape
  q_index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), position.shape)
  k_position = position
  if sharding.size('tokens') > 1:
    q_index = jnp.broadcast_to(sharding.token_index(length), position.shape)
  elif prefix is not None:
    slots = prefix[0].shape[2]
    q_index = jnp.arange(length, dtype=jnp.int32) + slots
    q_index = jnp.broadcast_to(q_index, position.shape)
    cached = jnp.broadcast_to(jnp.arange(slots, dtype=position.dtype), (rows, slots))
    k_position = jnp.concatenate([cached, position], axis=1)
  visibility = tree_attention.Visibility(
    sharding.gather_tokens(jnp.asarray(batch.subtree_end)),
    q_index,
    q_position=position,
    k_position=sharding.gather_tokens(k_position),
  )
  return ForestKeys(tables, visibility, sharding, prefix)


def apply(
  x: Float[Array, 'Tr D'],
  p,
  cfg: ModelConfig,
  tables: Tables,
  attend: Callable[..., tuple[Array, Any]],
  sharding: Sharding = ONE_DEVICE,
) -> tuple[Float[Array, 'Tr D'], Any]:
  """What attention adds to the residual stream, and what `attend` returns besides.

  x and the output have this device's part of the residual stream; queries, keys and
  values are of all T tokens.

  Args:
    x: activations after the norm.
    p: the block's parameters.
    cfg: the model.
    tables: cos, sin of RoPE.
    attend: (q [T, N, H], k, v [T, K, H]) → (output of T·N·H elements, extra).
    sharding: the mesh.
  """
  x_TxD = sharding.gather_residual(x)
  dot = lambda x, w: block_fp8.dot(x, w, cfg.matmuls)
  rows = functools.partial(invariant.rows, tiled=cfg.invariant)
  q, k, v = rows(lambda x, p: [dot(x, w) for w in p], x_TxD, [p[n] for n in 'qkv'])

  def rotated(tokens, scales):
    heads, tables, variances = tokens
    static = dict(head_dim=cfg.head_dim, eps=cfg.rms_norm_eps)
    return [
      norm_rope(x, scale, *tables, variance=variance, **static)
      for x, scale, variance in zip(heads, scales, variances, strict=True)
    ]

  tokens = (q, k), tables, _variances(q, k, sharding)
  q, k = rows(rotated, tokens, (p['q_norm'], p['k_norm']))
  q, k, v = tap('queries', q), tap('keys', k), tap('values', v)
  heads = (a.reshape(len(a), -1, cfg.head_dim) for a in (q, k, v))
  out, extra = attend(*heads)
  out_TxQ = tap('attention', out.reshape(len(x_TxD), -1))
  out_TxD = rows(dot, out_TxQ, p['o'])
  return sharding.sum_to_residual(out_TxD, 'heads'), extra


def _variances(q, k, sharding: Sharding):
  """Mean squares over the channels of all shards, in one all-reduce; None if not split.

  Shards have equal sizes, so the mean of their means is the mean.
  """
  if sharding.size('heads') == 1:
    return None, None
  both = jnp.concatenate([mean_square(q), mean_square(k)], axis=-1)
  return jnp.split(sharding.pmean(both, 'heads'), 2, axis=-1)
