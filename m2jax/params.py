"""The parameters of M2, in tables.

Each is a line of `TOP`, `BLOCK`, `MTP` or `CRITIC`: axes, logical axes (which
`sharding.rules` maps to a mesh), initialisation, kind, and the name in the released
format (facts/m2-and-forge.md §1.3, §1.4 and §3). Shapes, initial values,
PartitionSpecs, optimizer groups, FP8 and the converter read these tables; a new
parameter is a line here and its use in a layer.

The variables of a model are

  params: TOP's arrays · layers {BLOCK's, leading L}
          · mtp {MTP's, leading mtp; layers {BLOCK's, leading mtp}; absent without MTP}
          · CRITIC's, with a value head
  router: layers [L, E] · mtp [mtp, E]: selection biases, state rather than parameters.

Axes: V vocabulary, D model, DD two of D, Q = N·H query, KV = K·H key/value, E experts,
F expert hidden; stacked over L layers and mtp modules.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from m2jax.config import ModelConfig


class Kind(enum.StrEnum):
  """What optimizers and weight decay are chosen by, instead of names."""

  EMBEDDING = 'embedding'  # [V, D]: rows are looked up
  HEAD = 'head'  # [D, V], and [D, 1] of values
  NORM = 'norm'  # [D]: scales
  MATRIX = 'matrix'  # [in, out]
  ROUTER = 'router'  # [D, E]
  EXPERT = 'expert'  # [E, in, out]


class Param(NamedTuple):
  """One line of the tables.

  Attributes:
    axes: name of each axis, a key of `sizes`; a matrix is [in, out].
    split: logical axis of each, a field of `sharding.Rules`; None is never split.
    kind: the kind that optimizers see.
    init: 'ones', or a key of `INITS`.
    released: name in the released format, below the prefix of its layer, expert or
      module. Matrices are [out, in] there, except that of the embedding.
  """

  axes: tuple[str, ...]
  split: tuple[str | None, ...]
  kind: Kind
  init: str
  released: str

  def shape(self, cfg: ModelConfig) -> tuple[int, ...]:
    """Without the axes that stack layers or modules."""
    of = sizes(cfg)
    return tuple(of[axis] for axis in self.axes)


def _norm(axis: str, released: str, split: str | None = None) -> Param:
  return Param((axis,), (split,), Kind.NORM, 'ones', released)


def _matrix(axes: str, split: str, released: str, init: str = 'fan_in') -> Param:
  return Param(tuple(axes.split()), _split(split), Kind.MATRIX, init, released)


def _expert(axes: str, split: str, released: str, init: str = 'fan_in') -> Param:
  return Param(tuple(axes.split()), _split(split), Kind.EXPERT, init, released)


def _split(axes: str) -> tuple[str | None, ...]:
  return tuple(None if name == '-' else name for name in axes.split())


_IN, _OUT = 'experts expert_model expert_hidden', 'experts expert_hidden expert_model'
_ATTENTION, _MOE = 'self_attn.', 'block_sparse_moe.'

TOP: dict[str, Param] = {
  'embed': Param(
    ('V', 'D'),
    ('vocab', 'model'),
    Kind.EMBEDDING,
    'normal',
    'model.embed_tokens.weight',
  ),
  'final_norm': _norm('D', 'model.norm.weight'),
  'head': Param(('D', 'V'), ('model', 'vocab'), Kind.HEAD, 'normal', 'lm_head.weight'),
}
BLOCK: dict[str, Param] = {
  'attn_norm': _norm('D', 'input_layernorm.weight'),
  'q': _matrix('D Q', 'model heads', f'{_ATTENTION}q_proj.weight'),
  'k': _matrix('D KV', 'model heads', f'{_ATTENTION}k_proj.weight'),
  'v': _matrix('D KV', 'model heads', f'{_ATTENTION}v_proj.weight'),
  'o': _matrix('Q D', 'heads model', f'{_ATTENTION}o_proj.weight', 'residual'),
  'q_norm': _norm('Q', f'{_ATTENTION}q_norm.weight', 'heads'),
  'k_norm': _norm('KV', f'{_ATTENTION}k_norm.weight', 'heads'),
  'moe_norm': _norm('D', 'post_attention_layernorm.weight'),
  'router': Param(
    ('D', 'E'), ('model', None), Kind.ROUTER, 'fan_in', f'{_MOE}gate.weight'
  ),
  'gate': _expert('E D F', _IN, 'w1.weight'),
  'down': _expert('E F D', _OUT, 'w2.weight', 'residual'),
  'up': _expert('E D F', _IN, 'w3.weight'),
}
MTP: dict[str, Param] = {
  'hidden_norm': _norm('D', 'h_norm.weight'),
  'embed_norm': _norm('D', 'e_norm.weight'),
  'proj': _matrix('DD D', 'model -', 'linear_projection.weight'),
}
# Not in releases.
CRITIC: dict[str, Param] = {
  'value': Param(('D', 'values'), ('model', None), Kind.HEAD, 'zeros', ''),
}
BY_NAME: Mapping[str, Param] = collections.ChainMap(TOP, BLOCK, MTP, CRITIC)

ROUTER_BIAS = f'{_MOE}e_score_correction_bias'  # released name of the selection biases


def sizes(cfg: ModelConfig) -> dict[str, int]:
  """Size of each axis that the tables name."""
  return {
    'V': cfg.vocab_size,
    'D': cfg.embed_dim,
    'DD': 2 * cfg.embed_dim,
    'Q': cfg.num_heads * cfg.head_dim,
    'KV': cfg.num_kv_heads * cfg.head_dim,
    'E': cfg.num_experts,
    'F': cfg.expert_dim,
    'values': 1,
  }


def heads(cfg: ModelConfig) -> dict[str, int]:
  """Parameter → heads whose matrices are side by side along its last axis."""
  number = {'Q': cfg.num_heads, 'KV': cfg.num_kv_heads}
  return {
    name: number[param.axes[-1]]
    for name, param in BY_NAME.items()
    if param.kind == Kind.MATRIX and param.axes[-1] in number
  }


def tree(cfg: ModelConfig, leaf: Callable[[str, Param, tuple[int, ...]], Any]) -> Any:
  """A tree with the structure of the model's parameters.

  Args:
    cfg: the model.
    leaf: (name, param, sizes of the stacked axes, which come first) → leaf.
  """

  def several(table: Mapping[str, Param], *stacked: int):
    return {name: leaf(name, param, stacked) for name, param in table.items()}

  top, modules = several(TOP), cfg.num_mtp_modules
  params = {'embed': top.pop('embed'), 'layers': several(BLOCK, cfg.num_layers), **top}
  if modules:
    params['mtp'] = {**several(MTP, modules), 'layers': several(BLOCK, modules)}
  if cfg.value_head:
    params |= several(CRITIC)
  return params


def router_tree(cfg: ModelConfig, leaf: Callable[[tuple[int, ...]], Any]) -> Any:
  """A tree with the structure of the selection biases, of `leaf(shape)`."""
  biases = {'layers': leaf((cfg.num_layers, cfg.num_experts))}
  if cfg.num_mtp_modules:
    biases['mtp'] = leaf((cfg.num_mtp_modules, cfg.num_experts))
  return biases


def shapes(cfg: ModelConfig) -> dict[str, Any]:
  """`jax.ShapeDtypeStruct`s of the model's variables {'params': …, 'router': …}."""

  def leaf(_, param: Param, stacked):
    shape = (*stacked, *param.shape(cfg))
    return jax.ShapeDtypeStruct(shape, dtype_of(param.kind, cfg))

  def bias(shape):
    # Steps of 1e-3 would be lost in bfloat16 as a bias grows.
    return jax.ShapeDtypeStruct(shape, dtype_of(Kind.ROUTER, cfg))

  return {'params': tree(cfg, leaf), 'router': router_tree(cfg, bias)}


