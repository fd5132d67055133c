"""Angles of rotary position embedding (m2-and-forge.md §1.4.4).

Inverse frequencies are theta^(-2j/R); `kernels.qk_norm_rope` rotates heads by these
angles.

Axes: R rotary dim.
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
