"""RMSNorm with statistics in at least fp32 (facts/m2-and-forge.md §1.4.2).

Axes: T tokens, D the channels that are normed together.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float
from m2jax.kernels import invariant


def mean_square(x: Float[Array, '*T D']) -> Float[Array, '*T 1']:
  """Mean of x² over the last axis."""
  wide = _wide(x)
  return jnp.mean(wide * wide, axis=-1, keepdims=True)


def rms_norm(
  x: Float[Array, '*T D'], scale: Float[Array, 'D'], eps: float, tiled: bool = False
) -> Float[Array, '*T D']:
  """x / rms(x) cast back to x's dtype, then times scale; see `invariant.rows`."""

  def norm(x, scale):
    x_hat = _wide(x) * jax.lax.rsqrt(mean_square(x) + eps)
    return x_hat.astype(x.dtype) * scale.astype(x.dtype)

  return invariant.rows(norm, x, scale, tiled)


def _wide(x):
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
