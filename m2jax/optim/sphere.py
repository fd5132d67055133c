"""One step on the spectral sphere ‖W‖₂ = R, for one matrix.

The direction is Φ = argmax ⟨N, Φ⟩ over ‖Φ‖₂ = 1 that leaves ‖W‖₂ unchanged to first
order. With u, v the top singular vectors of W and Θ = u vᵀ, the gradient of ‖W‖₂, that
is ⟨Θ, Φ⟩ = 0, whose solution is

  Φ = msign(N + λΘ),   λ the root of h(λ) = ⟨Θ, msign(N + λΘ)⟩

h does not decrease, and |λ| ≤ 2 Σ singular values of N. λ = 0 is MuonSphere's. The
drift of second order is removed by the retraction W ← W · R/‖W‖₂ before the step, for
which the power iteration that finds Θ also serves.

Source: "Controlled LLM Training on Spectral Sphere", arXiv:2601.08393
(facts/algorithms.md §1.1, §1.2). Ours: λ starts at −⟨Θ, N⟩ and is found by regula falsi
(Illinois), which takes a fifth of the evaluations of a bisection (§1.6).

Axes: in, out of a matrix W (y = x W).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Bool, Float, Int32
from m2jax.optim import msign as msign_lib
from m2jax.optim.msign import product


class Top(NamedTuple):
  """The largest singular value of a matrix, and its vectors.

  Attributes:
    sigma: the value, an estimate from below.
    left, right: vectors; 0 for a zero matrix.
  """

  sigma: Float[Array, '1 1']
  left: Float[Array, 'in 1']
  right: Float[Array, '1 out']


def top(
  w: Float[Array, 'in out'], right: Float[Array, '1 out'], iterations: int
) -> Top:
  """Power iteration from a vector, which must not be orthogonal to the answer.

  Args:
    w: the matrix.
    right: where to start, of any length but 0; the previous step's result is near.
    iterations: at least 1.
  """

  def improve(_, right):
    return _unit(product(product(w, right.mT).mT, w))

  right = lax.fori_loop(1, iterations, improve, _unit(right))
  left = product(w, right.mT)
  sigma = jnp.linalg.norm(left, keepdims=True)
  left = left / jnp.where(sigma > 0, sigma, 1)
  # one more half step costs as much as the first half, and squares what is left
  right = product(left.mT, w)
  sigma = jnp.linalg.norm(right, keepdims=True)
  return Top(sigma, left, right / jnp.where(sigma > 0, sigma, 1))


def _unit(x: jax.Array) -> jax.Array:
  norm = jnp.linalg.norm(x)
  return x / jnp.where(norm > 0, norm, 1)


class Solution(NamedTuple):
  """The direction of a step.

  Attributes:
    direction: Φ.
    multiplier: λ.
    residual: h(λ) = ⟨Θ, Φ⟩.
    evaluations: of msign.
  """

  direction: Float[Array, 'in out']
  multiplier: Float[Array, '']
  residual: Float[Array, '']
  evaluations: Int32[Array, '']


class _Search(NamedTuple):
  """A bracket of the root: h(low) < 0 < h(high), and the best λ so far.

  An end that was not evaluated is at the bound of |λ|, where the sign of h is known.
  """

  low: Float[Array, '']
  h_low: Float[Array, '']
  high: Float[Array, '']
  h_high: Float[Array, '']
  seen_low: Bool[Array, '']
  seen_high: Bool[Array, '']
  was_low: Bool[Array, '']
  stride: Float[Array, '']
  best: Solution


def direction(
  momentum: Float[Array, 'in out'],
  at: Top,
  *,
  tolerance: float,
  max_evaluations: int,
  coefficients: msign_lib.Coefficients = msign_lib.POLAR_EXPRESS,
) -> Solution:
  """Φ = msign(N + λΘ) with |⟨Θ, Φ⟩| ≤ tolerance, or the least found.

  Args:
    momentum: N, of any scale: it is divided by its Frobenius norm, and λ is of that.
    at: the top singular vectors of W.
    tolerance: of |h|.
    max_evaluations: of msign; 1 takes the first guess, λ = −⟨Θ, N⟩.
    coefficients: of msign.
  """
  momentum = msign_lib.normalized(momentum)
  theta = at.left * at.right
  # n singular values whose squares have the sum 1 add up to at most √n
  bound = jnp.asarray(2 * min(momentum.shape) ** 0.5, momentum.dtype)

  def evaluate(multiplier, number):
    phi = msign_lib.msign(momentum + multiplier * theta, coefficients)
    h = product(product(at.left.mT, phi), at.right.mT)[0, 0]
    return Solution(phi, multiplier, h, number)

  first = evaluate(-jnp.sum(theta * momentum), jnp.int32(1))
  yes = jnp.bool_(True)
  one = jnp.ones((), momentum.dtype)
  # h has the slope √n/2 for a flat spectrum, and is steeper for others
  stride = jnp.maximum(2 * jnp.abs(first.residual) / bound, 1e-6)
  start = _Search(-bound, -one, bound, one, ~yes, ~yes, yes, stride, first)
  search = _narrow(start, first)

  def unfinished(search: _Search):
    found = jnp.abs(search.best.residual) <= tolerance
    return ~found & (search.best.evaluations < max_evaluations)

  def body(search: _Search):
    last = evaluate(_candidate(search), search.best.evaluations + 1)
    return _narrow(search, last)

  return lax.while_loop(unfinished, body, search).best


def _candidate(search: _Search) -> jax.Array:
  """The next λ: between the ends once both are evaluated, a stride outside before."""
  low, high = search.low, search.high
  between = (low * search.h_high - high * search.h_low) / (search.h_high - search.h_low)
  outside = jnp.where(
    search.seen_low,
    jnp.minimum(low + search.stride, high),
    jnp.maximum(high - search.stride, low),
  )
  return jnp.where(search.seen_low & search.seen_high, between, outside)


def _narrow(search: _Search, last: Solution) -> _Search:
  """The bracket with one more evaluation; Illinois halves h at an end kept twice."""
  is_low = last.residual < 0
  again = is_low == search.was_low
  half = jnp.where(again & search.seen_low & search.seen_high, 0.5, 1.0)
  half = half.astype(search.h_low.dtype)
  best, was = last, search.best
  better = jnp.abs(last.residual) <= jnp.abs(was.residual)
  best = jax.tree.map(lambda a, b: jnp.where(better, a, b), last, was)
  best = best._replace(evaluations=last.evaluations)
  return _Search(
    low=jnp.where(is_low, last.multiplier, search.low),
    h_low=jnp.where(is_low, last.residual, search.h_low * half),
    high=jnp.where(is_low, search.high, last.multiplier),
    h_high=jnp.where(is_low, search.h_high * half, last.residual),
    seen_low=search.seen_low | is_low,
    seen_high=search.seen_high | ~is_low,
    was_low=is_low,
    stride=2 * search.stride,
    best=best,
  )


def straight(
  momentum: Float[Array, 'in out'], at: Top, coefficients: msign_lib.Coefficients
) -> Solution:
  """msign(N): MuonSphere's direction, λ = 0, with what h is there."""
  phi = msign_lib.msign(momentum, coefficients)
  h = product(product(at.left.mT, phi), at.right.mT)[0, 0]
  return Solution(phi, jnp.zeros_like(h), h, jnp.int32(1))
