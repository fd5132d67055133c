"""RMSNorm with statistics in at least fp32 (facts/m2-and-forge.md §1.4.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def mean_square(x: jax.Array) -> jax.Array:
  """Mean of x² over the last axis, which is kept with size 1."""
  wide = _wide(x)
  return jnp.mean(wide * wide, axis=-1, keepdims=True)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x [..., D] / rms(x) cast back to x's dtype, then times scale [D]."""
  x_hat = _wide(x) * jax.lax.rsqrt(mean_square(x) + eps)
  return x_hat.astype(x.dtype) * scale.astype(x.dtype)


def _wide(x):
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))
