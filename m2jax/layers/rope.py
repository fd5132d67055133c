"""Angles of rotary position embedding (m2-and-forge.md §1.4.4).

Inverse frequencies are theta^(-2j/R); `kernels.qk_norm_rope` rotates heads by these
angles.

Axes: T tokens, R rotary dim; half = R/2.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float, Int
from m2jax.kernels import invariant


def tables(
  position: Int[Array, '*T'],
  rotary_dim: int,
  theta: float,
  dtype=jnp.float32,
  tiled: bool = False,
) -> tuple[Float[Array, '*T half'], Float[Array, '*T half']]:
  """cos, sin of each position's angles; at least fp32; see `invariant.rows`."""
  dtype = jnp.promote_types(dtype, jnp.float32)

  def make(position, _):
    j = jnp.arange(rotary_dim // 2, dtype=dtype)
    angle = position[..., None].astype(dtype) * theta ** (-2 * j / rotary_dim)
    return jnp.cos(angle), jnp.sin(angle)

  # Else XLA computes them again wherever a head is rotated.
  return lax.optimization_barrier(invariant.rows(make, position, None, tiled))
