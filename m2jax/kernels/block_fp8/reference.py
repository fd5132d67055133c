"""Matmuls in block FP8, emulated: quantise, dequantise, multiply in fp32.

With Q_a×b(·) rounded to e4m3 with a scale for each tile of a rows and b columns
(`quantize`), and x [T, D], w [D, F] (docs/facts/algorithms.md §5.1):

  out = Q_1×128(x)·Q_128×128(w)         Fprop
  d_x = Q_1×128(d_out)·Q_128×128(w)ᵀ    Dgrad
  d_w = Q_128×1(x)ᵀ·Q_128×1(d_out)      Wgrad, tiles along tokens

x is saved as it was, not as quantised for Fprop, so that Wgrad rounds it once. Products
of e4m3 numbers are exact in fp32, and one scale applies to 128 of them: to the rounding
of fp32 sums, multiplying the dequantised matrices is the same as scaling partial sums
over 128 elements. Weights are first cast to x's dtype, as a mesh does that gathers
them.

In the grouped form the tiles of Wgrad are of one group: they begin at its first row.

Axes: T rows (tokens), D in, F out, E groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.kernels import grouped_matmul
from m2jax.kernels.block_fp8.quantize import (
  BLOCK,
  DTYPE,
  LARGEST,
  SMALLEST_SCALE,
  TOKEN,
  TOKENS,
  WEIGHT,
  rounded,
)


def _matmul(a, b):
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(x, w, clip: float):
  """x [T, D] · w [D, F] → [T, F] in x's dtype."""
  out = _matmul(rounded(x, TOKEN, clip), rounded(w, WEIGHT, clip))
  return out.astype(x.dtype)


def _dot_fwd(x, w, clip):
  return dot(x, w, clip), (x, w)


def _dot_bwd(clip, residuals, d_out):
  x, w = residuals
  d_x = _matmul(rounded(d_out, TOKEN, clip), rounded(w, WEIGHT, clip).T)
  d_w = _matmul(rounded(x, TOKENS, clip).T, rounded(d_out, TOKENS, clip))
  return d_x.astype(x.dtype), d_w.astype(w.dtype)


dot.defvjp(_dot_fwd, _dot_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(rows, w, group_sizes, clip: float):
  """`grouped_matmul.matmul` of rows [T, D] and w [E, D, F]; in the rows' dtype."""
  a, b = rounded(rows, TOKEN, clip), rounded(w, WEIGHT, clip)
  return grouped_matmul.matmul(a, b, group_sizes).astype(rows.dtype)


def _grouped_fwd(rows, w, group_sizes, clip):
  return grouped(rows, w, group_sizes, clip), (rows, w, group_sizes)


def _grouped_bwd(clip, residuals, d_out):
  rows, w, sizes = residuals
  matrices = rounded(w, WEIGHT, clip)
  by_rows = lambda rows: grouped_matmul.matmul(rows, matrices, sizes)
  (d_rows,) = jax.vjp(by_rows, rows.astype(jnp.float32))[1](rounded(d_out, TOKEN, clip))
  tiles = _tiles(sizes, len(rows))
  by_tokens = functools.partial(_rounded_along, tiles=tiles, clip=clip)
  by_matrices = lambda w: grouped_matmul.matmul(by_tokens(rows), w, sizes)
  (d_w,) = jax.vjp(by_matrices, matrices)[1](by_tokens(d_out))
  return d_rows.astype(rows.dtype), d_w.astype(w.dtype), None


grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _tiles(group_sizes, rows: int):
  """The tile of each row, and the number of tiles that any sizes can need.

  Rows past the sum of the sizes are in the last tile, which no other row is in.
  """
  count = -(-group_sizes // BLOCK)
  most = rows // BLOCK + len(group_sizes)
  ends = jnp.cumsum(group_sizes)
  row = jnp.arange(rows)
  group = jnp.sum(row[:, None] >= ends, axis=1)
  own = jnp.minimum(group, len(group_sizes) - 1)
  first_row, first_tile = ends - group_sizes, jnp.cumsum(count) - count
  tile = first_tile[own] + (row - first_row[own]) // BLOCK
  return jnp.where(group < len(group_sizes), tile, most), most + 1


def _rounded_along(x, tiles, clip: float):
  """Q of tiles of rows, one column each; `tiles` as `_tiles` gives them."""
  tile, count = tiles
  x = x.astype(jnp.float32)
  largest = jax.ops.segment_max(jnp.abs(x), tile, count, indices_are_sorted=True)
  scale = jnp.maximum(largest / LARGEST, SMALLEST_SCALE)[tile]
  bound = LARGEST * clip
  values = jnp.clip(x / scale, -bound, bound).astype(DTYPE)
  return values.astype(jnp.float32) * scale
