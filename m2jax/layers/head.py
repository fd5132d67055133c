"""The untied head; a token is scored from the state of its parent (law 2).

Axes: B rows, S tokens, P tokens of a cached prefix, D model, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.forest import Forest
from m2jax.kernels import fp32
from m2jax.kernels.token_logprobs import token_logprobs
from m2jax.sharding import ONE_DEVICE, Sharding


def logits(params, hidden: jax.Array) -> jax.Array:
  """[..., V], at least fp32, of hidden [..., D] after the final norm."""
  return fp32.matmul(hidden, params['head'])


def at_parent(
  values: jax.Array,
  batch: Forest,
  sharding: Sharding = ONE_DEVICE,
  prefix: jax.Array | None = None,
) -> jax.Array:
  """values [B, S, D] gathered at each token's parent; 0 for roots and padding.

  `prefix` [B, P, D]: cached values of the path that the tokens continue.
  """
  parent = jnp.asarray(batch.parent)
  values = sharding.gather_tokens(values)  # parents are row indices
  if prefix is not None:
    values = jnp.concatenate([prefix, values], axis=1)
  gathered = jnp.take_along_axis(values, jnp.maximum(parent, 0)[..., None], axis=1)
  return jnp.where((parent >= 0)[..., None], gathered, 0)


def score(
  params, state: jax.Array, batch: Forest, sharding: Sharding, *, depth: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Log-probability and entropy [B, S] of each token from its parent's state [B, S, D].

  Both are 0 at roots, padding and tokens of position below `depth`.
  """
  logprob, entropy = token_logprobs(
    state.reshape(-1, state.shape[-1]),
    params['head'],
    batch.tokens.reshape(-1),
    sharding.axes('vocab'),
  )
  live = (batch.position >= depth) & (batch.parent >= 0)
  shape = batch.tokens.shape
  return tuple(jnp.where(live, x.reshape(shape), 0) for x in (logprob, entropy))
