"""Fused head and log-softmax against jax.nn.log_softmax over all logits (law 8)."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.kernels.token_logprobs import api, token_logprobs

VOCAB, DIM = 23, 6


def tensors(seed, tokens, dtype=np.float32, vocab=VOCAB):
  rng = np.random.default_rng(seed)
  hidden = jnp.array(2 * rng.normal(size=(tokens, DIM)), dtype)
  head = jnp.array(rng.normal(size=(DIM, vocab)), dtype)
  weight = jnp.array(rng.normal(size=tokens), dtype)
  return hidden, head, jnp.array(rng.integers(0, vocab, tokens), jnp.int32), weight


def plain(hidden, head, targets):
  """All logits at once."""
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  scores = jax.nn.log_softmax(hidden.astype(dtype) @ head.astype(dtype))
  entropy = -jnp.sum(jnp.exp(scores) * scores, axis=-1)
  return jnp.take_along_axis(scores, targets[:, None], 1)[:, 0], entropy


def value_and_grads(function, hidden, head, targets, weight):
  @jax.jit
  def run(hidden, head, targets, weight):
    def loss(hidden, head):
      out = function(hidden, head, targets)
      return jnp.sum(out[0] * weight), out

    grads, out = jax.grad(loss, (0, 1), has_aux=True)(hidden, head)
    return (*out, *grads)

  return run(hidden, head, targets, weight)


def check(arrays, tolerance):
  got = value_and_grads(token_logprobs, *arrays)
  want = value_and_grads(plain, *arrays)
  for name, a, b in zip(
    ('logprob', 'entropy', 'd_hidden', 'd_head'), got, want, strict=True
  ):
    assert a.dtype == b.dtype, name
    np.testing.assert_allclose(
      np.float64(a), np.float64(b), atol=tolerance, rtol=tolerance, err_msg=name
    )


@pytest.mark.parametrize('tokens', [1, 8, 21])
def test_chunk_boundaries(tokens, monkeypatch):
  """With 8 tokens a chunk: less than one, exactly one, two and a rest."""
  monkeypatch.setattr(api, '_CHUNK_LOGITS', 8 * VOCAB)
  check(tensors(tokens, tokens), 2e-5)


def test_float64(monkeypatch):
  """In float64 nothing is computed in less."""
  monkeypatch.setattr(api, '_CHUNK_LOGITS', 8 * VOCAB)
  with jax.enable_x64():
    check(tensors(0, 21, np.float64), 1e-13)


def test_bfloat16_head_is_float32():
  """bf16 states are scored in fp32 (law 8): results are fp32 and equal fp32 scoring of
  the same numbers; gradients come back in the inputs' dtype."""
  arrays = tensors(1, 21, jnp.bfloat16)
  got = value_and_grads(token_logprobs, *arrays)
  assert [x.dtype.name for x in got] == ['float32', 'float32', 'bfloat16', 'bfloat16']
  wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
  for a, b in zip(got[:2], plain(*wide[:3]), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_large_logits():
  """Logits of ±10⁴ neither overflow nor lose the chosen token."""
  hidden, head, targets, weight = tensors(2, 9)
  check((3e3 * hidden, head, targets, weight), 2e-3)
  logprob, entropy, *grads = value_and_grads(
    token_logprobs, 3e3 * hidden, head, targets, weight
  )
  assert all(np.all(np.isfinite(x)) for x in (logprob, entropy, *grads))


def test_entropy_has_no_gradient():
  """The entropy is a metric: asking for its gradient gives 0, as the docstring says."""
  hidden, head, targets, _ = tensors(3, 9)
  grads = jax.grad(lambda h, w: jnp.sum(token_logprobs(h, w, targets)[1]), (0, 1))
  assert not any(np.any(g) for g in grads(hidden, head))


def test_logits_are_never_all_alive():
  """At a vocabulary of 2¹⁵ and 256 tokens no compiled buffer holds all logits, forward
  or backward; with plain log-softmax one does, so the count can see it."""
  tokens, vocab = 256, 1 << 15
  assert tokens * vocab > 4 * api._CHUNK_LOGITS

  def largest(function):
    def loss(hidden, head, targets):
      return jnp.sum(function(hidden, head, targets)[0])

    shapes = [
      ((tokens, DIM), 'float32'),
      ((DIM, vocab), 'float32'),
      ((tokens,), 'int32'),
    ]
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile().as_text()
    found = re.findall(r'\bf32\[([\d,]+)\]', text)
    return max(int(np.prod([int(n) for n in dims.split(',')])) for dims in found)

  assert largest(plain) >= tokens * vocab
  assert largest(token_logprobs) <= 2 * api._CHUNK_LOGITS
