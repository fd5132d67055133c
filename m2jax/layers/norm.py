"""RMSNorm with statistics in at least fp32 (facts/m2-and-forge.md §1.4.2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x [..., D] / rms(x) cast back to x's dtype, then times scale [D]."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
  return (wide * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * scale.astype(x.dtype)
