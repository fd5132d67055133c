"""Matmuls of linear layers in low precision, above all DeepSeek-V3's block FP8."""

from m2jax.kernels.block_fp8.api import dot, grouped
from m2jax.kernels.block_fp8.blocks import Blocks, quantize

__all__ = ['Blocks', 'dot', 'grouped', 'quantize']
