"""Grouped-query attention with flat QK-norm and partial RoPE (m2-and-forge.md §1.4).

One RMSNorm over all N·H query channels and one over all K·H key channels, before the
head split and before RoPE. Activations are [T, D] matrices: one matmul a projection.
With heads split over devices a norm is still over all heads: the mean squares of q and
k, two numbers a token, are averaged over the shards.

Axes: B rows, S tokens, T = B·S, P tokens of a cached prefix, D model, N query heads,
K key/value heads, H head dim, R rotary dim, half = R/2; sizes are those of this
device's shard.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float
from m2jax.config import ModelConfig
from m2jax.forest import Forest
from m2jax.kernels import block_fp8, tree_attention
from m2jax.kernels.qk_norm_rope import norm_rope
from m2jax.layers import rope
from m2jax.layers.norm import mean_square
from m2jax.sharding import ONE_DEVICE, Sharding


class Metadata(NamedTuple):
  """What attention needs of a batch besides activations; the same for all layers.

  Attributes:
    tables: cos, sin of RoPE.
    visibility: which keys each query sees.
  """

  tables: tuple[Float[Array, 'T half'], Float[Array, 'T half']]
  visibility: tree_attention.Visibility


def metadata(
  cfg: ModelConfig, batch: Forest, sharding: Sharding, prefix_slots: int = 0
) -> Metadata:
  """Of whole rows: `prefix_slots` cached tokens, then the batch's."""
  position = jnp.asarray(batch.position)
  tables = rope.tables(position.reshape(-1), cfg.rotary_dim, cfg.rope_theta, cfg.dtype)
  rows, length = position.shape
  q_index, k_position = None, position
  if sharding.size('tokens') > 1:
    q_index = jnp.broadcast_to(sharding.token_index(length), position.shape)
  elif prefix_slots:
    slots = jnp.arange(prefix_slots, dtype=position.dtype)
    q_index = jnp.arange(length, dtype=jnp.int32) + prefix_slots
    q_index = jnp.broadcast_to(q_index, position.shape)
    slots = jnp.broadcast_to(slots, (rows, prefix_slots))
    k_position = jnp.concatenate([slots, position], axis=1)
  visibility = tree_attention.Visibility(
    sharding.gather_tokens(jnp.asarray(batch.subtree_end)),
    q_index,
    q_position=position,
    k_position=sharding.gather_tokens(k_position),
  )
  return Metadata(tables, visibility)


def of_layer(metadata: Metadata, cfg: ModelConfig, window: int | None) -> Metadata:
  """With the visibility in layers of this window, prepared for the kernels once."""
  visibility = dataclasses.replace(metadata.visibility, window=window, sinks=cfg.sinks)
  q, k = (
    jax.ShapeDtypeStruct((*index.shape, heads, cfg.head_dim), cfg.dtype)
    for index, heads in (
      (visibility.q_position, cfg.num_heads),
      (visibility.subtree_end, cfg.num_kv_heads),
    )
  )
  visibility = tree_attention.prepare(visibility, q, k)
  return metadata._replace(visibility=visibility)


def project(
  x: Float[Array, 'T D'],
  p,
  cfg: ModelConfig,
  tables: tuple[Float[Array, 'T half'], Float[Array, 'T half']],
  sharding: Sharding = ONE_DEVICE,
) -> tuple[Float[Array, 'T N H'], Float[Array, 'T K H'], Float[Array, 'T K H']]:
  """Queries, keys and values of x, normed and rotated.

  For attention other than `attend`, such as the rollout engine's over its cache.

  Raises:
    ValueError: the model has sliding windows, which only `attend` supports.
  """
  if cfg.window is not None:
    raise ValueError(
      f'ModelConfig.window={cfg.window}: a model with sliding windows can be trained '
      'and scored, but not served: cached attention has no windows'
    )
  return _project(x, p, cfg, tables, sharding)


def _project(x, p, cfg: ModelConfig, tables, sharding: Sharding):
  q, k, v = (block_fp8.dot(x, p[name], cfg.matmuls) for name in ('q', 'k', 'v'))
  q_variance, k_variance = _variances(q, k, sharding)
  static = dict(head_dim=cfg.head_dim, eps=cfg.rms_norm_eps)
  q = norm_rope(q, p['q_norm'], *tables, variance=q_variance, **static)
  k = norm_rope(k, p['k_norm'], *tables, variance=k_variance, **static)
  return tuple(a.reshape(len(a), -1, cfg.head_dim) for a in (q, k, v))


def _variances(q, k, sharding: Sharding):
  """Mean squares over the channels of all shards, in one all-reduce; None if not split.

  Shards have equal sizes, so the mean of their means is the mean.
  """
  if sharding.size('heads') == 1:
    return None, None
  both = jnp.concatenate([mean_square(q), mean_square(k)], axis=-1)
  return jnp.split(sharding.pmean(both, 'heads'), 2, axis=-1)


def attend(
  x: Float[Array, 'T D'],
  p,
  cfg: ModelConfig,
  metadata: Metadata,
  sharding: Sharding = ONE_DEVICE,
  *,
  prefix: tuple[Float[Array, 'B P K H'], Float[Array, 'B P K H']] | None = None,
) -> tuple[
  Float[Array, 'T D'], tuple[Float[Array, 'B S K H'], Float[Array, 'B S K H']]
]:
  """Forest attention's output for x, and the new keys and values.

  x and the output have this device's part of the residual stream; queries, keys and
  values are of all T tokens. With a row's tokens split over devices, T are this
  device's and `metadata.visibility` has all keys of the row, which are gathered.

  Args:
    x: activations after the norm.
    p: the block's parameters.
    cfg: the model.
    metadata: of the batch; its keys are those of the prefix, then the tokens'.
    sharding: the mesh.
    prefix: cached k, v of the path that the tokens continue.
  """
  visibility = metadata.visibility
  x = sharding.gather_residual(x)
  q, k, v = _project(x, p, cfg, metadata.tables, sharding)
  rows = len(visibility.subtree_end)
  q, k, v = (a.reshape(rows, -1, *a.shape[1:]) for a in (q, k, v))
  new = k, v
  if prefix is not None:
    k, v = (jnp.concatenate(pair, axis=1) for pair in zip(prefix, new, strict=True))
  k, v = sharding.gather_tokens(k), sharding.gather_tokens(v)
  out = tree_attention.attend(q, k, v, visibility)
  out = block_fp8.dot(out.reshape(x.shape[0], -1), p['o'], cfg.matmuls)
  return sharding.sum_to_residual(out, 'heads'), new
