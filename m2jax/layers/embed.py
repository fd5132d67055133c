"""Token embedding; its table is sharded by vocabulary, channels or both.

Axes: B rows, S tokens, T = B·S, D model.
"""

from __future__ import annotations

import jax.numpy as jnp

from m2jax.axes import Array, Float, Int
from m2jax.config import ModelConfig
from m2jax.sharding import ONE_DEVICE, Sharding


def embed(
  cfg: ModelConfig, params, tokens: Int[Array, 'B S'], sharding: Sharding = ONE_DEVICE
) -> Float[Array, '_ D']:
  """The vectors of the tokens, or of this device's part of the residual stream.

  The table is never gathered: ids are, and channels sent.
  """
  table, tokens = params['embed'], tokens.reshape(-1)
  count = len(tokens)
  tokens = sharding.all_gather(tokens, 'model', axis=0)
  if sharding.size('vocab') == 1:
    x = jnp.take(table, tokens, axis=0).astype(cfg.dtype)
  else:
    here = tokens - sharding.index('vocab') * len(table)
    own = (here >= 0) & (here < len(table))
    x = jnp.take(table, jnp.where(own, here, 0), axis=0)
    x = jnp.where(own[:, None], x, 0).astype(cfg.dtype)
  # [devices of `model`, T, D of this device]
  x = sharding.sum_to_residual(x.reshape(-1, count, x.shape[1]), 'vocab', axis=1)
  return sharding.all_to_all(x, 'model', split=0, join=2)[0]
