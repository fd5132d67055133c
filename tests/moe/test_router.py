"""The router against facts/m2-and-forge.md §1.4.6 and algorithms.md §4.4, in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.moe import router

TOKENS, DIM, EXPERTS, TOP_K = 40, 6, 8, 3

_route = jax.jit(router.route, static_argnames=('top_k', 'scores'))
_loads = jax.jit(router.loads, static_argnums=2)


def route(*arrays, **more):
  """ids and weights in NumPy."""
  return jax.device_get(_route(*arrays, **more))


def tensors(seed, dtype=np.float32):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(TOKENS, DIM)).astype(dtype)
  kernel = rng.normal(size=(DIM, EXPERTS)).astype(dtype)
  return x, kernel, (0.5 * rng.normal(size=EXPERTS)).astype(dtype)


def sigmoid(logits):
  return 1 / (1 + np.exp(-logits))


def softmax(logits):
  return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def by_hand(x, kernel, bias, replay=None, scores_of=sigmoid):
  """ids and weights token by token, as the released forward pass has it."""
  ids, weights = [], []
  for token, row in enumerate(np.float64(x)):
    scores = scores_of(row @ np.float64(kernel))
    chosen = np.argsort(-(scores + np.float64(bias)))[:TOP_K]
    if replay is not None:
      chosen = np.where(replay[token] >= 0, replay[token], chosen)
    ids.append(chosen)
    weights.append(scores[chosen] / scores[chosen].sum())  # the unbiased scores
  return np.array(ids), np.array(weights)


def no_near_ties(x, kernel, bias, scores_of=sigmoid):
  """Tokens whose choice does not hang on fp32 rounding."""
  scores = scores_of(np.float64(x) @ np.float64(kernel)) + np.float64(bias)
  return np.diff(np.sort(scores, axis=1), axis=1).min(axis=1) > 1e-5


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=20)
def test_choice_and_weights(seed):
  """The top k of sigmoid + bias; weights are the scores without the bias, summing
  to 1."""
  x, kernel, bias = tensors(seed)
  ids, weights = route(x, kernel, bias, top_k=TOP_K)
  want_ids, want_weights = by_hand(x, kernel, bias)
  clear = no_near_ties(x, kernel, bias)
  np.testing.assert_array_equal(ids[clear], want_ids[clear])
  np.testing.assert_allclose(weights[clear], want_weights[clear], rtol=1e-5)
  np.testing.assert_allclose(np.sum(weights, axis=1), 1, rtol=1e-6)


@given(seed=st.integers(0, 2**32 - 1), with_bias=st.booleans())
@settings(max_examples=20)
def test_softmax_scores(seed, with_bias):
  """The ablation: the softmax over all experts chooses and weighs in the same way. With
  no bias the choice is the sigmoid's, for both rise with the logit; the weights are a
  softmax over the chosen alone, which those of the sigmoid are not."""
  x, kernel, bias = tensors(seed)
  bias = bias if with_bias else np.zeros_like(bias)
  ids, weights = route(x, kernel, bias, top_k=TOP_K, scores='softmax')
  want_ids, want_weights = by_hand(x, kernel, bias, scores_of=softmax)
  clear = no_near_ties(x, kernel, bias, softmax)
  np.testing.assert_array_equal(ids[clear], want_ids[clear])
  np.testing.assert_allclose(weights[clear], want_weights[clear], rtol=1e-4)
  if not with_bias:
    other_ids, other = route(x, kernel, bias, top_k=TOP_K)
    clear &= no_near_ties(x, kernel, bias)
    np.testing.assert_array_equal(ids[clear], other_ids[clear])
    logits = np.take_along_axis(np.float64(x) @ np.float64(kernel), ids, 1)
    np.testing.assert_allclose(weights, softmax(logits), rtol=1e-4)
    assert not np.allclose(weights, other, rtol=1e-2)


def test_bias_selects_only():
  """A bias that chooses nobody else changes no weight; one that chooses another does
  not enter the other's weight."""
  x, kernel, _ = tensors(0)
  zero, same = np.zeros(EXPERTS, np.float32), np.full(EXPERTS, 0.25, np.float32)
  for a, b in zip(
    route(x, kernel, zero, top_k=TOP_K),
    route(x, kernel, same, top_k=TOP_K),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)
  forced = np.where(np.arange(EXPERTS) == 5, np.float32(100), zero)
  ids, weights = route(x, kernel, forced, top_k=TOP_K)
  assert np.all(ids[:, 0] == 5)
  scores = 1 / (1 + np.exp(-np.float64(x @ kernel)))
  chosen = np.take_along_axis(scores, ids, 1)
  np.testing.assert_allclose(weights, chosen / chosen.sum(1, keepdims=True), rtol=1e-5)


def test_replay():
  """Recorded ids replace the choice where they are not −1; the weights are this model's
  own scores of the experts used, and the gradient flows through those."""
  x, kernel, bias = tensors(1)
  rng = np.random.default_rng(1)
  recorded = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
  recorded[::3] = -1
  ids, weights = route(x, kernel, bias, top_k=TOP_K, replay=recorded)
  want_ids, want_weights = by_hand(x, kernel, bias, recorded)
  clear = no_near_ties(x, kernel, bias)
  np.testing.assert_array_equal(ids[clear], want_ids[clear])
  np.testing.assert_allclose(weights[clear], want_weights[clear], rtol=1e-5)
  free = route(x, kernel, bias, top_k=TOP_K)[0]
  np.testing.assert_array_equal(ids[::3], free[::3])


