"""Sigmoid router with a selection bias (m2-and-forge.md §1.4.6, algorithms.md §4.4).

s = sigmoid(x·W) in at least fp32; the top k of s + bias are chosen; the weights are the
*unbiased* scores of the chosen, divided by their sum. The bias is state: after a step
b ← b + u·sign(mean load − load). As an ablation s = softmax(x·W) over all experts.

Axes: T tokens, D model, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from m2jax.axes import Array, Bool, Float, Float32, Int
from m2jax.kernels import fp32, invariant
from m2jax.moe import by_expert


class Routes(NamedTuple):
  """The experts of tokens.

  Attributes:
    ids: experts used.
    weights: the experts' weights, at least fp32.
    rerouted: whether a replay uses other experts than this model would choose; None
      without a replay.
  """

  ids: Int[Array, 'T k']
  weights: Float[Array, 'T k']
  rerouted: Bool[Array, 'T'] | None


def route(
  x: Float[Array, 'T D'],
  kernel: Float[Array, 'D E'],
  bias: Float[Array, 'E'],
  top_k: int,
  replay: Int[Array, 'T k'] | None = None,
  scores: str = 'sigmoid',
) -> tuple[Int[Array, 'T k'], Float[Array, 'T k']]:
  """Chooses experts: their ids, and weights; see `decide`."""
  return decide(x, kernel, bias, top_k, replay, scores)[:2]


def decide(
  x: Float[Array, 'T D'],
  kernel: Float[Array, 'D E'],
  bias: Float[Array, 'E'],
  top_k: int,
  replay: Int[Array, 'T k'] | None = None,
  scores: str = 'sigmoid',
  tiled: bool = False,
) -> Routes:
  """Chooses experts, and compares the choice with a replay.

  `replay` replaces the choice where its entry is not -1; the weights, at least fp32,
  are always this model's own scores of the experts used.
  `scores` is 'sigmoid' or 'softmax'; for `tiled` see `invariant.rows`. Among equal
  scores the lower ids are chosen.
  """
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  score = {'sigmoid': jax.nn.sigmoid, 'softmax': jax.nn.softmax}[scores]
  scores = invariant.rows(lambda x, w: score(fp32.matmul(x, w)), x, kernel, tiled)
  _, ids = jax.lax.top_k(jax.lax.stop_gradient(scores) + bias, top_k)
  rerouted = None
  if replay is not None:
    own, ids = ids, jnp.where(replay >= 0, replay, ids)
    rerouted = jnp.any(jnp.sort(own) != jnp.sort(ids), axis=-1)
  ids = checkpoint_name(ids, by_expert.NAME)
  # a sum over a one-hot, not a gather: its gradient is a product, not a scatter
  chosen = jax.nn.one_hot(ids, kernel.shape[1], dtype=dtype)
  weights = jnp.einsum('te,tke->tk', scores, chosen)
  normed = invariant.rows(lambda w, _: w / _total(w), weights, None, tiled)
  return Routes(ids, normed, rerouted)


def _total(weights: Float[Array, 'T k']) -> Float[Array, 'T 1']:
  """Their sum, at least so large that its gradient, total ** -2, is finite in fp32."""
  return jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-15)


def loads(
  ids: Int[Array, 'T k'], multiplicity: Int[Array, 'T'], num_experts: int
) -> Float32[Array, 'E']:
  """Assignments of each expert, a token counted `multiplicity` times."""
  chosen = jax.nn.one_hot(ids, num_experts, dtype=jnp.float32)
  return jnp.einsum('tke,t->e', chosen, multiplicity.astype(jnp.float32))


def update_bias(
  bias: Float[Array, '*L E'], load: Float[Array, '*L E'], rate: float
) -> Float[Array, '*L E']:
  """One sign step towards equal loads in each layer."""
  mean = jnp.mean(load, axis=-1, keepdims=True)
  return bias + rate * jnp.sign(mean - load)


def max_violation(load: Float[Array, '*L E']) -> Float[Array, '*L']:
  """(max load − mean) / mean over a layer's experts: 0 is perfect balance."""
  mean = jnp.mean(load, axis=-1)
  return (jnp.max(load, axis=-1) - mean) / jnp.maximum(mean, 1e-9)
