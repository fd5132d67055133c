"""Rotary position embedding on the leading dims of each head (m2-and-forge.md §1.4.4).

Rotate-half pairing (i, i + R/2), inverse frequencies theta^(-2j/R); dims past R pass.

Axes: T tokens, N heads, H head dim, R rotary dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def tables(position: jax.Array, rotary_dim: int, theta: float, dtype=jnp.float32):
  """cos, sin [..., R/2] of position [...]; at least fp32."""
  dtype = jnp.promote_types(dtype, jnp.float32)
  j = jnp.arange(rotary_dim // 2, dtype=dtype)
  angle = position[..., None].astype(dtype) * theta ** (-2 * j / rotary_dim)
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """x [..., N, H] with cos, sin [..., R/2] → x's dtype."""
  half = cos.shape[-1]
  cos, sin = cos[..., None, :], sin[..., None, :]
  a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)
