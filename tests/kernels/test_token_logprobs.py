"""Fused head and log-softmax against jax.nn.log_softmax over all logits (law 8)."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2jax.kernels.token_logprobs import api, token_logprobs, top_k_logprobs

VOCAB, DIM = 23, 6


def tensors(seed, tokens, dtype=np.float32, vocab=VOCAB):
  rng = np.random.default_rng(seed)
  hidden = (2 * rng.normal(size=(tokens, DIM))).astype(dtype)
  head = rng.normal(size=(DIM, vocab)).astype(dtype)
  weight = rng.normal(size=tokens).astype(dtype)
  return hidden, head, rng.integers(0, vocab, tokens, np.int32), weight


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
  """Compares all four results with `plain`'s; returns them."""
  got = value_and_grads(token_logprobs, *arrays)
  want = value_and_grads(plain, *arrays)
  for name, a, b in zip(
    ('logprob', 'entropy', 'd_hidden', 'd_head'), got, want, strict=True
  ):
    assert a.dtype == b.dtype, name
    np.testing.assert_allclose(
      np.float64(a), np.float64(b), atol=tolerance, rtol=tolerance, err_msg=name
    )
  return got


@pytest.fixture
def small_chunks(monkeypatch):
  """Eight tokens a chunk."""
  monkeypatch.setattr(api, '_CHUNK_LOGITS', 1)
  monkeypatch.setattr(api, '_CHUNK_TOKENS', 8)


@pytest.mark.parametrize('tokens', [1, 8, 21])
def test_chunk_boundaries(tokens, small_chunks):
  """Less than a chunk, exactly one, two and a rest."""
  check(tensors(tokens, tokens), 2e-5)


def test_float64(small_chunks):
  """In float64 nothing is computed in less."""
  with jax.enable_x64():
    check(tensors(0, 21, np.float64), 1e-13)


def test_bfloat16_head_is_float32():
  """bf16 states are scored in fp32 (law 8): results are fp32 and equal fp32 scoring of
  the same numbers; gradients come back in the inputs' dtype."""
  arrays = tensors(1, 21, jnp.bfloat16)
  got = value_and_grads(token_logprobs, *arrays)
  assert [x.dtype.name for x in got] == ['float32', 'float32', 'bfloat16', 'bfloat16']
  wide = [x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for x in arrays]
  for a, b in zip(got[:2], jax.jit(plain)(*wide[:3]), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_large_logits():
  """Logits of ±10⁴ neither overflow nor lose the chosen token."""
  hidden, head, targets, weight = tensors(2, 9)
  got = check((np.float32(3e3) * hidden, head, targets, weight), 2e-3)
  assert all(np.all(np.isfinite(x)) for x in got)


def test_entropy_has_no_gradient():
  """Unless it is asked for: the entropy is a metric then."""
  hidden, head, targets, _ = tensors(3, 9)
  grads = jax.grad(lambda h, w: jnp.sum(token_logprobs(h, w, targets)[1]), (0, 1))
  assert not any(np.any(g) for g in jax.jit(grads)(hidden, head))


@pytest.mark.parametrize('shards', [1, 4])
def test_gradient_of_the_entropy(small_chunks, shards):
  """On request it is autodiff's of the dense softmax, beside the log-probability's, in
  float64, also with words split over devices."""
  with jax.enable_x64():
    hidden, head, targets, weight = tensors(3, 21, np.float64, vocab=24)
    other = np.random.default_rng(3).normal(size=21)

    def gradients(function, hidden, head):
      def loss(*args):
        logprob, entropy = function(*args)
        return jnp.sum(logprob * weight) + jnp.sum(entropy * other)

      return jax.grad(loss, (0, 1))(hidden, head)

    def ours(hidden, head, axes=()):
      out = token_logprobs(hidden, head, targets, axes, entropy_gradient=True)
      share = 1 if not axes else 1 / shards  # every device adds up the whole
      return [share * x for x in out]

    dense = lambda hidden, head: plain(hidden, head, targets)
    want = jax.jit(functools.partial(gradients, dense))(hidden, head)
    if shards == 1:
      got = jax.jit(functools.partial(gradients, ours))(hidden, head)
    else:
      split = functools.partial(ours, axes=('words',))
      one = jax.vmap(
        lambda w: gradients(split, hidden, w), axis_name='words', axis_size=shards
      )
      of_hidden, of_head = jax.jit(one)(np.stack(np.split(head, shards, axis=1)))
      got = np.sum(of_hidden, axis=0), np.concatenate(of_head, axis=1)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, atol=1e-12)


def test_logits_are_never_all_alive(small_chunks):
  """No compiled buffer holds all logits, forward or backward; with plain log-softmax
  one does, so the count can see it."""
  tokens, vocab = 256, 1 << 10

  def largest(function, targets):
    def loss(hidden, head, targets):
      return jnp.sum(function(hidden, head, targets)[0])

    shapes = [
      ((tokens, DIM), 'float32'),
      ((DIM, vocab), 'float32'),
      (targets, 'int32'),
    ]
    args = [jax.ShapeDtypeStruct(*s) for s in shapes]
    text = jax.jit(jax.grad(loss, (0, 1))).lower(*args).compile().as_text()
    found = re.findall(r'\bf32\[([\d,]+)\]', text)
    return max(int(np.prod([int(n) for n in dims.split(',')])) for dims in found)

  assert largest(plain, (tokens,)) >= tokens * vocab
  assert largest(token_logprobs, (tokens,)) <= 2 * 8 * vocab
  assert largest(token_logprobs, (tokens, 9)) <= 2 * 8 * vocab
  best = functools.partial(top_k_logprobs, k=3)
  assert largest(lambda h, w, _: best(h, w), (tokens,)) <= 2 * 8 * vocab


