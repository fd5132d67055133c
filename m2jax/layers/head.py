"""The heads: a token is scored, and valued, from the state of its parent (law 2).

Axes: B rows, S tokens, P tokens of a cached prefix, D model, V vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp

from m2jax.axes import Array, Bool, Float, Int
from m2jax.forest import Forest
from m2jax.kernels import fp32, invariant
from m2jax.kernels.token_logprobs import token_logprobs, top_k_logprobs
from m2jax.sharding import ONE_DEVICE, Sharding


def logits(
  params, hidden: Float[Array, '*T D'], tiled: bool = False
) -> Float[Array, '*T V']:
  """Logits, at least fp32, of hidden states after the final norm; see
  `invariant.rows`."""
  return invariant.rows(fp32.matmul, hidden, params['head'], tiled)


def at_parent(
  values: Float[Array, 'B S D'],
  batch: Forest,
  sharding: Sharding = ONE_DEVICE,
  prefix: Float[Array, 'B P D'] | None = None,
) -> Float[Array, 'B S D']:
  """Values gathered at each token's parent; 0 for roots and padding.

  `prefix`: cached values of the path that the tokens continue.
  """
  parent = jnp.asarray(batch.parent)
  values = sharding.gather_tokens(values)  # parents are row indices
  if prefix is not None:
    values = jnp.concatenate([prefix, values], axis=1)
  gathered = jnp.take_along_axis(values, jnp.maximum(parent, 0)[..., None], axis=1)
  return jnp.where((parent >= 0)[..., None], gathered, 0)


def score(
  params,
  state: Float[Array, 'B S D'],
  batch: Forest,
  sharding: Sharding,
  *,
  depth: int | Int[Array, ''],
  entropy_gradient: bool = False,
  tiled: bool = False,
) -> tuple[Float[Array, 'B S'], Float[Array, 'B S']]:
  """Log-probability and entropy of each token from its parent's state.

  Both are 0 at roots, padding and tokens of position below `depth`. The entropy has a
  gradient only with `entropy_gradient`.
  """
  logprob, entropy = token_logprobs(
    state.reshape(-1, state.shape[-1]),
    params['head'],
    batch.tokens.reshape(-1),
    sharding.axes('vocab'),
    entropy_gradient,
    tiled,
  )
  live, shape = scored(batch, depth), batch.tokens.shape
  return tuple(jnp.where(live, x.reshape(shape), 0) for x in (logprob, entropy))


def values(params, state: Float[Array, 'B S D'], batch: Forest) -> Float[Array, 'B S']:
  """A critic's value of each token's parent: of the state the token was sampled in.

  At least fp32; 0 at roots and padding.
  """
  found = fp32.matmul(state, params['value'])[..., 0]
  return jnp.where(scored(batch, 1), found, 0)


def best(
  params, state: Float[Array, 'B S D'], k: int, sharding: Sharding
) -> tuple[Int[Array, 'B S k'], Float[Array, 'B S k']]:
  """The k most likely words of each token and their log-probabilities; no gradient."""
  flat, axes = state.reshape(-1, state.shape[-1]), sharding.axes('vocab')
  logprob, words = top_k_logprobs(flat, params['head'], k, axes)
  shape = *state.shape[:-1], k
  return words.reshape(shape), logprob.reshape(shape)


def scored(batch: Forest, depth: int | Int[Array, '']) -> Bool[Array, 'B S']:
  """Tokens that have a parent, at position `depth` or deeper."""
  return (batch.position >= depth) & (batch.parent >= 0)
