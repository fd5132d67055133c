"""Sampling against an independent numpy account of temperature, top-k and top-p."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.rollout import sampling
from tests.rollout.conftest import log_softmax

sample = jax.jit(sampling.sample)


def rows(n, logits, *, temperature=1.0, top_k=0, top_p=1.0, seed=0, counter=None):
  """n draws from one row of logits, each with its own index in one stream."""
  full = lambda value, dtype: jnp.full(n, value, dtype)
  counters = jnp.arange(n) if counter is None else full(counter, jnp.int32)
  return sample(
    jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (n, len(logits))),
    jnp.broadcast_to(jnp.array([0, seed], jnp.uint32), (n, 2)),
    counters,
    full(temperature, jnp.float32),
    full(top_k, jnp.int32),
    full(top_p, jnp.float32),
  )


def expected(logits, temperature, top_k, top_p):
  """The distribution as a loop over ranked tokens, float64."""
  logits = np.float64(np.float32(logits)) / temperature
  order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
  kept = order[: top_k or len(order)]
  probability = np.exp(log_softmax(logits[kept]))
  nucleus, mass = [], 0.0
  for token, p in zip(kept, probability, strict=True):
    if nucleus and mass >= top_p and top_p < 1:
      break
    nucleus.append(token)
    mass += p
  out = np.zeros(len(logits))
  out[nucleus] = np.exp(log_softmax(logits[nucleus]))
  return out


LOGITS = np.random.default_rng(3).normal(size=23)


@pytest.mark.parametrize(
  'temperature, top_k, top_p',
  [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 0, 0.8), (1.5, 9, 0.8)],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p):
  """The draws follow the recorded log-probabilities (law 4)."""
  n = 60_000
  tokens, logprobs = rows(n, LOGITS, temperature=temperature, top_k=top_k, top_p=top_p)
  want = expected(LOGITS, temperature, top_k, top_p)
  support = want > 0
  observed = np.bincount(np.asarray(tokens), minlength=len(LOGITS))
  assert observed[~support].sum() == 0
  chi_square = np.sum((observed - n * want)[support] ** 2 / (n * want[support]))
  freedom = support.sum() - 1
  assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # beyond 4 sigma
  np.testing.assert_allclose(logprobs, np.log(want[np.asarray(tokens)]), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
  seed=st.integers(0, 2**32 - 1),
  temperature=st.floats(0.05, 3),
  top_k=st.integers(0, 8),
  top_p=st.floats(0.05, 1),
)
def test_support_and_logprob_of_any_parameters(seed, temperature, top_k, top_p):
  """No parameters may let a token through that they exclude, or misreport one."""
  logits = np.random.default_rng(seed).normal(size=23) * 3
  tokens, logprobs = rows(
    64, logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
  )
  want = expected(logits, temperature, top_k, top_p)
  cut = np.sort(want)[::-1].cumsum()
  if np.any(np.abs(cut - top_p) < 1e-5):
    return  # the nucleus ends within rounding of top_p: either side is right
  assert np.all(want[np.asarray(tokens)] > 0)
  np.testing.assert_allclose(
    logprobs, np.log(want[np.asarray(tokens)]), atol=1e-4, rtol=1e-5
  )


def test_ties_with_the_last_token_kept_are_kept():
  """An arbitrary choice among equals would depend on the order of the vocabulary."""
  logits = np.where(np.arange(23) < 5, 2.0, np.where(np.arange(23) < 9, 1.0, 0.0))
  tokens, logprobs = rows(64, logits, top_k=7)
  assert set(np.asarray(tokens)) <= set(range(9))
  want = log_softmax(logits[:9])[np.asarray(tokens)]
  np.testing.assert_allclose(logprobs, want, atol=1e-5)
  tokens, _ = rows(64, logits, top_p=0.01)
  assert set(np.asarray(tokens)) == set(range(5))


def test_greedy_takes_the_peak_and_reports_temperature_one():
  """Greedy evaluation reports the policy's own probability, not 1."""
  tokens, logprobs = rows(64, LOGITS, temperature=0.0, top_k=3, top_p=0.1)
  assert set(np.asarray(tokens)) == {int(LOGITS.argmax())}
  np.testing.assert_allclose(logprobs, log_softmax(LOGITS).max(), atol=1e-5)


def test_the_smallest_temperature_neither_overflows_nor_wanders():
  """Dividing raw logits by 1e-6 would overflow to inf - inf."""
  tokens, logprobs = rows(64, LOGITS * 1e4, temperature=1e-6)
  assert set(np.asarray(tokens)) == {int(LOGITS.argmax())}
  np.testing.assert_array_equal(logprobs, 0)


def test_a_row_does_not_depend_on_its_neighbours():
  """Seeded requests repeat in any batch, also one whose rows need the sort."""
  alone = rows(64, LOGITS, seed=5, counter=7)
  greedy, sorting, plain = (0.0, 0, 1.0), (1.0, 2, 0.5), (1.0, 0, 1.0)
  temperature, top_k, top_p = zip(greedy, plain, sorting, strict=True)
  fill = lambda x, dtype: jnp.asarray(np.resize(x, (64, *np.shape(x)[1:])), dtype)
  tokens, logprobs = sample(
    fill([-LOGITS, LOGITS, LOGITS], jnp.float32),
    fill([[9, 9], [0, 5], [0, 5]], jnp.uint32),
    fill([1, 7, 7], jnp.int32),
    fill(temperature, jnp.float32),
    fill(top_k, jnp.int32),
    fill(top_p, jnp.float32),
  )
  assert tokens[1] == alone[0][0]
  assert logprobs[1] == alone[1][0]


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 64, 70]))
def test_draw_never_picks_an_index_without_mass(seed, size):
  """Rounding of prefix sums at the ends of blocks must not select padding or zeros."""
  random = np.random.default_rng(seed)
  mass = random.random((32, size)) * (random.random((32, size)) < 0.3)
  mass[np.arange(32), random.integers(size, size=32)] += 1e-6
  edges = np.array([0.0, np.nextafter(np.float32(1), np.float32(0))])
  uniforms = random.choice(np.concatenate([edges, random.random(4)]), size=(32, 2))
  index = sampling.draw(
    jnp.asarray(mass, jnp.float32), jnp.asarray(uniforms, jnp.float32)
  )
  assert np.all(mass[np.arange(32), np.asarray(index)] > 0)
