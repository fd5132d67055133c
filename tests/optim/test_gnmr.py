"""The GNMR controller against a reference in plain Python, and its laws.

The reference keeps a list of norms and ratios for each block and computes every mean
anew, in float64.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.optim import gnmr

BLOCKS, STEPS = 5, 24
CONFIG = gnmr.GnmrConfig(
  max_active=2, alpha=1.2, first_alpha=1.6, first_steps=9, beta=1.4, delta_steps=3
)
seeds = st.integers(0, 2**32 - 1)


@functools.lru_cache(maxsize=8)
def compiled(config):
  """(state, norms [T, L]) → the State after each step."""

  def step(state, norms):
    state, route = gnmr.update(config, state, norms)
    return state, (state, route)

  return jax.jit(lambda state, norms: jax.lax.scan(step, state, norms)[1])


def run(config, norms):
  """The States after each step, as numpy arrays [T, …]."""
  norms = jnp.asarray(norms, jnp.float32)
  states, routes = compiled(config)(gnmr.init(config, norms.shape[1]), norms)
  np.testing.assert_array_equal(states.route, routes)
  return jax.tree.map(np.asarray, states)


def random_norms(seed, faults=0.0):
  """Log-normal norms [T, L]; with `faults` some are 0, infinite or not a number."""
  rng = np.random.default_rng(seed)
  norms = rng.lognormal(sigma=0.5, size=(STEPS, BLOCKS))
  wrong = rng.choice([0.0, np.inf, np.nan], size=norms.shape)
  return np.where(rng.random(norms.shape) < faults, wrong, norms)


def reference(config, norms):
  """Risk [T, L] and route [T, L] by the definitions, block by block."""
  number = norms.shape[1]
  history = [[] for _ in range(number)]
  ratios = [[] for _ in range(number)]
  lock = [0] * number
  risks, routes = [], []
  for step, row in enumerate(np.asarray(norms, np.float32).astype(float)):
    alpha = config.first_alpha if step < config.first_steps else config.alpha
    risk = []
    for b, norm in enumerate(row):
      if not np.isfinite(norm):
        risk.append(np.inf)
      elif norm == 0:
        risk.append(0.0)
      else:
        ratio = norm / np.mean(history[b]) if history[b] else 1.0
        recent = ratios[b][-config.delta_steps :]
        full = len(recent) == config.delta_steps
        risk.append(max(ratio / alpha, (ratio / np.mean(recent) if full else 1.0)
                        / config.beta))  # fmt: skip
        history[b].append(norm)
        ratios[b].append(ratio)
    wanted = [b for b in range(number) if risk[b] > 1 or lock[b] > 0]
    chosen = sorted(wanted, key=lambda b: -risk[b])[: config.max_active]
    for b in range(number):
      if b not in chosen:
        lock[b] = 0
      elif risk[b] > 1:
        lock[b] = config.lock_steps
      else:
        lock[b] = max(lock[b] - 1, 0)
    risks.append(risk)
    routes.append([b in chosen for b in range(number)])
  return np.array(risks), np.array(routes)


def test_reference_trace():
  """The trace of facts/algorithms.md §2.5: δ = 5, a norm of 5 after six of 1."""
  config = gnmr.GnmrConfig(max_active=1, alpha=1.0, beta=np.inf)
  norms = [1, 1, 1, 1, 1, 1, 5, 1, 1]
  states = run(config, np.array(norms)[:, None])
  ratio = [1, 1, 1, 1, 1, 1, 5, 0.6364, 0.6667]
  np.testing.assert_allclose(states.risk[:, 0], ratio, atol=5e-5)
  assert states.mean[6, 0] == pytest.approx(1.5714, abs=5e-5)
  # α out of reach: the risk is Δ-GNMR, β = 1
  config = gnmr.GnmrConfig(max_active=1, alpha=1e9, beta=1.0)
  delta = [1, 1, 1, 1, 1, 1, 5, 0.3535, 0.3860]
  states = run(config, np.array(norms)[:, None])
  np.testing.assert_allclose(states.risk[:, 0], delta, atol=5e-5)
  # triggered by step 7, promoted in step 8, and locked for one more
  assert states.route[:, 0].tolist() == [False] * 6 + [True, True, False]


@given(seeds, st.sampled_from([0, 1, 2, BLOCKS]), st.sampled_from([0, 1, 3]))
def test_is_the_definition(seed, max_active, lock_steps):
  config = dataclasses.replace(CONFIG, max_active=max_active, lock_steps=lock_steps)
  norms = random_norms(seed, faults=0.1)
  risk, route = reference(config, norms)
  states = run(config, norms)
  np.testing.assert_allclose(states.risk, risk, rtol=1e-4)
  if np.all(np.abs(risk - 1) > 1e-4):  # else rounding may decide otherwise
    infinite = np.isinf(risk).sum(axis=1)
    if np.all(infinite <= max(max_active, 1)):  # so may the order of equals
      np.testing.assert_array_equal(states.route, route)


@given(seeds)
def test_cap_is_never_exceeded_nor_filled_up(seed):
  states = run(CONFIG, random_norms(seed, faults=0.1))
  before = np.concatenate([np.zeros((1, BLOCKS)), states.lock[:-1]])
  candidates = (states.risk > 1) | (before > 0)
  assert not np.any(states.route & ~candidates)
  np.testing.assert_array_equal(states.candidates, candidates.sum(axis=1))
  expected = np.minimum(candidates.sum(axis=1), CONFIG.max_active)
  np.testing.assert_array_equal(states.route.sum(axis=1), expected)
  assert not np.any(states.lock[~states.route])  # crowded out: no lock
  left_out = np.where(candidates & ~states.route, states.risk, -1).max(axis=1)
  taken = np.where(states.route, states.risk, np.inf).min(axis=1)
  assert np.all(left_out <= taken)


@given(seeds)
def test_what_is_not_finite_never_enters(seed):
  """A block with faults has the history of the block without these steps."""
  norms = random_norms(seed, faults=0.2)
  states = run(CONFIG, norms)
  for b in range(BLOCKS):
    good = np.isfinite(norms[:, b]) & (norms[:, b] > 0)
    assert states.entered[-1, b] == good.sum()
    assert np.all(np.isinf(states.risk[~np.isfinite(norms[:, b]), b]))
    assert np.all(states.risk[norms[:, b] == 0, b] == 0)
    if good.any():
      mean = norms[good, b].astype(np.float32).mean()
      assert states.mean[-1, b] == pytest.approx(mean, rel=1e-5)
  assert np.all(np.isfinite(states.mean)) and np.all(np.isfinite(states.ratios))


@pytest.mark.parametrize('norms', [[1e-38, 3e38, 1e-38, 1.0], [3e38, 1e-38, 3e38, 1.0]])
def test_extreme_norms_leave_a_finite_history(norms):
  states = run(CONFIG, np.array(norms)[:, None])
  assert np.all(np.isfinite(states.mean)) and np.all(np.isfinite(states.ratios))
  assert not np.any(np.isnan(states.risk))


# locked blocks may have the same risk, 1 / β, and then their order decides
WITHOUT_TIES = (
  dataclasses.replace(CONFIG, lock_steps=0),
  dataclasses.replace(CONFIG, beta=np.inf),
)


@given(seeds, st.sampled_from([2.0**-20, 2.0**9]), st.sampled_from(WITHOUT_TIES))
def test_equivariant_to_order_and_invariant_to_scale(seed, scale, config):
  """The unit of the gradient does not matter (powers of two: rounding is the same)."""
  norms = random_norms(seed)
  order = np.random.default_rng(seed).permutation(BLOCKS)
  plain, other = run(config, norms), run(config, scale * norms[:, order])
  np.testing.assert_array_equal(plain.route[:, order], other.route)
  np.testing.assert_array_equal(plain.lock[:, order], other.lock)
  np.testing.assert_array_equal(plain.risk[:, order], other.risk)


def test_memory_forgets_the_start():
  """Norms that fall by 20 hide a later one of 3 from the cumulative mean."""
  norms = np.array([20.0] * 4 + [1.0] * 20 + [3.0])[:, None]
  plain = dataclasses.replace(CONFIG, beta=np.inf)
  assert not run(plain, norms).route[-1, 0]
  assert run(dataclasses.replace(plain, memory_steps=5), norms).route[-1, 0]


def test_norms_of_blocks():
  rng = np.random.default_rng(0)
  layers = {'a': rng.normal(size=(3, 2, 4)), 'b': rng.normal(size=(3, 5))}
  flat = np.concatenate([layers['a'].reshape(3, -1), layers['b']], axis=1)
  norms = gnmr.block_norms(jax.tree.map(jnp.asarray, layers))
  np.testing.assert_allclose(norms, np.linalg.norm(flat, axis=1), rtol=1e-6)


@pytest.mark.parametrize(
  'field, value',
  [('max_active', -1), ('alpha', 0.0), ('beta', 0.0), ('delta_steps', 0)],
)
def test_errors_name_the_field(field, value):
  with pytest.raises(ValueError, match=rf'GnmrConfig\.{field}'):
    gnmr.GnmrConfig(**{field: value})
