"""Numbers of few bits with one scale a tile, and back.

x ≈ values·scale, scale = max|x| of the tile / the format's largest magnitude. Block FP8
is e4m3 (DeepSeek-V3, docs/facts/algorithms.md §5.1). A cast to e4m3fn overflows to NaN,
so values are clamped before it. A NaN or infinity makes its whole tile NaN. Unlike
DeepSeek's kernels for inference, scales have no floor of 1e-4/448: gradients are
smaller. Tiles at the end of an axis that is not a multiple of theirs are smaller.

Axes: R rows, C columns; r, c tiles along them.
"""

from __future__ import annotations

import jax.numpy as jnp

from m2jax.axes import Array, Float, Float32

BLOCK = 128
TOKEN = (1, BLOCK)  # tile of activations: 128 channels of a token
TOKENS = (BLOCK, 1)  # and for the weights' gradient: 128 tokens of a channel
WEIGHT = (BLOCK, BLOCK)
DTYPE = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3fn

# Scales stay normal numbers: a tile of zeros has this one, and values of 0.
SMALLEST_SCALE = 2.0**-126


def quantize(
  x: Float[Array, '*E R C'], tile: tuple[int, int], clip: float = 1.0
) -> tuple[Float[Array, '*E R C'], Float32[Array, '*E r c']]:
  """e4m3 values and the scales of tiles of `tile` = (rows, columns).

  clip: values saturate at this part of the tile's largest magnitude.
  """
  scale = _scales(_largest(x, tile), LARGEST)
  values = x.astype(jnp.float32) / spread(scale, tile, x.shape)
  bound = LARGEST * clip
  return jnp.clip(values, -bound, bound).astype(DTYPE), scale


def dequantize(
  values: Float[Array, '*E R C'],
  scale: Float32[Array, '*E r c'],
  tile: tuple[int, int],
) -> Float32[Array, '*E R C']:
  """values·scale."""
  return values.astype(jnp.float32) * spread(scale, tile, values.shape)


def rounded(
  x: Float[Array, '*E R C'], tile: tuple[int, int], clip: float = 1.0
) -> Float32[Array, '*E R C']:
  """The numbers that `quantize` represents x by."""
  return dequantize(*quantize(x, tile, clip), tile)


def rounded_to_int(
  x: Float[Array, 'R C'], bits: int, clip: float = 1.0
) -> Float[Array, 'R C']:
  """x as integers of `bits` bits, symmetric about 0, times a scale a row; x's dtype."""
  largest = float(2 ** (bits - 1) - 1)
  scale = _scales(_largest(x, (1, x.shape[1])), largest)
  bound = largest * clip
  values = jnp.clip(jnp.round(x.astype(jnp.float32) / scale), -bound, bound)
  return (values * scale).astype(x.dtype)


def spread(scale, tile: tuple[int, int], shape: tuple[int, ...]):
  """Each tile's scale at all of its elements; `shape` is theirs."""
  for axis, size in zip((-2, -1), tile, strict=True):
    if size > 1:
      scale = jnp.repeat(scale, size, axis=axis)
  return scale[..., : shape[-2], : shape[-1]]


def _largest(x, tile: tuple[int, int]):
  """max|x| of each tile."""
  (a, b), (rows, columns) = tile, x.shape[-2:]
  lead = [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(
    jnp.abs(x.astype(jnp.float32)), [*lead, (0, -rows % a), (0, -columns % b)]
  )
  x = x.reshape(*x.shape[:-2], x.shape[-2] // a, a, x.shape[-1] // b, b)
  return jnp.max(x, axis=(-3, -1))


def _scales(largest, of_format: float):
  return jnp.maximum(largest / of_format, SMALLEST_SCALE)
