"""The matrix sign msign(X) = U Vᵀ of X = U S Vᵀ, by Newton–Schulz iterations.

Each iteration is an odd polynomial, X ← a X + (b A + c A²) X with A = X Xᵀ, so that it
acts on the singular values alone. What differs is its coefficients:

  POLAR_EXPRESS  a row for each of 8 steps (arXiv:2505.16932, divided by their safety
                 factor 1.01): singular values within 1e-5 of 1 in fp32
  QUINTIC        Keller Jordan's one row: steep at 0, values end in about [0.7, 1.2]

Source: facts/algorithms.md §1.3 and §1.6. The products are fp32 at the highest
precision: in bf16 the values end in [0.993, 1.007], and the multiplier of `sphere`
cannot reach its tolerance.

Axes: in, out of a matrix.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float

Coefficients = tuple[tuple[float, float, float], ...]

POLAR_EXPRESS: Coefficients = (
  (8.2051, -22.9019, 16.4607),
  (4.0664, -2.8612, 0.5184),
  (3.9096, -2.8234, 0.5250),
  (3.2856, -2.4153, 0.4853),
  (2.2779, -1.6198, 0.3985),
  (1.8726, -1.2307, 0.3585),
  (1.8564, -1.2132, 0.3568),
  (1.8750, -1.2500, 0.3750),
)
QUINTIC = (3.4445, -4.7750, 2.0315)


def msign(
  x: Float[Array, '*batch in out'],
  coefficients: Coefficients = POLAR_EXPRESS,
) -> Float[Array, '*batch in out']:
  """U Vᵀ of each matrix U S Vᵀ of x, in at least fp32; 0 for a zero matrix.

  Singular values below about 1e-3 of the largest end between 0 and 1.

  Args:
    x: matrices of any scale: each is divided by its Frobenius norm.
    coefficients: each iteration's coefficients.

  Example:
    >>> x = jnp.diag(jnp.array([3.0, -0.5]))
    >>> print(jnp.round(msign(x), 4))
    [[ 1.  0.]
     [ 0. -1.]]
  """
  y = normalized(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
  wide = y.shape[-2] <= y.shape[-1]
  y = iterate(y if wide else y.mT, coefficients)
  return y if wide else y.mT


def normalized(x: Float[Array, '*batch in out']) -> Float[Array, '*batch in out']:
  """Each matrix over its Frobenius norm; 0 stays 0.

  The largest element is divided out first, since the squares of RL's gradients, 1e-18
  and less, are not fp32 numbers.
  """
  largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True)
  x = x / jnp.where(largest > 0, largest, 1)
  norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
  return x / jnp.where(norm > 0, norm, 1)


def iterate(
  x: Float[Array, '*batch in out'],
  coefficients: Coefficients,
  precision: lax.Precision | None = lax.Precision.HIGHEST,
) -> Float[Array, '*batch in out']:
  """The iterations alone; in at most out, singular values at most about 1."""

  def dot(x, y):
    return jnp.matmul(x, y, precision=precision)

  def step(x, row):
    gram = dot(x, x.mT)
    return row[0] * x + dot(row[1] * gram + row[2] * dot(gram, gram), x), None

  return lax.scan(step, x, jnp.asarray(coefficients, x.dtype))[0]


def product(x: jax.Array, y: jax.Array) -> jax.Array:
  """x y at the highest precision; GPUs and TPUs would use less for fp32."""
  return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
