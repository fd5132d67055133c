"""`dot` and `grouped`: the matmuls of linear layers in the precision of a config.

Axes: T rows (tokens), D in, F out, E groups.
"""

from __future__ import annotations

from m2jax.axes import Array, Float, Int
from m2jax.config import PLAIN, Matmuls
from m2jax.kernels import grouped_matmul
from m2jax.kernels.block_fp8 import reference, saved_activations

_BITS = {'activations_int8': 8, 'activations_int4': 4}


def dot(
  x: Float[Array, 'T D'], w: Float[Array, 'D F'], matmuls: Matmuls = PLAIN
) -> Float[Array, 'T F']:
  """x·w in x's dtype, to which w is cast first."""
  w = w.astype(x.dtype)
  if matmuls.kind == 'plain':
    return x @ w
  if matmuls.kind == 'block_fp8':
    return reference.dot(x, w, matmuls.clip)
  return saved_activations.dot(x, w, _BITS[matmuls.kind], matmuls.clip)


def grouped(
  rows: Float[Array, 'T D'],
  w: Float[Array, 'E D F'],
  group_sizes: Int[Array, 'E'],
  matmuls: Matmuls = PLAIN,
) -> Float[Array, 'T F']:
  """`grouped_matmul.matmul` in the rows' dtype, to which w is cast first."""
  w = w.astype(rows.dtype)
  if matmuls.kind == 'plain':
    return grouped_matmul.matmul(rows, w, group_sizes)
  if matmuls.kind == 'block_fp8':
    return reference.grouped(rows, w, group_sizes, matmuls.clip)
  bits = _BITS[matmuls.kind]
  return saved_activations.grouped(rows, w, group_sizes, bits, matmuls.clip)
