"""The files next to the weights: model, generation and chat settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

from m2jax.checkpoint.huggingface import config as config_lib
from m2jax.checkpoint.huggingface import fp8
from m2jax.config import ModelConfig
from m2jax.text import chat_template, markup
from m2jax.text.tokenizer import Tokenizer

TOKENIZER = 'tokenizer.json'
# How M2 is sampled (facts/m2-and-forge.md §1.2).
_SAMPLING = {'do_sample': True, 'temperature': 1.0, 'top_p': 0.95, 'top_k': 40}


def files(
  cfg: ModelConfig, stored: str, tokenizer: bytes | None, in_blocks: bool = False
) -> dict[str, bytes]:
  """Content of each file by name.

  Without generation_config.json, transformers takes the model's settings for generation
  settings and raises an error.

  Args:
    cfg: the model.
    stored: dtype of the weights.
    tokenizer: content of the tokenizer.json; None omits the tokenizer's files.
    in_blocks: the linear layers are in block FP8.
  """
  ids, texts = {}, {}
  if tokenizer is not None:
    tok = Tokenizer(tokenizers.Tokenizer.from_buffer(tokenizer))
    ids = {'bos_token_id': tok.bos_id, 'eos_token_id': tok.eos_id}
    about = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'bos_token': markup.BOS,
      'eos_token': markup.EOS,
      'model_max_length': cfg.max_positions,
    }
    texts = {
      TOKENIZER: tokenizer,
      'tokenizer_config.json': as_json(about),
      'chat_template.jinja': chat_template.source().encode(),
    }
  values = config_lib.encode(cfg, stored, ids)
  if in_blocks:
    values['quantization_config'] = fp8.QUANTIZATION
  generation = {name: values[name] for name in ('bos_token_id', 'eos_token_id')}
  return {
    config_lib.FILE: as_json(values),
    'generation_config.json': as_json(generation | _SAMPLING),
    **texts,
  }


def as_json(values: Mapping[str, Any]) -> bytes:
  """JSON of the values, as the content of a file."""
  return (json.dumps(values, indent=2) + '\n').encode()
