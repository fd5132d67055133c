"""Flat RMSNorm and partial rotate-half RoPE in plain jnp (m2-and-forge.md §1.4.2–4).

On a CPU XLA fuses it into one pass: this is the CPU's implementation too.

Axes: T tokens, C = heads · H channels, H head dim, R rotary dim.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def norm_rope(x, scale, cos, sin, variance, *, head_dim, eps):
  """x [T, C] / rms, times scale [C], with the first R dims of each head rotated."""
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
