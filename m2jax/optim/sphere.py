"""One step on the spectral sphere ‖W‖₂ = R, for one matrix.

The direction is Φ = argmax ⟨N, Φ⟩ over ‖Φ‖₂ = 1 that leaves ‖W‖₂ unchanged to first
order. With u, v the top singular vectors of W and Θ = u vᵀ, the gradient of ‖W‖₂, that
is ⟨Θ, Φ⟩ = 0, whose solution is

  Φ = msign(N + λΘ),   λ the root of h(λ) = ⟨Θ, msign(N + λΘ)⟩

h is non-decreasing, and |λ| ≤ 2 Σ singular values of N. MuonSphere uses λ = 0. The
retraction W ← W · R/‖W‖₂ before the step removes the drift of second order; the power
iteration that finds Θ also gives ‖W‖₂.

Source: "Controlled LLM Training on Spectral Sphere", arXiv:2601.08393
(facts/algorithms.md §1.1, §1.2). Ours: λ starts at the last step's, at −⟨Θ, N⟩ in the
first. A Newton step with the last slope of h follows, then secants until λ is between
two points, then regula falsi with the weights of Anderson and Björck (BIT 13, 1973).
docs/optimizers.md counts the evaluations.

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

STEEPEST = 64  # slope of h that a step uses, over that of a flat spectrum
PATIENCE = 6  # evaluations, after which every other one is a bisection


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
    iterations: number of iterations, at least 1.
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


class Guess(NamedTuple):
  """Where a step's search for λ starts: the last step's root.

  Attributes:
    multiplier: λ.
    slope: the slope of h there; 0 before the first step.
  """

  multiplier: Float[Array, '1 1']
  slope: Float[Array, '1 1']


class Solution(NamedTuple):
  """The direction of a step.

  Attributes:
    direction: Φ.
    multiplier: λ.
    residual: h(λ) = ⟨Θ, Φ⟩.
    evaluations: number of evaluations of msign.
  """

  direction: Float[Array, 'in out']
  multiplier: Float[Array, '']
  residual: Float[Array, '']
  evaluations: Int32[Array, '']


class _Search(NamedTuple):
  """A bracket of the root: h(low) < 0 < h(high), and the best λ so far.

  An end that was not evaluated is at the bound of |λ|, where the sign of h is known.

  Attributes:
    low, h_low, high, h_high: the ends; when one end is used twice in a row, its h is
      reduced.
    seen_low, seen_high: whether they were evaluated.
    last, h_last: the point evaluated last.
    slope: the slope of h, from the last two points.
    reach: longest step outside the points evaluated.
    best: solution.
  """

  low: Float[Array, '']
  h_low: Float[Array, '']
  high: Float[Array, '']
  h_high: Float[Array, '']
  seen_low: Bool[Array, '']
  seen_high: Bool[Array, '']
  last: Float[Array, '']
  h_last: Float[Array, '']
  slope: Float[Array, '']
  reach: Float[Array, '']
  best: Solution


def direction(
  momentum: Float[Array, 'in out'],
  at: Top,
  guess: Guess,
  *,
  tolerance: float,
  max_evaluations: int,
  coefficients: msign_lib.Coefficients = msign_lib.POLAR_EXPRESS,
) -> tuple[Solution, Guess]:
  """Φ = msign(N + λΘ) with |⟨Θ, Φ⟩| ≤ tolerance, or the least found; the next guess.

  Args:
    momentum: N, of any scale: it is divided by its Frobenius norm, and λ is of that.
    at: the top singular vectors of W.
    guess: the last step's.
    tolerance: largest |h| that counts as solved.
    max_evaluations: limit on evaluations of msign; 1 takes λ = −⟨Θ, N⟩.
    coefficients: msign's coefficients.
  """
  momentum = msign_lib.normalized(momentum)
  theta = at.left * at.right
  # n singular values whose squares have the sum 1 add up to at most √n
  bound = jnp.asarray(2 * min(momentum.shape) ** 0.5, momentum.dtype)
  flat = bound / 4  # the slope of h for a flat spectrum; others are steeper

  def evaluate(multiplier, number):
    phi = msign_lib.msign(momentum + multiplier * theta, coefficients)
    h = product(product(at.left.mT, phi), at.right.mT)[0, 0]
    return Solution(phi, multiplier, h, number)

  empty = ~jnp.any(momentum)  # h is only a sign then, and 0 at 0
  cold = (guess.slope[0, 0] == 0) | empty | (max_evaluations == 1)
  formula = -jnp.sum(theta * momentum)
  first = evaluate(
    jnp.where(cold, formula, jnp.clip(guess.multiplier[0, 0], -bound, bound)),
    jnp.int32(1),
  )
  one, no = jnp.ones((), momentum.dtype), jnp.bool_(False)
  slope = jnp.where(cold, flat, jnp.clip(guess.slope[0, 0], flat / 2, STEEPEST * flat))
  last = first.multiplier, first.residual
  start = _Search(-bound, -one, bound, one, no, no, *last, slope, bound, first)

  def unfinished(search: _Search):
    found = jnp.abs(search.best.residual) <= tolerance
    return ~found & (search.best.evaluations < max_evaluations)

  def body(search: _Search):
    new = evaluate(_candidate(search), search.best.evaluations + 1)
    return _narrow(search, new, flat)

  search = lax.while_loop(unfinished, body, _narrow(start, first, flat))
  found = Guess(search.best.multiplier[None, None], search.slope[None, None])
  found = jax.tree.map(lambda new, old: jnp.where(empty, old, new), found, guess)
  return search.best, found


def _candidate(search: _Search) -> jax.Array:
  """The next λ: between the ends once both are evaluated, by the slope before."""
  low, high, number = search.low, search.high, search.best.evaluations
  between = (low * search.h_high - high * search.h_low) / (search.h_high - search.h_low)
  # from a guess far off h is nearly ±1 at both ends, where lines through them are slow
  halve = (number >= PATIENCE) & (number % 2 == 0)
  between = jnp.where(halve, (low + high) / 2, between)
  step = jnp.minimum(jnp.abs(search.h_last) / search.slope, search.reach)
  outside = jnp.where(
    search.seen_low, jnp.minimum(low + step, high), jnp.maximum(high - step, low)
  )
  return jnp.where(search.seen_low & search.seen_high, between, outside)


def _narrow(search: _Search, new: Solution, flat: jax.Array) -> _Search:
  """The bracket with one more evaluation."""
  is_low, was_low = new.residual < 0, search.h_last < 0
  # Anderson–Björck: less of h at an end that is kept twice
  share = 1 - new.residual / jnp.where(search.h_last == 0, 1, search.h_last)
  share = jnp.where(share > 0, share, 0.5)
  again = (is_low == was_low) & search.seen_low & search.seen_high
  share = jnp.where(again, share, 1.0).astype(search.h_low.dtype)
  run, rise = new.multiplier - search.last, new.residual - search.h_last
  slope = jnp.clip(rise / jnp.where(run == 0, 1, run), flat / 2, STEEPEST * flat)
  slope = jnp.where(run == 0, search.slope, slope)
  best, was = new, search.best
  better = jnp.abs(new.residual) <= jnp.abs(was.residual)
  best = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, was)
  best = best._replace(evaluations=new.evaluations)
  return _Search(
    low=jnp.where(is_low, new.multiplier, search.low),
    h_low=jnp.where(is_low, new.residual, search.h_low * share),
    high=jnp.where(is_low, search.high, new.multiplier),
    h_high=jnp.where(is_low, search.h_high * share, new.residual),
    seen_low=search.seen_low | is_low,
    seen_high=search.seen_high | ~is_low,
    last=new.multiplier,
    h_last=new.residual,
    slope=slope,
    reach=jnp.where(run == 0, search.reach, 4 * jnp.abs(run)),
    best=best,
  )


def straight(
  momentum: Float[Array, 'in out'], at: Top, coefficients: msign_lib.Coefficients
) -> Solution:
  """msign(N): MuonSphere's direction, λ = 0, with what h is there."""
  phi = msign_lib.msign(momentum, coefficients)
  h = product(product(at.left.mT, phi), at.right.mT)[0, 0]
  return Solution(phi, jnp.zeros_like(h), h, jnp.int32(1))
