"""Block-FP8 weights as released: e4m3 values and one fp32 scale per block of 128×128.

facts/m2-and-forge.md §1.3: `X.weight` is stored with `X.weight_scale_inv`
[ceil(out/128), ceil(in/128)]; a weight is its value times the scale of its block.
Blocks at the lower and right edges may be smaller.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from m2jax.checkpoint.huggingface.names import Tensor
from m2jax.kernels import block_fp8
from m2jax.kernels.block_fp8 import blocks, weights

DTYPE = 'block_fp8'  # as an argument of `load` and `save`
BLOCK = blocks.WEIGHT
QUANTIZATION = {  # as released; `quantization_config` of config.json
  'quant_method': 'fp8',
  'fmt': 'float8_e4m3fn',
  'activation_scheme': 'dynamic',
  'weight_block_size': list(BLOCK),
  'modules_to_not_convert': ['gate', 'e_score_correction_bias', 'lm_head'],
}
_VALUES, _SCALE = '/values', '/scale'  # of the fields of `block_fp8.Blocks`

CODE = 'F8_E4M3'  # dtype of the values in safetensors
SCALE_SUFFIX = '_scale_inv'  # appended to the weight's name


def scale_shape(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
  """Shape of the scales of a weight."""
  return tuple(-(-size // b) for size, b in zip(shape, block, strict=True))


def dequantize(
  values: np.ndarray, scale: np.ndarray, block: tuple[int, int], first_row: int = 0
) -> np.ndarray:
  """Dequantises some rows of a weight to fp32.

  Args:
    values: [n, in] e4m3: rows first_row … first_row + n − 1 of the weight.
    scale: [ceil(out/block[0]), ceil(in/block[1])] of the whole weight.
    block: rows and columns of a block.
    first_row: index of the first row in the weight.
  """
  rows = (first_row + np.arange(values.shape[0])) // block[0]
  columns = np.repeat(np.arange(scale.shape[1]), block[1])[: values.shape[1]]
  out = values.astype(np.float32)
  out *= scale.astype(np.float32)[rows][:, columns]
  return out


def is_quantized(leaf: str) -> bool:
  """Whether the release stores the matrices of a leaf ('params/layers/q') in FP8."""
  *folders, name = leaf.split('/')
  return weights.is_linear(name) and folders[-1] == 'layers'


def parts(tensor: Tensor) -> list[Tensor]:
  """Values and scales of a tensor that is stored in FP8; any other one itself."""
  if not is_quantized(tensor.leaf):
    return [tensor]
  scales = tensor._replace(
    name=tensor.name + SCALE_SUFFIX,
    shape=scale_shape(tensor.shape, BLOCK),
    leaf=tensor.leaf + _SCALE,
  )
  return [tensor._replace(leaf=tensor.leaf + _VALUES), scales]


def part_shapes(shapes: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
  """The leaves of `parts`, from those of a model."""
  found = {}
  for leaf, like in shapes.items():
    if not is_quantized(leaf):
      found[leaf] = like
      continue
    *lead, rows, columns = like.shape
    scale = *lead, *scale_shape((rows, columns), BLOCK)
    found[leaf + _VALUES] = jax.ShapeDtypeStruct(like.shape, blocks.DTYPE)
    found[leaf + _SCALE] = jax.ShapeDtypeStruct(scale, np.float32)
  return found


def base(leaf: str) -> str:
  """The leaf of a part."""
  return leaf.removesuffix(_VALUES).removesuffix(_SCALE)


def joined(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Nested variables whose FP8 leaves are dicts of parts, with `Blocks` instead."""
  return weights.map_weights(lambda parts: block_fp8.Blocks(**parts), variables)


def quantize(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Values and scales of rows of a matrix, which begin at a block."""
  found = _quantize(rows)
  return np.asarray(found.values), np.asarray(found.scale)


_quantize = jax.jit(functools.partial(block_fp8.quantize, tile=BLOCK))
