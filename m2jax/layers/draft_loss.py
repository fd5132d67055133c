"""Top-K KL of the MTP modules from the trunk, which trains drafts during RL.

Forge trains the modules with the policy by a top-K KL divergence, so that the share of
accepted drafts stays high while the policy changes (facts/m2-and-forge.md §3); its form
is undisclosed, ours is facts/algorithms.md §4.2. At token m, trunk and module k both
predict m from states at parent(m). With p the trunk's distribution, q the module's,
and S the K most likely words of p:

  L_k(m) = Σ_{v ∈ S} p̃(v) · log(p̃(v) / q̃(v)),   p̃ and q̃ renormalised on S.

With `rest`, p̃ and q̃ are p and q, and all words outside S count as one more word: the
mass that q has outside S is trained, too, and L_k is a lower bound of KL(p ‖ q). More
drafts are accepted then (docs/rollout.md). With K = V both forms are KL(p ‖ q).

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


class Comparison(NamedTuple):
  """How modules are compared with the trunk.

  Attributes:
    top_k: K, at most V.
    rest: whether the words outside S are one more.
  """

  top_k: int
  rest: bool


class Teacher(NamedTuple):
  """The trunk's K most likely words at each token, given its path; no gradient.

  Attributes:
    words: their ids in the whole vocabulary.
    logprob: their log-probabilities, at least fp32.
    rest: as in the Comparison.
  """

  words: Int[Array, 'T K']
  logprob: Float[Array, 'T K']
  rest: bool


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
  params, state: Float[Array, 'B S D'], comparison: Comparison, sharding: Sharding
) -> Teacher:
  """The Teacher of a batch.

  Args:
    params: parameters, of which only the head is read, gathered.
    state: the trunk's state at each token's parent.
    comparison: K, and what the modules are compared on.
    sharding: the mesh.
  """
  flat, axes = state.reshape(-1, state.shape[-1]), sharding.axes('vocab')
  logprob, words = top_k_logprobs(flat, params['head'], comparison.top_k, axes)
  return Teacher(words, logprob, comparison.rest)


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
  distance = with_rest if teacher.rest else renormalised
  values = logprob, distance(teacher.logprob, q), overlap(teacher.logprob, q)
  logprob, kl, shared = (jnp.where(live, x.reshape(shape), 0) for x in values)
  return logprob, Drafts(kl, shared)


def renormalised(p: Float[Array, 'T K'], q: Float[Array, 'T K']) -> Float[Array, 'T']:
  """KL of log-probabilities p from q, both renormalised over their K words."""
  p, q = (x - jax.nn.logsumexp(x, axis=-1, keepdims=True) for x in (p, q))
  return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def with_rest(p: Float[Array, 'T K'], q: Float[Array, 'T K']) -> Float[Array, 'T']:
  """KL of log-probabilities p from q of K words, and of all others as one word."""
  # What sums of probabilities cannot tell from 0 is not.
  least = jnp.finfo(q.dtype).eps
  rest_p, rest_q = (
    jnp.maximum(1 - jnp.sum(jnp.exp(x), axis=-1), least) for x in (p, q)
  )
  of_rest = rest_p * (jnp.log(rest_p) - jnp.log(rest_q))
  return jnp.sum(jnp.exp(p) * (p - q), axis=-1) + of_rest


def overlap(p: Float[Array, 'T K'], q: Float[Array, 'T K']) -> Float[Array, 'T']:
  """Σ min(p, q) of log-probabilities; no gradient."""
  return jnp.sum(jnp.exp(jnp.minimum(p, jax.lax.stop_gradient(q))), axis=-1)
