"""The matrix sign, the power iteration and the multiplier, against SVDs in float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from m2jax.optim import msign, sphere

SHAPES = [(24, 9), (9, 24), (16, 16)]
TOLERANCE = 2e-4
matrix_sign = jax.jit(msign.msign, static_argnums=1)
top = jax.jit(sphere.top, static_argnums=2)


def polar(x):
  """U Vᵀ by an SVD in float64."""
  u, _, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
  return u @ vt


def spread(rng, shape, decades=1.5):
  """A random matrix whose singular values span some powers of 10."""
  u, s, vt = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
  return (u * np.logspace(0, -decades, len(s))) @ vt


@pytest.mark.parametrize('shape', SHAPES)
def test_msign_is_the_polar_factor(shape):
  """To fp32, for a stack of ill-conditioned matrices; 5 of the 8 steps are too few."""
  rng = np.random.default_rng(0)
  x = np.stack([spread(rng, shape) for _ in range(3)])
  want = np.stack([polar(matrix) for matrix in x])
  got = matrix_sign(np.float32(x))
  np.testing.assert_allclose(got, want, atol=2e-5)
  fewer = matrix_sign(np.float32(x), msign.POLAR_EXPRESS[:5])
  assert np.abs(fewer - want).max() > 1e-2


@pytest.mark.parametrize('scale', [1e-30, 1e-18, 1e12])
def test_msign_of_any_scale(scale):
  """Squares of RL's gradients are below fp32's range; a zero matrix stays 0."""
  x = np.random.default_rng(1).normal(size=(2, 5, 4)).astype(np.float32)
  x[1] = 0
  got = np.asarray(matrix_sign(x * np.float32(scale)))
  np.testing.assert_allclose(got[0], polar(x[0]), atol=2e-5)
  np.testing.assert_array_equal(got[1], 0)


def test_msign_keeps_float64():
  """For tests of exactness; lower precisions are raised to fp32."""
  with jax.enable_x64():
    x = np.random.default_rng(2).normal(size=(4, 6))
    np.testing.assert_allclose(matrix_sign(x), polar(x), atol=1e-9)
    low = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    assert jax.eval_shape(msign.msign, low).dtype == jnp.float32


@pytest.mark.parametrize('shape', SHAPES)
def test_power_iteration_finds_the_top_singular_vectors(shape):
  """From a random vector in 100 iterations; from a near one in 3."""
  rng = np.random.default_rng(3)
  w = rng.normal(size=shape)
  u, s, vt = np.linalg.svd(w)
  start = np.float32(rng.normal(size=(1, shape[1])))
  cold = top(np.float32(w), start, 100)
  np.testing.assert_allclose(cold.sigma, s[0], rtol=1e-4)
  theta = np.asarray(cold.left) @ np.asarray(cold.right)
  np.testing.assert_allclose(theta, np.outer(u[:, 0], vt[0]), atol=2e-2)
  moved = w + 0.01 * rng.normal(size=shape)
  warm = top(np.float32(moved), cold.right, 3)
  np.testing.assert_allclose(warm.sigma, np.linalg.norm(moved, 2), rtol=1e-3)


def test_power_iteration_of_nothing():
  """A zero matrix has no vectors: zeros, not NaN."""
  found = top(np.zeros((3, 2), np.float32), np.ones((1, 2), np.float32), 3)
  for x in found:
    np.testing.assert_array_equal(x, 0)


def guess(multiplier=0.0, slope=0.0):
  """Of slope 0: none."""
  return sphere.Guess(*np.full((2, 1, 1), [[[multiplier]], [[slope]]], np.float32))


@functools.partial(jax.jit, static_argnames=('max_evaluations', 'tolerance'))
def search(momentum, w, start, last, max_evaluations=20, tolerance=TOLERANCE):
  at = sphere.top(w, start, 200)
  found, last = sphere.direction(
    momentum, at, last, tolerance=tolerance, max_evaluations=max_evaluations
  )
  return at, found, last


def solve(momentum, w, start, *limits):
  return search(momentum, w, start, guess(), *limits)[:2]


def problem(seed, shape, pull):
  """A gradient with `pull` along Θ, weights, a vector to start from, all fp32; Θ."""
  rng = np.random.default_rng(seed)
  w = rng.normal(size=shape)
  u, _, vt = np.linalg.svd(w)
  theta = np.outer(u[:, 0], vt[0])
  gradient = spread(rng, shape) + pull * theta
  arrays = (gradient, w, rng.normal(size=(1, shape[1])))
  return tuple(np.float32(x) for x in arrays), theta


def along(theta, gradient):
  """h(λ) by an SVD in float64, of the normalised gradient."""
  gradient = np.asarray(gradient, np.float64)
  gradient = gradient / np.linalg.norm(gradient)
  return lambda multiplier: np.sum(theta * polar(gradient + multiplier * theta))


@pytest.mark.parametrize('shape', SHAPES)
def test_the_multiplier_is_the_root(shape):
  """Against Brent's method on SVDs in float64; the direction has norm 1 and is tangent,
  and the solver needs few evaluations, whichever way Θ pulls."""
  evaluations = []
  for seed, pull in enumerate([-2.0, -0.3, 0.0, 0.3, 2.0]):
    arrays, theta = problem(seed, shape, pull)
    h = along(theta, arrays[0])
    bound = 2 * min(shape) ** 0.5
    want = optimize.brentq(h, -bound, bound, xtol=1e-12)
    at, found = solve(*arrays)
    assert abs(found.multiplier - want) < 1e-3
    assert abs(h(float(found.multiplier))) < 5 * TOLERANCE
    assert abs(found.residual) <= TOLERANCE
    left, direction, right = map(np.asarray, (at.left, found.direction, at.right))
    tangent = left[:, 0] @ direction @ right[0]
    np.testing.assert_allclose(tangent, found.residual, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(found.direction, 2), 1, atol=1e-4)
    evaluations.append(int(found.evaluations))
  assert np.mean(evaluations) < 8


def test_a_guess_saves_evaluations_and_a_wrong_one_does_no_harm():
  """With the last root and slope, a gradient that changed by a tenth needs fewer; from
  far off, with a slope that is wrong by orders, the root is the same. An expert without
  tokens keeps its guess."""
  cold, warm = [], []
  for seed in range(8):
    (gradient, *rest), _ = problem(seed, SHAPES[0], 1.0)
    last = search(gradient, *rest, guess())[2]
    (noise, *_), _ = problem(seed + 50, SHAPES[0], 0.0)
    moved = gradient + np.float32(0.1) * noise
    alone, near = (search(moved, *rest, g)[1] for g in (guess(), last))
    cold.append(int(alone.evaluations))
    warm.append(int(near.evaluations))
    for multiplier, slope in ((3.0, 1e-3), (-9.0, 1e5), (0.5, 1e3)):
      found = search(moved, *rest, guess(multiplier, slope))[1]
      assert abs(found.residual) <= TOLERANCE
      np.testing.assert_allclose(found.multiplier, alone.multiplier, atol=1e-3)
  assert np.mean(warm) < np.mean(cold) - 1
  _, idle, after = search(np.zeros(SHAPES[0], np.float32), *rest, last)
  assert idle.evaluations == 1 and not np.any(idle.direction)
  assert after == last


def test_the_residual_does_not_decrease_with_the_multiplier():
  """What the bracket relies on, for msign as it is computed; from −1 to 1."""
  arrays, theta = problem(7, (12, 9), 0.5)
  momentum = msign.normalized(arrays[0])
  h = jax.jit(jax.vmap(lambda x: jnp.sum(theta * msign.msign(momentum + x * theta))))(
    np.linspace(-6, 6, 97, dtype=np.float32)
  )
  assert np.all(np.diff(h) > -1e-5)
  np.testing.assert_allclose(np.asarray(h)[[0, -1]], [-1, 1], atol=0.02)


def test_the_search_ends():
  """With a tolerance that fp32 cannot reach, after the evaluations that are allowed,
  with the best one found; the first guess alone is another choice."""
  arrays, _ = problem(3, (24, 9), 2.0)
  best = [abs(float(solve(*arrays, n, 1e-30)[1].residual)) for n in (1, 4, 12)]
  assert best[0] > best[1] > best[2]
  _, found = solve(*arrays, 6, 1e-30)
  assert found.evaluations == 6


def test_no_gradient_no_step():
  """An expert that no token reached: λ = 0 and Φ = 0, at once."""
  (_, w, start), _ = problem(0, (9, 24), 0.0)
  _, found = solve(np.zeros((9, 24), np.float32), w, start)
  np.testing.assert_array_equal(found.direction, 0)
  assert found.multiplier == 0 and found.evaluations == 1


def test_the_other_implementation_agrees():
  """`pytorch-optimizer`'s SSO, where it is installed: msign, and λ by its bisection, to
  the bfloat16 that it multiplies in."""
  theirs = pytest.importorskip('pytorch_optimizer.optimizer.sso')
  torch = pytest.importorskip('torch')
  arrays, theta = problem(1, (24, 9), 0.5)
  momentum = msign.normalized(arrays[0])
  gradient = torch.tensor(np.array(momentum))
  want = theirs.msign(gradient, 8).float().numpy()
  np.testing.assert_allclose(msign.msign(momentum), want, atol=5e-2)
  want = theirs.solve_lambda_with_bisection(
    gradient, torch.tensor(theta, dtype=torch.float32), tolerance_f=1e-3
  )
  np.testing.assert_allclose(solve(*arrays)[1].multiplier, float(want), atol=1e-2)
