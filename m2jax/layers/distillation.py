"""Reverse KL of the model from a teacher, on the teacher's most likely words.

At each token, π being the model's distribution there, τ the teacher's, and S the K most
likely words of τ,

  KL(m) = Σ_{v ∈ S} π(v) log(π(v)/τ(v)) + π(S̄) log(π(S̄)/τ(S̄)),

all words outside S counting as one: never above KL(π ‖ τ), and equal with K = V. Mass
that π has outside S is trained, too. The gradient is that of the value, through the
softmax over the whole vocabulary; τ has none. The direction is that of on-policy
distillation (MiniLLM, arXiv:2306.08543; GKD, arXiv:2306.13649).

Axes: B rows, S tokens, D model, K words.
"""

from __future__ import annotations

import jax.numpy as jnp

from m2jax.axes import Array, Float
from m2jax.forest import Forest
from m2jax.kernels.token_logprobs import token_logprobs
from m2jax.layers import draft_loss, head
from m2jax.sharding import Sharding


def score(
  params,
  state: Float[Array, 'B S D'],
  batch: Forest,
  sharding: Sharding,
  *,
  depth: int,
  entropy_gradient: bool = False,
  tiled: bool = False,
) -> tuple[Float[Array, 'B S'], ...]:
  """`head.score`, and the KL from `batch.teacher_words`, in one pass over the head."""
  assert batch.teacher_words is not None and batch.teacher_word_logprobs is not None
  k = batch.teacher_words.shape[-1]
  words = batch.teacher_words.reshape(-1, k)
  scores, entropy = token_logprobs(
    state.reshape(-1, state.shape[-1]),
    params['head'],
    jnp.concatenate([batch.tokens.reshape(-1, 1), words], axis=1),
    sharding.axes('vocab'),
    entropy_gradient,
    tiled,
  )
  teacher = jnp.asarray(batch.teacher_word_logprobs, scores.dtype).reshape(-1, k)
  kl = draft_loss.with_rest(scores[:, 1:], teacher)
  live, shape = head.scored(batch, depth), batch.tokens.shape
  values = scores[:, 0], entropy, kl
  return tuple(jnp.where(live, x.reshape(shape), 0) for x in values)
