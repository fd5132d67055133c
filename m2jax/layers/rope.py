"""Angles of rotary position embedding (m2-and-forge.md §1.4.4).

Inverse frequencies are theta^(-2j/R); `kernels.qk_norm_rope` rotates heads by these
angles.

Axes: T tokens, R rotary dim; half = R/2.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float, Int


def tables(
  position: Int[Array, '*T'], rotary_dim: int, theta: float, dtype=jnp.float32
) -> tuple[Float[Array, '*T half'], Float[Array, '*T half']]:
  """cos, sin of each position's angles; at least fp32."""
  dtype = jnp.promote_types(dtype, jnp.float32)
  j = jnp.arange(rotary_dim // 2, dtype=dtype)
  angle = position[..., None].astype(dtype) * theta ** (-2 * j / rotary_dim)
  # Else XLA computes them again wherever a head is rotated.
  return lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))
