"""Sampling against an independent numpy account of temperature, top-k and top-p."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.rollout.engine import sampling
from tests.rollout.conftest import log_softmax

sample = jax.jit(sampling.sample)
draw = jax.jit(sampling.draw)
penalize = jax.jit(sampling.penalize)


def rows(
  n, logits, *, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, seed=0, counter=None
):
  """n draws from one row of logits, each with its own index in one stream."""
  full = lambda value, dtype: np.full(n, value, dtype)
  counters = np.arange(n) if counter is None else full(counter, np.int32)
  how = sampling.Draws(
    np.tile(np.array([0, seed], np.uint32), (n, 1)),
    counters.astype(np.int32),
    full(temperature, np.float32),
    full(min_p, np.float32),
    full(top_k, np.int32),
    full(top_p, np.float32),
  )
  tokens, logprobs, _ = sample(np.tile(np.float32(logits), (n, 1)), how)
  return np.asarray(tokens), np.asarray(logprobs)


def expected(logits, temperature, top_k, top_p, min_p=0.0):
  """The distribution as a loop over ranked tokens, float64."""
  logits = np.float64(np.float32(logits)) / temperature
  order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
  order = [i for i in order if np.exp(logits[i] - logits[order[0]]) >= min_p]
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
  'temperature, top_k, top_p, min_p',
  [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.3, 5, 1.0, 0.0),
    (1.0, 0, 0.8, 0.0),
    (1.5, 9, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.5, 9, 0.8, 0.15),
  ],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p, min_p):
  """The draws follow the recorded log-probabilities (law 4)."""
  n = 60_000
  how = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
  tokens, logprobs = rows(n, LOGITS, **how)
  want = expected(LOGITS, **how)
  support = want > 0
  observed = np.bincount(np.asarray(tokens), minlength=len(LOGITS))
  assert observed[~support].sum() == 0
  chi_square = np.sum((observed - n * want)[support] ** 2 / (n * want[support]))
  freedom = support.sum() - 1
  assert chi_square < freedom + 4 * np.sqrt(2 * freedom)  # beyond 4 sigma
  np.testing.assert_allclose(logprobs, np.log(want[np.asarray(tokens)]), atol=1e-5)


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
  fill = lambda x, dtype: np.asarray(np.resize(x, (64, *np.shape(x)[1:])), dtype)
  how = sampling.Draws(
    fill([[9, 9], [0, 5], [0, 5]], np.uint32),
    fill([1, 7, 7], np.int32),
    fill(temperature, np.float32),
    np.zeros(64, np.float32),
    fill(top_k, np.int32),
    fill(top_p, np.float32),
  )
  found = sample(fill([-LOGITS, LOGITS, LOGITS], np.float32), how)
  tokens, logprobs, _ = map(np.asarray, found)
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
  index = draw(np.float32(mass), np.float32(uniforms))
  assert np.all(mass[np.arange(32), np.asarray(index)] > 0)


@given(st.integers(0, 2**32 - 1))
def test_penalties_and_biases(seed):
  """Against a loop over the tokens of a row, in float64; rows without any stay."""
  random = np.random.default_rng(seed)
  rows_, size, length = 4, 11, 9
  logits = random.normal(size=(rows_, size)) * 3
  tokens = random.integers(size, size=(rows_, length))
  ends = np.sort(random.integers(length + 1, size=(rows_, 2)))
  index = np.arange(length)
  prompt = index < ends[:, :1]
  response = ~prompt & (index < ends[:, 1:])
  presence, frequency = random.uniform(-2, 2, (2, rows_))
  repetition = random.uniform(0.5, 2, rows_)
  presence[0] = frequency[0] = 0
  repetition[0] = 1
  biased = np.array([[size, size], [3, size], [3, 5], [0, size]])
  bias = random.normal(size=biased.shape)
  how = sampling.Penalties(presence, frequency, repetition, biased, bias)
  got = penalize(logits, how, tokens, prompt, response)
  want = logits.copy()
  for row in range(rows_):
    drawn = tokens[row, response[row]].tolist()
    for token in {*drawn, *tokens[row, prompt[row]].tolist()}:
      factor = repetition[row] if want[row, token] < 0 else 1 / repetition[row]
      want[row, token] *= factor
    for token in set(drawn):
      want[row, token] -= presence[row] + frequency[row] * drawn.count(token)
    for token, value in zip(biased[row], bias[row], strict=True):
      if token < size:
        want[row, token] += value
  np.testing.assert_allclose(got, want, atol=1e-5)
  np.testing.assert_allclose(got[0], logits[0], atol=1e-6)
