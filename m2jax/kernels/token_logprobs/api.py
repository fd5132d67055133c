"""LM head and log-softmax fused in chunks: logits of all positions never exist (law 8).

Plain XLA on every platform: a chunk is large enough for its matmuls to hide the reads
of the head, so a kernel could save only the passes over one chunk's logits. Logits are
fp32 (`kernels.fp32`).

With the vocabulary split over devices, each computes the logits of its own words only;
a few numbers per token are summed over the shards after the loop over chunks.

Axes: T tokens, D model, V vocabulary (of this device); chunks of c tokens, k targets.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float, Int
from m2jax.kernels import fp32, invariant

# A chunk's logits fit a CPU's cache or, if the vocabulary is larger, a chunk has the
# tokens that a matmul needs to run at full speed: 0.8 GB of logits at 200,064 words.
_CHUNK_LOGITS = 1 << 20
_CHUNK_TOKENS = 1024


def _chunks(x, vocab):
  """[T, …] → [T/c, c, …], zero-padded."""
  c = min(max(_CHUNK_LOGITS // vocab, _CHUNK_TOKENS), max(len(x), 1))
  x = jnp.pad(x, [(0, -len(x) % c)] + [(0, 0)] * (x.ndim - 1))
  return x.reshape(-1, c, *x.shape[1:])


def _map(chunk, arrays, vocab):
  """Maps `chunk` over chunks of arrays [T, …]; results are [T, …]."""
  out = lax.map(chunk, tuple(_chunks(x, vocab) for x in arrays))
  count = len(arrays[0])
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)


def _here(targets, vocab, axes):
  """Targets as words of this shard; those outside [0, V) are another shard's."""
  return targets - lax.axis_index(axes) * vocab if axes else targets


def normaliser(
  scaled: Float[Array, 'T V'], tiled: bool = False
) -> tuple[Float[Array, 'T V'], Float[Array, 'T']]:
  """e^x of logits x, their maximum subtracted, and the logarithm of its sum over V.

  log softmax is x minus the logarithm: here and where tokens are drawn. See
  `invariant.rows`.
  """

  def odds(x, _):
    odds = jnp.exp(x)
    return odds, jnp.log(jnp.sum(odds, axis=-1))

  return invariant.rows(odds, scaled, None, tiled)


def _statistics(logits):
  """Maximum, Σ e^(logit − maximum) and Σ logit e^(logit − maximum) of each token."""
  top = jnp.max(logits, axis=-1)
  odds = jnp.exp(logits - top[:, None])
  return top, jnp.sum(odds, axis=-1), jnp.sum(odds * logits, axis=-1)


def _highest(top, axes):
  """Maximum over all shards, and the factor of sums relative to this shard's own."""
  highest = lax.pmax(top, axes) if axes else top
  return highest, jnp.exp(top - highest)


def _sum(sums, axes):
  return lax.psum(sums, axes) if axes else sums


def _in_tiles(hidden, head, targets):
  """`_forward` with the logits and sums of `invariant.rows`, of a whole vocabulary."""

  def chunk(args):
    h, target = args
    logits = invariant.rows(fp32.product, h, head, tiled=True)
    top = jnp.max(logits, axis=-1)
    scaled = logits - top[:, None]
    odds, log_sum = normaliser(scaled, tiled=True)
    chosen = jnp.take_along_axis(scaled, target, axis=-1) - log_sum[:, None]
    entropy = log_sum - jnp.sum(odds * scaled, axis=-1) / jnp.sum(odds, axis=-1)
    return chosen, entropy, top + log_sum

  return _map(chunk, (hidden, targets), head.shape[1])


def _forward(hidden, head, targets, axes, tiled):
  """logprob [T, k], entropy and logsumexp [T]."""
  vocab = head.shape[1]
  if tiled and not axes:
    return _in_tiles(hidden, head, targets)

  def chunk(args):
    h, target = args
    logits = fp32.product(h, head)
    at = jnp.clip(target, 0, vocab - 1)
    chosen = jnp.take_along_axis(logits, at, axis=-1)
    return *_statistics(logits), jnp.where(at == target, chosen, 0)

  here = _here(targets, vocab, axes)
  top, total, dot, chosen = _map(chunk, (hidden, here), vocab)
  top, scale = _highest(top, axes)
  total, dot, chosen = _sum((total * scale, dot * scale, chosen), axes)
  lse = top + jnp.log(total)
  return chosen - lse[:, None], lse - dot / total, lse


