"""Top-K KL of the MTP modules from the trunk: what co-trains drafts during RL.

Forge trains the modules with the policy by a top-K KL divergence, so that the share of
accepted drafts stays high while the policy changes (facts/m2-and-forge.md §3); its form
is undisclosed, ours is facts/algorithms.md §4.2. At token m, trunk and module k both
predict m from states at parent(m). With p the trunk's distribution, q the module's,
and S the K most likely words of p:

  L_k(m) = Σ_{v ∈ S} p̃(v) · log(p̃(v) / q̃(v)),   p̃ and q̃ renormalised on S.

Without renormalisation the words outside S are one more, of the rest of the mass. Then
L_k is a lower bound of KL(p ‖ q), and q's mass outside S is trained, too. With K = V
both are KL(p ‖ q).

p has no gradient. Only the modules learn if the caller detaches trunk, embedding and
head (`model.forward`, detach_mtp).

Axes: B rows, S tokens, T = B·S, D model, V vocabulary, K words; mtp modules.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float, Int
from m2jax.forest import Forest
from m2jax.kernels.token_logprobs import token_logprobs, top_k_logprobs
from m2jax.layers import head
from m2jax.sharding import Sharding


class Teacher(NamedTuple):
  """The trunk's K most likely words at each token, given its path; no gradient.

  Attributes:
    words: of the whole vocabulary.
    logprob: their log-probabilities, at least fp32.
  """

  words: Int[Array, 'T K']
  logprob: Float[Array, 'T K']


class Drafts(NamedTuple):
  """How far each module is from the trunk, at tokens of position k + 1 and deeper.

  Attributes:
    kl: L_k of each token.
    overlap: Σ min(p, q) over the teacher's words: a lower bound of the probability
      that speculative sampling accepts the draft (facts/algorithms.md §4.3). No
      gradient.
  """

  kl: Float[Array, 'mtp B S']
  overlap: Float[Array, 'mtp B S']


def best_words(
  params, state: Float[Array, 'B S D'], top_k: int, sharding: Sharding
) -> Teacher:
  """The Teacher of a batch.

  Args:
    params: of which the head is read, gathered.
    state: of the trunk at each token's parent.
    top_k: K, at most V.
  """
  flat = state.reshape(-1, state.shape[-1])
  logprob, words = top_k_logprobs(flat, params['head'], top_k, sharding.axes('vocab'))
  return Teacher(words, logprob)


def score(
  params,
  state: Float[Array, 'B S D'],
  batch: Forest,
  sharding: Sharding,
  *,
  depth: int | Int[Array, ''],
  teacher: Teacher,
) -> tuple[Float[Array, 'B S'], Drafts]:
  """`head.score` of one module, and its Drafts, from one pass over the head.

  Returns:
    logprob of each token; kl and overlap, [B, S] each. All are 0 where `head.score`
    is.
  """
  words = jnp.concatenate([batch.tokens.reshape(-1, 1), teacher.words], axis=1)
  scores, _ = token_logprobs(
    state.reshape(-1, state.shape[-1]), params['head'], words, sharding.axes('vocab')
  )
  logprob, q = scores[:, 0], scores[:, 1:]
  live, shape = head.scored(batch, depth), batch.tokens.shape
  values = logprob, divergence(teacher.logprob, q), overlap(teacher.logprob, q)
  logprob, kl, shared = (jnp.where(live, x.reshape(shape), 0) for x in values)
  return logprob, Drafts(kl, shared)


def divergence(p: Float[Array, 'T K'], q: Float[Array, 'T K']) -> Float[Array, 'T']:
  """KL of log-probabilities p from q, both renormalised over their K words."""
  p, q = (x - jax.nn.logsumexp(x, axis=-1, keepdims=True) for x in (p, q))
  return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def overlap(p: Float[Array, 'T K'], q: Float[Array, 'T K']) -> Float[Array, 'T']:
  """Σ min(p, q) of log-probabilities; no gradient."""
  return jnp.sum(jnp.exp(jnp.minimum(p, jax.lax.stop_gradient(q))), axis=-1)