def test_several_targets(small_chunks):
  """[T, k] targets are k calls with one each, gradients summed, also where a token asks
  for the same word twice."""
  hidden, head, _, _ = tensors(4, 21)
  rng = np.random.default_rng(4)
  targets = rng.integers(0, VOCAB, (21, 3), np.int32)
  targets[5, 1] = targets[5, 0]
  weight = np.float32(rng.normal(size=(21, 3)))
  got = value_and_grads(token_logprobs, hidden, head, targets, weight)
  of_one = jax.jit(functools.partial(value_and_grads, plain))
  parts = [
    jax.device_get(of_one(hidden, head, targets[:, i], weight[:, i])) for i in range(3)
  ]
  np.testing.assert_allclose(got[0], np.stack([p[0] for p in parts], axis=1), atol=2e-5)
  np.testing.assert_allclose(got[1], parts[0][1], atol=2e-5)
  for i in (2, 3):
    np.testing.assert_allclose(got[i], sum(p[i] for p in parts), atol=1e-4)


def top_k_kl(teacher, student, head, k):
  """Σ_T of the KL of the teacher's k best words, renormalised, from the student's."""
  logprobs, words = top_k_logprobs(teacher, head, k)
  p = jax.nn.log_softmax(logprobs)
  q = jax.nn.log_softmax(token_logprobs(student, head, words)[0])
  return jnp.sum(jnp.exp(p) * (p - q))


def test_top_k(small_chunks):
  """The k best words of all, in order, with their log-probabilities; no gradient."""
  hidden, head, _, _ = tensors(5, 21)
  scores = np.float64(hidden) @ np.float64(head)
  scores -= np.log(np.sum(np.exp(scores), axis=1, keepdims=True))
  logprobs, words = jax.jit(top_k_logprobs, static_argnums=2)(hidden, head, 4)
  np.testing.assert_array_equal(words, np.argsort(-scores, axis=1)[:, :4])
  np.testing.assert_allclose(logprobs, -np.sort(-scores, axis=1)[:, :4], atol=1e-5)
  loss = lambda *a: jnp.sum(top_k_logprobs(*a, 4)[0])
  assert not any(np.any(g) for g in jax.jit(jax.grad(loss, (0, 1)))(hidden, head))


def test_top_k_kl_has_the_right_gradient(small_chunks):
  """The MTP loss of algorithms.md §4.2, made from both sides, has the derivative on
  paper: q̃ − p̃ on the words chosen, 0 elsewhere; for k = V it is the plain KL."""
  teacher, head, _, _ = tensors(6, 9)
  student = tensors(7, 9)[0]
  for k in (4, VOCAB):
    gradient = jax.jit(jax.grad(top_k_kl, 1), static_argnums=3)
    d_student = gradient(teacher, student, head, k)
    p, q = (np.exp(np.float64(h) @ np.float64(head)) for h in (teacher, student))
    outside = np.argsort(np.argsort(-p, axis=1), axis=1) >= k
    p[outside] = q[outside] = 0
    p, q = (x / x.sum(axis=1, keepdims=True) for x in (p, q))
    np.testing.assert_allclose(d_student, (q - p) @ np.float64(head).T, atol=3e-5)


@pytest.mark.parametrize('k', [5, 24])
def test_split_vocabulary(small_chunks, k):
  """Words split over devices (here a mapped axis): the same numbers and words, each
  shard the gradient of its words, and equal scores in one order whatever the split. A
  shard has 6 words, fewer than k = V."""
  shards = 4
  hidden, head, _, _ = tensors(8, 21, vocab=24)
  head[:, 20] = head[:, 3]  # a tie across shards
  rng = np.random.default_rng(8)
  targets = rng.integers(0, 24, (21, 2), np.int32)
  weight = np.float32(rng.normal(size=(21, 2)))

  def run(hidden, head, axes=()):
    def loss(hidden, head):
      out = token_logprobs(hidden, head, targets, axes)
      share = 1 if not axes else 1 / shards  # every device adds up the whole
      return share * jnp.sum(out[0] * weight), out

    grads, out = jax.grad(loss, (0, 1), has_aux=True)(hidden, head)
    return (*out, *top_k_logprobs(hidden, head, k, axes)), grads

  want, (d_hidden, d_head) = jax.jit(run)(hidden, head)
  parts = np.stack(np.split(head, shards, axis=1))
  mapped = jax.vmap(
    lambda w: run(hidden, w, ('words',)), axis_name='words', axis_size=shards
  )
  got, (d_hiddens, d_heads) = jax.jit(mapped)(parts)
  for a, b in zip(got, want, strict=True):
    for shard in a:
      np.testing.assert_allclose(shard, b, atol=2e-5)
  np.testing.assert_allclose(np.concatenate(d_heads, axis=1), d_head, atol=1e-4)
  np.testing.assert_allclose(np.sum(d_hiddens, axis=0), d_hidden, atol=1e-4)
