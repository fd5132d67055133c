"""LM head and log-softmax fused in chunks: logits of all positions never exist (law 8).

With the vocabulary split over devices, each sees the logits of its own words only; a
few numbers a token are summed over the shards, after the loop over chunks.

Axes: T tokens, D model, V vocabulary (of this device); chunks of c tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

_CHUNK_LOGITS = 1 << 20  # logits alive at once


def _chunks(x, vocab):
  """[T, …] → [T/c, c, …], zero-padded."""
  c = min(max(_CHUNK_LOGITS // vocab, 8), len(x))
  x = jnp.pad(x, [(0, -len(x) % c)] + [(0, 0)] * (x.ndim - 1))
  return x.reshape(-1, c, *x.shape[1:])


def _logits(hidden, head):
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  return hidden.astype(dtype) @ head.astype(dtype)


def _forward(hidden, head, targets, axes):
  if axes:
    return _forward_split(hidden, head, targets, axes)

  def chunk(args):
    h, target = args
    logits = _logits(h, head)
    top = jnp.max(logits, axis=-1, keepdims=True)
    odds = jnp.exp(logits - top)
    total = jnp.sum(odds, axis=-1)
    lse = top[:, 0] + jnp.log(total)
    chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
    entropy = lse - jnp.sum(odds * logits, axis=-1) / total
    return chosen - lse, entropy, lse

  vocab = head.shape[1]
  out = jax.lax.map(chunk, (_chunks(hidden, vocab), _chunks(targets, vocab)))
  return tuple(x.reshape(-1)[: len(targets)] for x in out)


def _forward_split(hidden, head, targets, axes):
  """`_forward` with head [D, V] one shard of the vocabulary over mesh `axes`."""

  def chunk(args):
    h, target = args
    logits = _logits(h, head)
    top = jnp.max(logits, axis=-1)
    odds = jnp.exp(logits - top[:, None])
    hit = jnp.arange(vocab) == target[:, None]
    chosen = jnp.sum(jnp.where(hit, logits, 0), axis=-1)
    return top, jnp.sum(odds, axis=-1), jnp.sum(odds * logits, axis=-1), chosen

  vocab = head.shape[1]
  here = _here(targets, vocab, axes)
  out = jax.lax.map(chunk, (_chunks(hidden, vocab), _chunks(here, vocab)))
  top, total, dot, chosen = (x.reshape(-1)[: len(targets)] for x in out)
  highest = jax.lax.pmax(top, axes)
  scale = jnp.exp(top - highest)
  sums = jnp.stack([total * scale, dot * scale, chosen])
  total, dot, chosen = jax.lax.psum(sums, axes)
  lse = highest + jnp.log(total)
  return chosen - lse, lse - dot / total, lse


def _here(targets, vocab, axes):
  """Targets as words of this shard; what is outside [0, V) is another's."""
  return targets - jax.lax.axis_index(axes) * vocab if axes else targets


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def token_logprobs(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """log softmax(hidden·head)[target] and the entropy of that softmax.

  Args:
    hidden: [T, D].
    head: [D, V]; inside a `shard_map`, this device's words of it.
    targets: [T] int32, words of the whole vocabulary.
    axes: mesh axes that split the vocabulary; hidden is the same along them.

  Returns:
    logprob, entropy: [T], at least fp32. The entropy carries no gradient.
  """
  logprob, entropy, _ = _forward(hidden, head, targets, axes)
  return logprob, entropy


def _fwd(hidden, head, targets, axes):
  logprob, entropy, lse = _forward(hidden, head, targets, axes)
  return (logprob, entropy), (hidden, head, targets, lse)


def _bwd(axes, residuals, cotangents):
  hidden, head, targets, lse = residuals
  d_logprob = cotangents[0]
  vocab = head.shape[1]
  targets = _here(targets, vocab, axes)
  if axes:  # every shard's result depends on every shard's logits
    d_logprob = jax.lax.psum(d_logprob, axes)

  def chunk(d_head, args):
    h, target, lse, d = args
    p = jnp.exp(_logits(h, head) - lse[:, None])
    hit = jnp.arange(vocab) == target[:, None]
    d_logits = d[:, None] * (hit - p)
    d_head += h.astype(d_logits.dtype).T @ d_logits
    return d_head, (d_logits @ head.T.astype(d_logits.dtype)).astype(h.dtype)

  chunks = tuple(_chunks(x, vocab) for x in (hidden, targets, lse, d_logprob))
  d_head, d_hidden = jax.lax.scan(chunk, jnp.zeros(head.shape, d_logprob.dtype), chunks)
  d_hidden = d_hidden.reshape(-1, hidden.shape[1])[: len(targets)]
  return d_hidden, d_head.astype(head.dtype), None


token_logprobs.defvjp(_fwd, _bwd)
