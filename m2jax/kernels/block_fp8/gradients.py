"""Linear layers in block FP8: which tensors of the three matmuls have which tiles.

With Q_a×b(·) rounded to e4m3 with a scale for each tile of a rows and b columns, and
x [T, D], w [D, F] (DeepSeek-V3, docs/facts/algorithms.md §5):

  out = Q_1×128(x)·Q_128×128(w)         Fprop
  d_x = Q_1×128(d_out)·Q_128×128(w)ᵀ    Dgrad
  d_w = Q_128×1(x)ᵀ·Q_128×1(d_out)      Wgrad, tiles along tokens

x is saved unquantised, so that Wgrad rounds it only once. Weights are already cast to
x's dtype, as when a mesh gathers them. In the grouped form each tile of Wgrad is in one
group: tiles begin at the group's first row. On every platform `grouped_matmul` computes
the grouped products, from dequantised operands.

Axes: T rows (tokens), D in, F out, E groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from m2jax import platforms
from m2jax.config import Matmuls
from m2jax.kernels import grouped_matmul
from m2jax.kernels.block_fp8 import native, reference
from m2jax.kernels.block_fp8.blocks import (
  BLOCK,
  LARGEST,
  TOKEN,
  TOKENS,
  WEIGHT,
  Blocks,
  quantize,
  scales,
  to_e4m3,
)

PRODUCTS = {'reference': reference.product, 'native': native.product}


def product(a: Blocks, b: Blocks, how: Matmuls, dtype, implementation: str | None):
  """a·b; None is 'native' if the target platform is a GPU, else 'reference'."""
  call = lambda name: lambda a, b: PRODUCTS[name](a, b, how, dtype)
  if implementation is None:
    return platforms.dependent(a, b, cuda=call('native'), default=call('reference'))
  return call(implementation)(a, b)


def transposed(x: Blocks) -> Blocks:
  return Blocks(x.values.T, x.scale.T, x.tile[::-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def dot(x, w, how: Matmuls, implementation: str | None):
  """x [T, D] · w [D, F] → [T, F] in x's dtype."""
  a, b = quantize(x, TOKEN, how), quantize(w, WEIGHT, how)
  return product(a, b, how, x.dtype, implementation).astype(x.dtype)


def _dot_fwd(x, w, how, implementation):
  return dot(x, w, how, implementation), (x, w)


def _dot_bwd(how, implementation, residuals, d_out):
  x, w = residuals
  times = functools.partial(
    product, how=how, dtype=x.dtype, implementation=implementation
  )
  matrix = transposed(quantize(w, WEIGHT, how))
  d_x = times(quantize(d_out, TOKEN, how), matrix)
  d_w = times(transposed(quantize(x, TOKENS, how)), quantize(d_out, TOKENS, how))
  return d_x.astype(x.dtype), d_w.astype(w.dtype)


dot.defvjp(_dot_fwd, _dot_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(rows, w, group_sizes, how: Matmuls):
  """`grouped_matmul.matmul` of rows [T, D] and w [E, D, F]; in the rows' dtype."""
  a, b = quantize(rows, TOKEN, how), quantize(w, WEIGHT, how)
  return grouped_product(a, b, group_sizes, how, rows.dtype)


def grouped_product(a: Blocks, b: Blocks, group_sizes, how: Matmuls, dtype):
  """Rows a [T, D] times their groups' matrices b [E, D, F], in `dtype`."""
  a, b = (reference.operand(x, how, dtype) for x in (a, b))
  return grouped_matmul.matmul(a, b, group_sizes).astype(dtype)


def _grouped_fwd(rows, w, group_sizes, how):
  return grouped(rows, w, group_sizes, how), (rows, w, group_sizes)


def _grouped_bwd(how, residuals, d_out):
  rows, w, sizes = residuals
  operand = functools.partial(reference.operand, how=how, dtype=rows.dtype)
  matrices, d_rows_out = (
    operand(quantize(x, tile, how)) for x, tile in ((w, WEIGHT), (d_out, TOKEN))
  )
  # of a product the cotangent of either operand depends on the other one alone
  by_rows = lambda a: grouped_matmul.matmul(a, matrices, sizes)
  (d_rows,) = jax.vjp(by_rows, rows.astype(matrices.dtype))[1](d_rows_out)
  along = functools.partial(_along_tokens, tiles=_tiles(sizes, len(rows)), how=how)
  saved, d_saved = (along(x).astype(matrices.dtype) for x in (rows, d_out))
  by_matrices = lambda b: grouped_matmul.matmul(saved, b, sizes)
  (d_w,) = jax.vjp(by_matrices, matrices)[1](d_saved)
  return d_rows.astype(rows.dtype), d_w.astype(w.dtype), None


grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _tiles(group_sizes, rows: int):
  """The tile of each row, and a number of tiles that is enough for any sizes.

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


def _along_tokens(x, tiles, how: Matmuls):
  """x rounded to e4m3 in tiles of rows, one column each; `tiles` is of `_tiles`."""
  tile, count = tiles
  x = x.astype(jnp.float32)
  largest = jax.ops.segment_max(jnp.abs(x), tile, count, indices_are_sorted=True)
  scale = scales(largest, LARGEST, how)[tile]
  return to_e4m3(x / scale, how).astype(jnp.float32) * scale
