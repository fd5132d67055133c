"""config.json of MiniMaxM2ForCausalLM ↔ ModelConfig (facts/m2-and-forge.md §1.1, §1.3).

Two dialects are read. Released: `rotary_dim` and `rope_theta` at the top level.
transformers 5: `rope_parameters` with `rope_theta` and optionally
`partial_rotary_factor`; without rotary_dim or factor, RoPE applies to the whole head.
Written files have both. A field with a value that this model does not support raises an
error.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from m2jax.checkpoint import bounded
from m2jax.checkpoint.errors import CheckpointMismatch, MissingCheckpoint
from m2jax.config import ModelConfig

FILE = 'config.json'
BLOCK = (128, 128)  # default block of block-FP8

# ModelConfig field → config.json's.
_FIELDS = {
  'vocab_size': 'vocab_size',
  'num_layers': 'num_hidden_layers',
  'embed_dim': 'hidden_size',
  'num_heads': 'num_attention_heads',
  'num_kv_heads': 'num_key_value_heads',
  'head_dim': 'head_dim',
  'num_experts': 'num_local_experts',
  'experts_per_token': 'num_experts_per_tok',
  'expert_dim': 'intermediate_size',
  'rms_norm_eps': 'rms_norm_eps',
  'max_positions': 'max_position_embeddings',
}
# The only supported values; an absent field means this value.
_ONLY = {
  'model_type': 'minimax_m2',
  'hidden_act': 'silu',
  'tie_word_embeddings': False,
  'attention_bias': False,
  'use_qk_norm': True,
  'qk_norm_type': 'per_layer',
  'scoring_func': 'sigmoid',
  'use_routing_bias': True,
  'shared_intermediate_size': 0,
}
_FRACTIONS = ('rms_norm_eps', 'rope_theta', 'partial_rotary_factor')
_WHOLE = (*(set(_FIELDS.values()) - set(_FRACTIONS)), 'rotary_dim', 'num_mtp_modules')
_MAX_WHOLE = 2**31 - 1
_MAX_EXPERTS = 2**18  # of all layers; M2 has 15,872
_MAX_MODULES = 64
_MTP_ONLY = {'mtp_transformer_layers': 1}  # if there are MTP modules
# ModelConfig fields without a counterpart; transformers preserves the section.
_SECTION = 'm2jax'
# A model with other values would load without them, and compute something else.
_ABLATIONS = {'window': None, 'router_scores': 'sigmoid'}
_OWN = {'dtype': str, 'remat': str, 'unroll_layers': bool}
_RELEASED_IDS = {'bos_token_id': 200_034, 'eos_token_id': 200_020}


class Read(NamedTuple):
  """The contents of a config.json.

  Attributes:
    cfg: the model; its param_dtype is the declared dtype.
    block: rows and columns of an FP8 block.
  """

  cfg: ModelConfig
  block: tuple[int, int]


def read(directory: str | os.PathLike) -> Read:
  """Reads `directory`/config.json.

  Raises:
    MissingCheckpoint: there is none.
    CorruptCheckpoint: it is not a JSON object, or see `bounded.read`.
    CheckpointMismatch: it describes an unsupported model; names the field.
  """
  path = os.path.join(os.fspath(directory), FILE)
  try:
    values = bounded.read_object(path)
  except FileNotFoundError:
    if not os.path.isdir(directory):
      raise MissingCheckpoint(f'{directory} is not a directory') from None
    entries = sorted(os.listdir(directory))[:10]
    raise MissingCheckpoint(
      f'no {FILE} in {directory}: it contains {entries or "nothing"}'
    ) from None
  try:
    return decode(values)
  except ValueError as error:
    raise CheckpointMismatch(f'{path}: {error}') from error


def decode(values: Mapping[str, Any]) -> Read:
  """Decodes the fields of a config.json.

  Raises:
    ValueError: a field is missing, malformed, or has an unsupported value.
  """
  _check(values, _ONLY)
  kinds = values.get('attn_type_list') or []
  if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
    shown = reprlib.repr(kinds)
    raise ValueError(f'attn_type_list={shown}: only 1, full attention, is supported')
  missing = [name for name in _FIELDS.values() if values.get(name) is None]
  if missing:
    raise ValueError(f'missing fields: {", ".join(missing)}')
  _check_numbers(values, '')
  experts = values['num_hidden_layers'] * values['num_local_experts']
  if experts > _MAX_EXPERTS:
    raise ValueError(
      f'num_hidden_layers={values["num_hidden_layers"]} with num_local_experts='
      f'{values["num_local_experts"]}: at most {_MAX_EXPERTS} experts in all are read'
    )
  declared = values.get('dtype') or values.get('torch_dtype') or 'bfloat16'
  modules = values.get('num_mtp_modules') or 0
  if not values.get('use_mtp', True):
    modules = 0
  if modules:
    _check(values, _MTP_ONLY)
  if modules > _MAX_MODULES:
    raise ValueError(f'num_mtp_modules={modules}: at most {_MAX_MODULES} are read')
  rotary_dim, rope_theta = _rope(values)
  section = _object(values, _SECTION)
  for name, kind in _OWN.items():
    if not isinstance(section.get(name, kind()), kind):
      shown = reprlib.repr(section[name])
      raise ValueError(f'{_SECTION}.{name}={shown}: must be of type {kind.__name__}')
  cfg = ModelConfig(
    **{field: values[name] for field, name in _FIELDS.items()},
    rotary_dim=rotary_dim,
    rope_theta=rope_theta,
    num_mtp_modules=modules,
    param_dtype=declared,
    **{'dtype': declared, **{name: section[name] for name in _OWN if name in section}},
  )
  return Read(cfg, _fp8_block(_object(values, 'quantization_config')))


def encode(cfg: ModelConfig, stored: str, ids: Mapping[str, int]) -> dict[str, Any]:
  """The fields of a model's config.json.

  Args:
    cfg: the model.
    stored: dtype of the weights in the files.
    ids: bos_token_id and eos_token_id; if empty, the released ones that fit.

  Raises:
    ValueError: the model is a variant that the format cannot describe.
  """
  for field, only in _ABLATIONS.items():
    if getattr(cfg, field) != only:
      raise ValueError(
        f'ModelConfig.{field}={getattr(cfg, field)!r}: the released format can '
        f'only describe {only!r}'
      )
  factor = cfg.rotary_dim / cfg.head_dim
  if int(cfg.head_dim * factor) != cfg.rotary_dim:  # as transformers computes it
    factor = math.nextafter(factor, 1.0)
  fit = {k: v if v < cfg.vocab_size else None for k, v in _RELEASED_IDS.items()}
  return {
    'architectures': ['MiniMaxM2ForCausalLM'],
    **_ONLY,
    **{name: getattr(cfg, field) for field, name in _FIELDS.items()},
    'attn_type_list': [1] * cfg.num_layers,
    'rotary_dim': cfg.rotary_dim,
    'rope_theta': cfg.rope_theta,
    'rope_parameters': {
      'rope_type': 'default',
      'rope_theta': cfg.rope_theta,
      'partial_rotary_factor': factor,
    },
    'use_mtp': cfg.num_mtp_modules > 0,
    'num_mtp_modules': cfg.num_mtp_modules,
    **_MTP_ONLY,
    'torch_dtype': stored,
    **(ids or fit),
    _SECTION: {name: getattr(cfg, name) for name in _OWN},
  }


def _check(values: Mapping[str, Any], only: Mapping[str, Any]):
  for name, want in only.items():
    if values.get(name, want) != want and not (values[name] is None and not want):
      shown = reprlib.repr(values[name])
      raise ValueError(f'{name}={shown}: only {want!r} is supported')


def _check_numbers(values: Mapping[str, Any], where: str):
  """Raises ValueError unless the numbers of an object are of their kind and range."""
  for name in (*_WHOLE, *_FRACTIONS):
    if (value := values.get(name)) is None:
      continue
    if type(value) not in ((int,) if name in _WHOLE else (int, float)):
      kind = 'a whole number' if name in _WHOLE else 'a number'
    elif name in _WHOLE and abs(value) > _MAX_WHOLE:
      kind = f'at most {_MAX_WHOLE}'
    elif name in _FRACTIONS and value <= 0:
      kind = 'above 0'
    else:
      continue
    raise ValueError(f'{where}{name}={reprlib.repr(value)}: must be {kind}')


def _object(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
  """The object in a field, or an empty one. Raises ValueError for another value."""
  found = values.get(name) or {}
  if not isinstance(found, dict):
    raise ValueError(f'{name}={reprlib.repr(found)}: must be an object')
  return found


def _rope(values: Mapping[str, Any]) -> tuple[int, float]:
  """rotary_dim and rope_theta of either dialect."""
  rope = _object(values, 'rope_parameters') or _object(values, 'rope_scaling')
  _check_numbers(rope, 'rope_parameters.')
  kind = rope.get('rope_type', rope.get('type', 'default'))
  if kind != 'default':
    raise ValueError(f'rope_type={kind!r}: only default is supported')
  theta = rope.get('rope_theta', values.get('rope_theta', ModelConfig.rope_theta))
  factor = rope.get('partial_rotary_factor', values.get('partial_rotary_factor'))
  dim = values.get('rotary_dim')
  if dim is None:
    # transformers truncates; the 1e-6 is for factors such as 6/47
    dim = int(values['head_dim'] * (1.0 if factor is None else factor) + 1e-6)
  elif factor is not None and abs(values['head_dim'] * factor - dim) > 0.01:
    raise ValueError(
      f'rotary_dim={dim} and partial_rotary_factor={factor} of head_dim='
      f'{values["head_dim"]} contradict each other'
    )
  return dim, float(theta)


def _fp8_block(quantization: Mapping[str, Any]) -> tuple[int, int]:
  if not quantization:
    return BLOCK
  method, block = (quantization.get(k) for k in ('quant_method', 'weight_block_size'))
  if method != 'fp8':
    shown = reprlib.repr(method)
    raise ValueError(f'quantization_config.quant_method={shown}: only fp8 is supported')
  if block is None:
    return BLOCK
  pair = isinstance(block, list) and len(block) == 2
  if not pair or not all(type(b) is int and 0 < b <= _MAX_WHOLE for b in block):
    shown = reprlib.repr(block)
    raise ValueError(
      f'quantization_config.weight_block_size={shown}: must be two sizes'
    )
  return tuple(block)
