"""Quantises numbers to few bits with one scale per tile, and dequantises them.

x ≈ values·scale, scale = max|x| of the tile / the format's largest magnitude. Block FP8
is e4m3 (DeepSeek-V3, docs/facts/algorithms.md §5). A cast to e4m3fn overflows to NaN,
so values are clamped before it. A NaN or infinity makes its whole tile NaN. Unlike in
DeepSeek's inference kernels, scales have no floor of 1e-4/448: gradients are smaller
than that. The last tile is smaller if an axis is not a multiple of the tile size.

Axes: R rows, C columns; r, c tiles along them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from m2jax.axes import Array, Float, Float32
from m2jax.config import Matmuls

FP8 = Matmuls('block_fp8')
BLOCK = 128
TOKEN = (1, BLOCK)  # tile of activations: 128 channels of a token
TOKENS = (BLOCK, 1)  # and for the weights' gradient: 128 tokens of a channel
WEIGHT = (BLOCK, BLOCK)
DTYPE = jnp.float8_e4m3fn
LARGEST = 448.0  # of e4m3fn

# Scales stay normal numbers: a tile of zeros has this one, and values of 0.
SMALLEST_SCALE = 2.0**-126


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=('values', 'scale'),
  meta_fields=('tile',),
)
@dataclasses.dataclass(frozen=True)
class Blocks:
  """A matrix, or stacked matrices, in block FP8.

  Indices and scans over leading axes apply to `jax.tree` leaves, as for any pytree.

  Attributes:
    values: e4m3.
    scale: fp32, of each tile.
    tile: rows and columns of a tile.
  """

  values: Float[Array, '*E R C']
  scale: Float32[Array, '*E r c']
  tile: tuple[int, int] = WEIGHT

  @property
  def shape(self) -> tuple[int, ...]:
    return self.values.shape

  @property
  def ndim(self) -> int:
    return self.values.ndim

  @property
  def dtype(self):
    return self.values.dtype

  def __len__(self) -> int:
    return len(self.values)

  def astype(self, dtype) -> jax.Array:
    """values·scale, an array."""
    scale = spread(self.scale, self.tile, self.shape)
    return (self.values.astype(jnp.float32) * scale).astype(dtype)


def quantize(
  x: Float[Array, '*E R C'], tile: tuple[int, int], how: Matmuls = FP8
) -> Blocks:
  """x in e4m3 with a scale for each tile of (rows, columns)."""
  scale = scales(_largest(x, tile), LARGEST, how)
  values = x.astype(jnp.float32) / spread(scale, tile, x.shape)
  return Blocks(to_e4m3(values, how), scale, tile)


def to_e4m3(values: Float[Array, '*E R C'], how: Matmuls) -> Float[Array, '*E R C']:
  """Clamped to ±448·clip, then cast."""
  bound = LARGEST * how.clip
  return jnp.clip(values, -bound, bound).astype(DTYPE)


def scales(
  largest: Float[Array, '*r'], of_format: float, how: Matmuls
) -> Float32[Array, '*r']:
  """Scales of tiles with these maxima, for a format with the maximum `of_format`."""
  # XLA would turn a division by a constant into this product, but only when compiling
  scale = largest.astype(jnp.float32) * jnp.float32(1 / of_format)
  scale = jnp.maximum(scale, SMALLEST_SCALE)
  return _power_of_two(scale) if how.power_of_two else scale


def _power_of_two(scale):
  """The next power of two at or above a positive normal number; NaN, inf unchanged."""
  bits = jax.lax.bitcast_convert_type(scale, jnp.int32)
  mantissa = (1 << 23) - 1
  up = jax.lax.bitcast_convert_type((bits + mantissa) & ~mantissa, jnp.float32)
  return jnp.where(jnp.isfinite(scale), up, scale)


def rounded_to_int(
  x: Float[Array, 'R C'], bits: int, how: Matmuls
) -> Float[Array, 'R C']:
  """x as integers of `bits` bits, symmetric about 0, times a scale a row; x's dtype."""
  largest = float(2 ** (bits - 1) - 1)
  scale = scales(_largest(x, (1, x.shape[1])), largest, how)
  bound = largest * how.clip
  values = jnp.clip(jnp.round(x.astype(jnp.float32) / scale), -bound, bound)
  return (values * scale).astype(x.dtype)


def spread(
  scale: Float[Array, '*E r c'], tile: tuple[int, int], shape: tuple[int, ...]
) -> Float[Array, '*E R C']:
  """Each tile's scale at all of its elements; `shape` is theirs."""
  for axis, size in zip((-2, -1), tile, strict=True):
    if size > 1:
      scale = jnp.repeat(scale, size, axis=axis)
  return scale[..., : shape[-2], : shape[-1]]


def _largest(x, tile: tuple[int, int]):
  """max|x| of each tile."""
  (a, b), (rows, columns) = tile, x.shape[-2:]
  pad = [(0, 0)] * (x.ndim - 2) + [(0, -rows % a), (0, -columns % b)]
  x = jnp.pad(jnp.abs(x.astype(jnp.float32)), pad)
  x = x.reshape(*x.shape[:-2], x.shape[-2] // a, a, x.shape[-1] // b, b)
  return jnp.max(x, axis=(-3, -1))
