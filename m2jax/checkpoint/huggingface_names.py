"""Names and shapes of M2's tensors in a Hugging Face checkpoint.

facts/m2-and-forge.md §1.3, as released and as transformers writes them. MTP modules,
which no release has, get the names of the one implementation that reads them (§3,
SGLang PR 13981): `model.mtp_layers.K.` with `h_norm`, `e_norm`, `linear_projection` and
the block's own names.

There a matrix is [out, in], here [in, out]; there every layer and expert has a tensor
of its own, here they are stacked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from m2jax import model as model_lib
from m2jax.checkpoint import leaves
from m2jax.config import ModelConfig

MTP_PREFIX = 'model.mtp_layers.'
ROUTER_BIAS = 'e_score_correction_bias'

_TOP = {
  'params/embed': 'model.embed_tokens.weight',
  'params/final_norm': 'model.norm.weight',
  'params/head': 'lm_head.weight',
}
_BLOCK = {
  'attn_norm': 'input_layernorm.weight',
  'q': 'self_attn.q_proj.weight',
  'k': 'self_attn.k_proj.weight',
  'v': 'self_attn.v_proj.weight',
  'o': 'self_attn.o_proj.weight',
  'q_norm': 'self_attn.q_norm.weight',
  'k_norm': 'self_attn.k_norm.weight',
  'moe_norm': 'post_attention_layernorm.weight',
  'router': 'block_sparse_moe.gate.weight',
}
_EXPERT = {'gate': 'w1.weight', 'down': 'w2.weight', 'up': 'w3.weight'}
_MTP = {
  'hidden_norm': 'h_norm.weight',
  'embed_norm': 'e_norm.weight',
  'proj': 'linear_projection.weight',
}
_UNTRANSPOSED = ('params/embed',)  # a table of rows there and here


class Tensor(NamedTuple):
  """A tensor of the checkpoint and its place in the model's variables.

  Attributes:
    name: in the checkpoint.
    shape: there.
    leaf: path of the array it is part of, 'params/layers/gate'.
    index: of its part on the leading axes of that array: (layer,) or (layer, expert).
    transposed: the array holds its transpose.
  """

  name: str
  shape: tuple[int, ...]
  leaf: str
  index: tuple[int, ...]
  transposed: bool


@functools.lru_cache(maxsize=4)
def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Shape of every leaf of the model's variables by path. Do not change the dict."""
  init = functools.partial(model_lib.M2(cfg).init, jax.random.key(0))
  variables = jax.eval_shape(init, jax.ShapeDtypeStruct((1, 2), jnp.int32))
  tree = {name: dict(variables[name]) for name in ('params', 'router')}
  return {name: leaf.shape for name, leaf in leaves.table(tree).items()}


def tensors(cfg: ModelConfig) -> list[Tensor]:
  """All tensors of a model, layer after layer."""
  of = shapes(cfg)
  found = [
    _tensor(of, leaf, (), name) for leaf, name in _TOP.items() if leaf != 'params/head'
  ]
  for layer in range(cfg.num_layers):
    found += _block(of, 'params/layers', 'router/layers', layer, 'model.layers.')
  found.append(_tensor(of, 'params/head', (), _TOP['params/head']))
  for module in range(cfg.num_mtp_modules):
    found += [
      _tensor(of, f'params/mtp/{leaf}', (module,), f'{MTP_PREFIX}{module}.{name}')
      for leaf, name in _MTP.items()
    ]
    found += _block(of, 'params/mtp/layers', 'router/mtp', module, MTP_PREFIX)
  missed = sum(map(math.prod, of.values())) - sum(math.prod(t.shape) for t in found)
  assert not missed, f'{missed} numbers of the model have no name here'
  return found


def _block(of, params: str, bias: str, layer: int, prefix: str) -> Iterator[Tensor]:
  """Tensors of one decoder block: `layer` of the arrays below `params`."""
  prefix = f'{prefix}{layer}.'
  for leaf, name in _BLOCK.items():
    yield _tensor(of, f'{params}/{leaf}', (layer,), prefix + name)
  yield _tensor(of, bias, (layer,), f'{prefix}block_sparse_moe.{ROUTER_BIAS}')
  for expert in range(of[f'{params}/gate'][1]):
    for leaf, name in _EXPERT.items():
      name = f'{prefix}block_sparse_moe.experts.{expert}.{name}'
      yield _tensor(of, f'{params}/{leaf}', (layer, expert), name)


def _tensor(of, leaf: str, index: tuple[int, ...], name: str) -> Tensor:
  shape = of[leaf][len(index) :]
  transposed = len(shape) == 2 and leaf not in _UNTRANSPOSED
  return Tensor(name, shape[::-1] if transposed else shape, leaf, index, transposed)
