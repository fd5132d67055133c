"""`dot` and `grouped`: the matmuls of linear layers in the precision of a config.

Axes: T rows (tokens), D in, F out, E groups.
"""

from __future__ import annotations

import dataclasses

from m2jax.axes import Array, Float, Int
from m2jax.config import PLAIN, Matmuls
from m2jax.kernels import grouped_matmul
from m2jax.kernels.block_fp8 import gradients, saved_activations
from m2jax.kernels.block_fp8.blocks import TOKEN, Blocks, quantize

_BITS = {'activations_int8': 8, 'activations_int4': 4}


def dot(
  x: Float[Array, 'T D'],
  w: Float[Array, 'D F'] | Blocks,
  matmuls: Matmuls = PLAIN,
  *,
  implementation: str | None = None,
) -> Float[Array, 'T F']:
  """x·w in x's dtype, to which w is cast first.

  Args:
    x: activations.
    w: weights. Blocks are dequantised, or with 'block_fp8' used as they are: without a
      gradient.
    matmuls: precision.
    implementation: an implementation of 'block_fp8': 'reference' or 'native'; None
      resolves by the target platform.

  Raises:
    ValueError: an unknown implementation.
  """
  if implementation not in (None, *gradients.PRODUCTS):
    raise ValueError(
      f'dot: implementation={implementation!r}, want one of {list(gradients.PRODUCTS)}'
    )
  if matmuls.kind == 'block_fp8' and isinstance(w, Blocks):
    a, how = quantize(x, TOKEN, matmuls), _of_stored(matmuls)
    return gradients.product(a, w, how, x.dtype, implementation).astype(x.dtype)
  w = w.astype(x.dtype)
  if matmuls.kind == 'plain':
    return x @ w
  if matmuls.kind == 'block_fp8':
    return gradients.dot(x, w, matmuls, implementation)
  return saved_activations.dot(x, w, _BITS[matmuls.kind], matmuls)


def grouped(
  rows: Float[Array, 'T D'],
  w: Float[Array, 'E D F'] | Blocks,
  group_sizes: Int[Array, 'E'],
  matmuls: Matmuls = PLAIN,
) -> Float[Array, 'T F']:
  """`dot` of consecutive groups of rows, as `grouped_matmul.matmul`."""
  if matmuls.kind == 'block_fp8' and isinstance(w, Blocks):
    a, how = quantize(rows, TOKEN, matmuls), _of_stored(matmuls)
    return gradients.grouped_product(a, w, group_sizes, how, rows.dtype)
  w = w.astype(rows.dtype)
  if matmuls.kind == 'plain':
    return grouped_matmul.matmul(rows, w, group_sizes)
  if matmuls.kind == 'block_fp8':
    return gradients.grouped(rows, w, group_sizes, matmuls)
  bits = _BITS[matmuls.kind]
  return saved_activations.grouped(rows, w, group_sizes, bits, matmuls)


def operand(w: Array | Blocks, dtype, matmuls: Matmuls) -> Array | Blocks:
  """Weights as `dot` and `grouped` take them, cast if those would cast them."""
  keep = matmuls.kind == 'block_fp8' and isinstance(w, Blocks)
  return w if keep else w.astype(dtype)


def _of_stored(matmuls: Matmuls) -> Matmuls:
  """The settings for stored weights, whose scales need not be powers of two."""
  return dataclasses.replace(matmuls, power_of_two=False)