def _add_at(logits, targets, values):
  """logits [c, V] plus values [c, k] at the targets that are words of this shard."""
  words = jnp.arange(logits.shape[1])
  # One after the other: a sum over k of [c, k, V] is stored whole on CPUs.
  for i in range(targets.shape[1]):
    logits += jnp.where(words == targets[:, i : i + 1], values[:, i : i + 1], 0)
  return logits


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _token_logprobs(hidden, head, targets, axes, entropy_gradient, tiled):
  return _forward(hidden, head, targets, axes, tiled)[:2]


def _fwd(hidden, head, targets, axes, entropy_gradient, tiled):
  logprob, entropy, lse = _forward(hidden, head, targets, axes, tiled)
  kept = (entropy,) if entropy_gradient else ()
  return (logprob, entropy), (hidden, head, targets, lse, *kept)


def _bwd(axes, entropy_gradient, tiled, residuals, cotangents):
  del tiled
  hidden, head, targets, lse, *entropy = residuals
  d_logprob, d_entropy = cotangents
  vocab = head.shape[1]
  targets = _here(targets, vocab, axes)
  if axes:  # every shard's result depends on every shard's logits
    d_logprob = lax.psum(d_logprob, axes)
    d_entropy = lax.psum(d_entropy, axes) if entropy_gradient else d_entropy

  def chunk(d_head, args):
    h, target, lse, d, *of_entropy = args
    log_p = fp32.product(h, head) - lse[:, None]
    p = jnp.exp(log_p)
    d_logits = _add_at(-jnp.sum(d, axis=1, keepdims=True) * p, target, d)
    if entropy_gradient:  # ∂H/∂logit = −p (log p + H)
      at, d_at = (x[:, None] for x in of_entropy)
      d_logits -= d_at * p * (log_p + at)
    d_h, d_w = fp32.gradients(h, head, d_logits)
    return d_head + d_w, d_h

  of_entropy = (*entropy, d_entropy) if entropy_gradient else ()
  arrays = hidden, targets, lse, d_logprob, *of_entropy
  chunks = tuple(_chunks(x, vocab) for x in arrays)
  d_head, d_hidden = lax.scan(chunk, jnp.zeros(head.shape, d_logprob.dtype), chunks)
  d_hidden = d_hidden.reshape(-1, hidden.shape[1])[: len(targets)]
  return d_hidden, d_head.astype(head.dtype), None


_token_logprobs.defvjp(_fwd, _bwd)


def token_logprobs(
  hidden: Float[Array, 'T D'],
  head: Float[Array, 'D V'],
  targets: Int[Array, 'T *k'],
  axes: tuple[str, ...] = (),
  entropy_gradient: bool = False,
  tiled: bool = False,
) -> tuple[Float[Array, 'T *k'], Float[Array, 'T']]:
  """log softmax(hidden·head)[target] and the entropy of that softmax.

  Args:
    hidden: states after the final norm.
    head: inside a `shard_map`, this device's words of it.
    targets: one word of each token, or k, some dozens at most (their gradients are
      unrolled); int32, of the whole vocabulary.
    axes: mesh axes that split the vocabulary; hidden is the same along them.
    entropy_gradient: the entropy carries a gradient; else none.
    tiled: compute in tiles (`invariant.rows`), where the vocabulary is not split.

  Returns:
    logprob and entropy, at least fp32.
  """
  columns = targets if targets.ndim == 2 else targets[:, None]
  static = axes, entropy_gradient, tiled
  logprob, entropy = _token_logprobs(hidden, head, columns, *static)
  return logprob.reshape(targets.shape), entropy


def top_k_logprobs(
  hidden: Float[Array, 'T D'],
  head: Float[Array, 'D V'],
  k: int,
  axes: tuple[str, ...] = (),
) -> tuple[Float[Array, 'T k'], Int[Array, 'T k']]:
  """The k most likely words of softmax(hidden·head) and their log-probabilities.

  The teacher's side of a top-K KL (algorithms.md §4.2): no gradient. The student's side
  is `token_logprobs` at these words, which has one.

  Args:
    hidden, head, axes: as in `token_logprobs`.
    k: number of words, at most V.

  Returns:
    logprob, at least fp32, descending; words, int32, the lower first among equals.
  """
  hidden, head = lax.stop_gradient((hidden, head))
  vocab = head.shape[1]

  def chunk(args):
    logits = fp32.product(args[0], head)
    top, total, _ = _statistics(logits)
    return top, total, *lax.top_k(logits, min(k, vocab))

  top, total, best, words = _map(chunk, (hidden,), vocab)
  top, scale = _highest(top, axes)
  total = _sum(total * scale, axes)
  if axes:
    words += lax.axis_index(axes) * vocab
    best, words = (lax.all_gather(x, axes, axis=1, tiled=True) for x in (best, words))
    best, at = lax.top_k(best, k)
    words = jnp.take_along_axis(words, at, axis=1)
  return best - (top + jnp.log(total))[:, None], words