def dtype_of(kind: Kind, cfg: ModelConfig) -> jnp.dtype:
  """The dtype of parameters: `param_dtype`, but at least fp32 for routers (law 8).

  Releases have fp32 routers beside bf16 weights; rounding them changes the experts.
  """
  least = jnp.float32 if kind is Kind.ROUTER else cfg.param_dtype
  return jnp.promote_types(cfg.param_dtype, least)


# Standard deviation of normal values, by the whole shape. Outputs to the residual
# stream, two in each layer, are scaled down by the number of layers.
INITS: dict[str, Callable[[tuple[int, ...], ModelConfig], float]] = {
  'normal': lambda shape, cfg: 0.02,
  'zeros': lambda shape, cfg: 0.0,
  'fan_in': lambda shape, cfg: shape[-2] ** -0.5,
  'residual': lambda shape, cfg: shape[-2] ** -0.5 * (2 * cfg.num_layers) ** -0.5,
}


def initializers(cfg: ModelConfig) -> Any:
  """For each parameter a function key → array, with the parameters' structure."""

  def leaf(_, param: Param, stacked):
    shape, dtype = (*stacked, *param.shape(cfg)), dtype_of(param.kind, cfg)
    if param.init == 'ones':
      return lambda _: jnp.ones(shape, dtype)
    std = INITS[param.init](shape, cfg)
    return lambda key: std * jax.random.normal(key, shape, dtype)

  return tree(cfg, leaf)


def initialize(key: jax.Array, initializers: Any) -> Any:
  """Arrays of a tree of initializers; a tree of one leaf takes the key itself."""
  if callable(initializers):
    return initializers(key)
  leaves, structure = jax.tree.flatten(initializers)
  keys = jax.random.split(key, len(leaves))
  arrays = [f(k) for f, k in zip(leaves, keys, strict=True)]
  return jax.tree.unflatten(structure, arrays)


def kind_of(path: str, ndim: int) -> Kind:
  """Kind of the leaf at `path` ('layers/q') with `ndim` axes.

  Raises:
    ValueError: no table has the name, or the leaf has fewer axes than the parameter.
  """
  param = BY_NAME.get(path.rsplit('/', 1)[-1])
  if param is None:
    raise ValueError(f'unknown parameter {path}: add its name to m2jax.params')
  if ndim < len(param.axes):
    raise ValueError(
      f'parameter {path} has {ndim} axes; as {param.kind} it needs at least '
      f'{len(param.axes)}'
    )
  return param.kind


def kinds(params: Any) -> Any:
  """The tree of `params` with a Kind for each leaf; raises as `kind_of`."""

  def one(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    return kind_of(name, leaf.ndim)

  return jax.tree_util.tree_map_with_path(one, params)
