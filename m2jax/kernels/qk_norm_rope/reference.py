"""Flat RMSNorm and partial rotate-half RoPE in plain jnp (m2-and-forge.md §1.4.2–4).

On a CPU XLA fuses it into one pass: this is the CPU's implementation too.

Axes: T tokens, C = heads · H channels, H head dim, R rotary dim; half = R/2.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from m2jax.axes import Array, Float


def norm_rope(
  x: Float[Array, 'T C'],
  scale: Float[Array, 'C'],
  cos: Float[Array, 'T half'],
  sin: Float[Array, 'T half'],
  variance: Float[Array, 'T 1'] | None,
  *,
  head_dim: int,
  eps: float,
) -> Float[Array, 'T C']:
  """x / rms, times scale, with the first R dims of each head rotated."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if variance is None:
    variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
  x_hat = (wide * lax.rsqrt(variance + eps)).astype(x.dtype)
  y = (x_hat * scale.astype(x.dtype)).reshape(len(x), -1, head_dim)
  half = cos.shape[-1]
  cos, sin = cos[:, None], sin[:, None]
  a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
  rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1).reshape(x.shape)