@pytest.mark.parametrize('scores', ['sigmoid', 'softmax'])
def test_gradients(scores):
  """The bias gets no gradient, not even through the choice; input and kernel get that
  of the renormalised scores, checked by finite differences in float64."""
  with jax.enable_x64():
    x, kernel, bias = tensors(2, np.float64)
    pull = np.random.default_rng(2).normal(size=(TOKENS, TOP_K))

    @jax.jit
    def loss(x, kernel, bias):
      return jnp.sum(pull * router.route(x, kernel, bias, TOP_K, scores=scores)[1])

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(x, kernel, bias)
    d_x, d_kernel, d_bias = jax.device_get(gradients)
    assert not np.any(d_bias)
    rng = np.random.default_rng(3)
    for argument, gradient in ((0, d_x), (1, d_kernel)):
      step = np.zeros_like((x, kernel)[argument])
      step[rng.integers(len(step))] = 1e-6 * rng.normal(size=step.shape[1])
      args = [x, kernel, bias]
      args[argument] = args[argument] + step
      up = loss(*args)
      args[argument] = args[argument] - 2 * step
      change = np.asarray(up) - np.asarray(loss(*args))
      np.testing.assert_allclose(change, 2 * np.sum(gradient * step), rtol=1e-4)


def test_scores_are_at_least_float32():
  """bf16 activations are routed in fp32 (law 8): same as casting them first."""
  x, kernel, bias = tensors(3)
  low = x.astype(jnp.bfloat16)
  ids, weights = route(low, kernel, bias, top_k=TOP_K)
  assert weights.dtype == jnp.float32
  want_ids, want = route(low.astype(np.float32), kernel, bias, top_k=TOP_K)
  np.testing.assert_array_equal(ids, want_ids)
  np.testing.assert_allclose(weights, want, rtol=1e-6)


def test_vanishing_scores():
  """Scores that underflow to 0 give weights of 0, not NaN, and finite gradients."""
  x = np.full((TOKENS, DIM), 1e3, np.float32)
  kernel = -np.ones((DIM, EXPERTS), np.float32)

  @jax.jit
  def loss(x, kernel):
    return jnp.sum(router.route(x, kernel, jnp.zeros(EXPERTS), TOP_K)[1])

  value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, kernel)
  assert np.isfinite(value) and all(np.all(np.isfinite(g)) for g in grads)


@given(data=st.data())
@settings(max_examples=20)
def test_loads_count_multiplicity(data):
  """A shared token counts once per sample through it (law 3), padding not at all."""
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
  ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
  multiplicity = rng.integers(0, 5, TOKENS)
  load = _loads(ids, multiplicity, EXPERTS)
  unmerged = np.repeat(ids, multiplicity, axis=0)  # the samples one by one
  np.testing.assert_array_equal(load, np.bincount(unmerged.ravel(), minlength=EXPERTS))


def test_update_bias():
  """b ← b + u·sign(mean − load), per layer: whoever had too much gets less by exactly
  u, whoever had the mean stays."""
  load = jnp.array([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0]])
  bias = jnp.array([[0.5, 0.5, 0.5, 0.5], [0.1, 0.2, 0.3, 0.4]])
  new = router.update_bias(bias, load, 1e-3)
  want = bias + 1e-3 * np.array([[-1, 1, 0, 0], [0, 0, 0, 0]])
  np.testing.assert_allclose(new, want, rtol=1e-6)
  np.testing.assert_array_equal(router.update_bias(bias, load, 0.0), bias)


def test_update_balances():
  """Followed step by step, the rule evens out the loads of a skewed router."""
  x, kernel, _ = tensors(4)
  bias = np.eye(1, EXPERTS, dtype=np.float32)[0]
  ones = np.ones(TOKENS, np.int32)

  @jax.jit
  def step(bias):
    load = router.loads(router.route(x, kernel, bias, TOP_K)[0], ones, EXPERTS)
    return router.update_bias(bias, load, 0.02), router.max_violation(load)

  violations = []
  for _ in range(60):
    bias, violation = step(bias)
    violations.append(float(violation))
  assert min(violations[-10:]) < 0.25 * violations[0]


@pytest.mark.parametrize('load, want', [([2.0, 2.0], 0.0), ([3.0, 1.0], 0.5)])
def test_max_violation(load, want):
  """(max − mean) / mean: 0 is perfect balance."""
  assert router.max_violation(jnp.array(load)) == want


def test_no_column_of_one_expert():
  """On TPUs an array [T, 1] takes the memory of [T, 128]: weights are never split."""
  x, kernel, bias = tensors(0)
  weights = lambda x: router.route(x, kernel, bias, TOP_K)[1]
  gradient = lambda x: jax.vjp(weights, x)[1](jnp.ones((TOKENS, TOP_K)))
  text = str(jax.make_jaxpr(gradient)(x))
  columns = [line for line in text.splitlines() if f'f32[{TOKENS},1] = ' in line]
  assert columns and not any(' split[' in line or ' slice[' in line for line in columns)
