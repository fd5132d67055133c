"""Block-FP8 weights as released: e4m3 values and one fp32 scale per block of 128×128.

facts/m2-and-forge.md §1.3: `X.weight` is stored with `X.weight_scale_inv`
[ceil(out/128), ceil(in/128)]; a weight is its value times the scale of its block.
Blocks at the lower and right edges may be smaller.
"""

from __future__ import annotations

import numpy as np

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
