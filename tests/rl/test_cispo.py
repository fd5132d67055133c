"""CISPO: the tests of facts/algorithms.md §3.4, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.rl.estimators import cispo

N = 64


def batch(seed=0, spread=1.5):
  """logprob, old_logprob, advantage, weight of N terms; ratios on both sides of 5."""
  rng = np.random.default_rng(seed)
  old = -rng.exponential(1.0, N)
  logprob = old + spread * rng.normal(size=N)
  weight = rng.uniform(0.5, 1.5, N)
  arrays = (logprob, old, rng.normal(size=N), weight / weight.sum())
  return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


def total(*args, **bounds):
  """What a learner minimises: the sum of the terms."""
  return jnp.sum(cispo.loss(*args, **bounds))


@functools.cache
def _compiled(**bounds):
  return jax.jit(jax.value_and_grad(functools.partial(total, **bounds)))


def value_and_grad(*args, **bounds):
  """Of `total`, with respect to the log-probabilities; compiled once for each shape."""
  return _compiled(**bounds)(*map(np.float32, args))


metrics = jax.jit(cispo.metrics)


def test_on_policy_is_reinforce():
  """At r = 1 value and gradient are those of −Σ w Â log π, whatever the cap."""
  logprob, _, advantage, weight = batch()

  def reinforce(x):
    return -jnp.sum(weight * advantage * x)

  want = jax.value_and_grad(reinforce)(logprob)
  for cap in (1.0, 5.0):
    got = value_and_grad(logprob, logprob, advantage, weight, is_weight_max=cap)
    for a, b in zip(got, want, strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6)


def test_ratio_has_no_gradient():
  """The gradient is −w·clip(r)·Â per term, and none flows through the ratio.

  An existing implementation's bug (facts/rl-systems.md §8), a differentiable ratio, has
  the same value and fails here.
  """
  logprob, old, advantage, weight = batch()
  ratio = np.exp(np.float64(logprob) - np.float64(old))
  assert (ratio > 5).any() and (ratio < 1).any()
  value, grad = value_and_grad(logprob, old, advantage, weight)
  clipped = np.minimum(ratio, 5.0)
  np.testing.assert_allclose(grad, -weight * clipped * advantage, rtol=1e-5)
  np.testing.assert_allclose(
    value, np.sum(-weight * clipped * advantage * logprob), rtol=1e-5
  )

  def mutant(x):
    r = jnp.minimum(jnp.exp(x - old), 5.0)
    return jnp.sum(-weight * r * advantage * x)

  np.testing.assert_allclose(mutant(logprob), value, rtol=1e-5)
  assert np.abs(jax.grad(mutant)(logprob) - grad).max() > 1e-3


@pytest.mark.parametrize('cap', [1.0, 1.28, 2.0, 5.0, 1e9])
def test_cap(cap):
  """One-sided and absolute: both signs of Â are capped alike, small ratios are not."""
  old = np.zeros(4) - 3
  logprob = old + np.log([0.01, 0.9, 1.5, 7.39])
  for sign in (1.0, -1.0):
    of = logprob, old, sign * np.ones(4), np.ones(4)
    _, grad = value_and_grad(*of, is_weight_max=cap)
    expected = np.minimum([0.01, 0.9, 1.5, 7.39], cap)
    np.testing.assert_allclose(grad, -sign * expected, rtol=1e-5)


def test_lower_bound():
  """is_weight_min = 0 has no effect; a positive one raises small ratios."""
  logprob, old, advantage, weight = batch()
  _, grad = value_and_grad(logprob, old, advantage, weight, is_weight_min=0.8)
  ratio = np.clip(np.exp(logprob - old), 0.8, 5.0)
  np.testing.assert_allclose(grad, -weight * ratio * advantage, rtol=1e-5)


@pytest.mark.parametrize(
  'bounds',
  [
    {'is_weight_max': 0.2},
    {'is_weight_max': float('nan')},
    {'is_weight_min': -0.1},
    {'is_weight_min': 1.1},
  ],
)
def test_bounds_are_refused(bounds):
  """A relative ε passed as the cap (0.2) would scale down on-policy terms: an error."""
  for function in (cispo.loss, cispo.metrics):
    with pytest.raises(ValueError, match=next(iter(bounds))):
      function(*batch(), **bounds)


@given(st.integers(0, 10**6), st.sampled_from([0, 8]))
def test_order_and_padding(seed, padding):
  """Any order of terms, with any values of weight 0 between: same loss and gradient."""
  arrays = batch(seed % 100)
  rng = np.random.default_rng(seed)
  value, grad = value_and_grad(*arrays)
  order = rng.permutation(N + padding)
  junk = np.resize([np.inf, -np.inf, np.nan, 1e30], padding)
  padded = [np.concatenate([x, junk])[order] for x in arrays[:3]]
  padded.append(np.concatenate([arrays[3], np.zeros(padding)])[order])
  value2, grad2 = value_and_grad(*padded)
  np.testing.assert_allclose(value, value2, rtol=1e-5, atol=1e-6)
  back = np.zeros(N + padding)
  back[order] = grad2
  np.testing.assert_allclose(back[:N], grad, rtol=1e-6)
  assert not back[N:].any()
  assert all(np.isfinite(v) for v in metrics(*map(np.float32, padded)).values())


def test_extreme_ratios_stay_finite():
  """A ratio that overflows float32 is capped, not NaN."""
  logprob, old, ones = [-0.1, -200.0], [-200.0, -0.1], [1.0, 1.0]
  value, grad = value_and_grad(logprob, old, ones, ones)
  assert np.isfinite(value)
  np.testing.assert_allclose(grad, [-5.0, 0.0], atol=1e-30)


def test_low_precision_is_raised():
  """Law 8: bfloat16 inputs are computed in float32, float64 stays float64."""
  low = [x.astype(jnp.bfloat16) for x in batch()]
  assert cispo.loss(*low).dtype == jnp.float32
  with jax.enable_x64(True):
    arrays = [jnp.asarray(np.float64(x)) for x in batch()]
    assert cispo.loss(*arrays).dtype == jnp.float64


def test_metrics():
  """Values by hand, and micro-batches add up to the batch."""
  logprob, old, advantage, weight = batch()
  got = metrics(logprob, old, advantage, weight)
  w, log_ratio = np.float64(weight), np.float64(logprob) - np.float64(old)
  ratio = np.exp(log_ratio)
  np.testing.assert_allclose(got['ratio'], np.sum(w * ratio), rtol=1e-5)
  np.testing.assert_allclose(got['clip_fraction'], np.sum(w * (ratio > 5)), rtol=1e-5)
  cut = np.sum(w * np.maximum(ratio - 5, 0))
  np.testing.assert_allclose(got['clipped_mass'], cut, rtol=1e-5)
  kl = np.sum(w * (ratio - 1 - log_ratio))
  np.testing.assert_allclose(got['approx_kl'], kl, rtol=1e-5)
  np.testing.assert_allclose(got['old_logprob'], np.sum(w * old), rtol=1e-5)
  halves = [
    metrics(*(np.asarray(x)[s] for x in (logprob, old, advantage, weight)))
    for s in (slice(0, N // 2), slice(N // 2, N))
  ]
  for key, value in got.items():
    np.testing.assert_allclose(halves[0][key] + halves[1][key], value, rtol=1e-5)
  on_policy = metrics(old, old, advantage, weight)
  assert on_policy['clip_fraction'] == on_policy['clipped_mass'] == 0
  np.testing.assert_allclose(on_policy['ratio'], 1, rtol=1e-6)
