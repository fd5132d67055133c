"""A model's variables with its linear layers in block FP8, as the release stores them.

Axes: those of `m2jax.params`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from m2jax.kernels.block_fp8.blocks import WEIGHT, Blocks, quantize
from m2jax.params import BLOCK, Kind


def is_linear(name: str) -> bool:
  """Whether `ModelConfig.matmuls` and the release's quantization_config cover it.

  Args:
    name: the name of a block's parameter.
  """
  param = BLOCK.get(name)
  return param is not None and param.kind in (Kind.MATRIX, Kind.EXPERT)


def quantize_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
  """Variables whose linear layers are `Blocks`; those that are already stay."""

  def one(leaf):
    return leaf if isinstance(leaf, Blocks) else quantize(leaf, WEIGHT)

  return map_weights(one, variables)


def are_blocks(variables: Mapping[str, Any]) -> bool:
  """Whether the linear layers are `Blocks`."""
  return isinstance(variables['params']['layers']['q'], Blocks)


def map_weights(f: Callable[[Any], Any], variables: Mapping[str, Any]):
  """`f` of each weight of the linear layers of all blocks, MTP modules included."""

  def block(p):
    return {name: f(leaf) if is_linear(name) else leaf for name, leaf in p.items()}

  params = {**variables['params']}
  params['layers'] = block(params['layers'])
  if 'mtp' in params:
    params['mtp'] = {**params['mtp'], 'layers': block(params['mtp']['layers'])}
  return {**variables, 'params': params}


def nbytes(variables: Any) -> int:
  """Size of all arrays."""
  return sum(leaf.nbytes for leaf in jax.tree.leaves(variables))
