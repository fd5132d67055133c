"""The product of two matrices in block FP8, with e4m3 dot products.

One dot for each 128 elements of the contracted axis, as DeepSeek-V3 does: its fp32
result is multiplied by the scales of the rows and columns, and added. XLA lowers such a
dot to the FP8 matrix unit where there is one, and converts the operands elsewhere,
which is exact. Not run on an accelerator yet: the tests run it on a CPU and lower it
for TPU and GPU.

Axes: M rows, K contracted, N columns; k blocks of 128 along K.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.config import Matmuls
from m2jax.kernels.block_fp8.blocks import BLOCK, Blocks, spread


def product(a: Blocks, b: Blocks, how: Matmuls, dtype) -> jax.Array:
  """Same contract as `reference.product`."""
  del how
  (M, K), N = a.shape, b.shape[1]
  wide = jnp.promote_types(dtype, jnp.float32)
  values_a, values_b = _padded(a.values, 1), _padded(b.values, 0)
  scale_a = spread(a.scale, (a.tile[0], 1), (M, a.scale.shape[1]))  # [M, k]
  scale_b = spread(b.scale, (1, b.tile[1]), (b.scale.shape[0], N))  # [k, N]

  def add(k, out):
    part = lambda x, axis: lax.dynamic_slice_in_dim(x, k * BLOCK, BLOCK, axis)
    dot = lax.dot(
      part(values_a, 1), part(values_b, 0), preferred_element_type=jnp.float32
    )
    row = lax.dynamic_index_in_dim(scale_a, k, 1)
    column = lax.dynamic_index_in_dim(scale_b, k, 0)
    return out + (dot * row * column).astype(wide)

  return lax.fori_loop(0, -(-K // BLOCK), add, jnp.zeros((M, N), wide))


def _padded(values, axis: int):
  """Pads K with zeros to whole blocks."""
  pad = [(0, 0), (0, 0)]
  pad[axis] = (0, -values.shape[axis] % BLOCK)
  return jnp.pad(values, pad)
