"""Names and shapes of M2's tensors in a Hugging Face checkpoint.

They follow from the names in params.py, as released and as transformers writes them. No
release has MTP modules; they get the names of the one implementation that reads them
(facts/m2-and-forge.md §3, SGLang PR 13981): `model.mtp_layers.0.` with `h_norm`,
`e_norm`, `linear_projection` and the names of the block.

The checkpoint's matrices are [out, in], with a tensor per layer and expert; ours are
[in, out], stacked over layers and experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from m2jax import params
from m2jax.checkpoint import leaves
from m2jax.config import ModelConfig

MTP_PREFIX = 'model.mtp_layers.'

_UNTRANSPOSED = ('params/embed',)  # a table of rows in both


class Tensor(NamedTuple):
  """A tensor of the checkpoint and its position in the model's variables.

  Attributes:
    name: its name in the checkpoint.
    shape: its shape in the checkpoint.
    leaf: path of the array that it is part of, such as 'params/layers/gate'.
    index: into the leading axes of that array: (layer,) or (layer, expert).
    transposed: whether the array has its transpose.
  """

  name: str
  shape: tuple[int, ...]
  leaf: str
  index: tuple[int, ...]
  transposed: bool


@functools.lru_cache(maxsize=4)
def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shape of every leaf of the model's variables by path. Do not modify the dict."""
  return {name: leaf.shape for name, leaf in leaves.table(params.shapes(cfg)).items()}


def tensors(cfg: ModelConfig) -> list[Tensor]:
  """All tensors of a model, layer after layer."""
  of = shapes(cfg)

  def top(leaf: str) -> Tensor:
    return _tensor(of, f'params/{leaf}', (), params.TOP[leaf].released)

  found = [top(leaf) for leaf in params.TOP if leaf != 'head']
  for layer in range(cfg.num_layers):
    found += _block(of, 'params/layers', 'router/layers', layer, 'model.layers.')
  found.append(top('head'))
  for module in range(cfg.num_mtp_modules):
    prefix = f'{MTP_PREFIX}{module}.'
    found += [
      _tensor(of, f'params/mtp/{leaf}', (module,), prefix + param.released)
      for leaf, param in params.MTP.items()
    ]
    found += _block(of, 'params/mtp/layers', 'router/mtp', module, MTP_PREFIX)
  missed = sum(map(math.prod, of.values())) - sum(math.prod(t.shape) for t in found)
  assert not missed, f'{missed} elements of the model have no name in the checkpoint'
  return found


def _block(of, path: str, bias: str, layer: int, prefix: str) -> Iterator[Tensor]:
  """Tensors of one decoder block: `layer` of the arrays below `path`."""
  prefix = f'{prefix}{layer}.'
  experts = {n: p for n, p in params.BLOCK.items() if p.kind is params.Kind.EXPERT}
  for leaf, param in params.BLOCK.items():
    if leaf not in experts:
      yield _tensor(of, f'{path}/{leaf}', (layer,), prefix + param.released)
  yield _tensor(of, bias, (layer,), prefix + params.ROUTER_BIAS)
  for expert in range(of[f'{path}/gate'][1]):
    for leaf, param in experts.items():
      name = f'{prefix}block_sparse_moe.experts.{expert}.{param.released}'
      yield _tensor(of, f'{path}/{leaf}', (layer, expert), name)


def _tensor(of, leaf: str, index: tuple[int, ...], name: str) -> Tensor:
  shape = of[leaf][len(index) :]
  transposed = len(shape) == 2 and leaf not in _UNTRANSPOSED
  return Tensor(name, shape[::-1] if transposed else shape, leaf, index, transposed)
