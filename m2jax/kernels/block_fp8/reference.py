"""The product of two matrices in block FP8, emulated: it defines the numbers.

The operands are dequantised to fp32 and multiplied. Products of e4m3 numbers are exact
in fp32, and one scale applies to 128 of them: to the rounding of fp32 sums this equals
scaled partial sums over 128 elements (docs/facts/algorithms.md §5). Scales that are
powers of two are exact in bf16 as well: bf16 activations then have bf16 operands, which
matrix units without FP8 multiply at full speed.

Axes: M rows, K contracted, N columns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from m2jax.config import Matmuls
from m2jax.kernels.block_fp8.blocks import Blocks


def product(a: Blocks, b: Blocks, how: Matmuls, dtype) -> jax.Array:
  """a [M, K] · b [K, N] in at least fp32; `dtype` is that of the activations."""
  wide = jnp.promote_types(dtype, jnp.float32)
  a, b = (operand(x, how, dtype) for x in (a, b))
  return jnp.matmul(a, b, precision=lax.Precision.HIGHEST, preferred_element_type=wide)


def operand(x: Blocks, how: Matmuls, dtype) -> jax.Array:
  """Dequantised without rounding: to fp32, or to bf16 where that is exact."""
  exact = how.power_of_two and dtype == jnp.bfloat16
  return x.astype(jnp.bfloat16 if exact else jnp.float32)
