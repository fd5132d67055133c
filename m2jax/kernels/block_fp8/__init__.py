"""Matmuls of linear layers in low precision, above all DeepSeek-V3's block FP8."""

from m2jax.kernels.block_fp8.api import dot, grouped, operand
from m2jax.kernels.block_fp8.blocks import Blocks, quantize
from m2jax.kernels.block_fp8.weights import are_blocks, quantize_variables

__all__ = [
  'Blocks',
  'are_blocks',
  'dot',
  'grouped',
  'operand',
  'quantize',
  'quantize_variables',
]
