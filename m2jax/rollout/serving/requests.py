"""Checks every field of a request before it is queued; errors name the field."""

from __future__ import annotations

import math

import numpy as np

from m2jax.rollout.api import GenerateRequest, PromptTooLong
from m2jax.rollout.engine.config import EngineConfig

MIN_TEMPERATURE = 1e-6  # smaller ones, other than 0, overflow float32


def check(
  request: GenerateRequest, vocab_size: int, config: EngineConfig
) -> np.ndarray:
  """Checks a request; returns its prompt as int32 [n].

  Raises:
    PromptTooLong: the prompt leaves no room for a response of one token.
    ValueError: a field is out of range or of the wrong type.
  """

  def ids(values, field: str) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in 'iu'):
      raise ValueError(f'{field}: must be a sequence of token ids')
    if array.size and not (array.min() >= 0 and array.max() < vocab_size):
      raise ValueError(f'{field}: token ids must be in [0, {vocab_size})')
    return array.astype(np.int32)

  def need(ok: bool, field: str, want: str):
    if not ok:
      value = getattr(sampling, field)
      raise ValueError(f'sampling.{field}={value!r}: must be {want}')

  sampling = request.sampling
  if request.grammar is not None and not config.grammars:
    raise ValueError('grammar: needs an engine with EngineConfig.grammars=True')
  prompt = ids(request.prompt_ids, 'prompt_ids')
  if not prompt.size:
    raise ValueError('prompt_ids: must not be empty')
  context_tokens = config.context_tokens
  if prompt.size >= context_tokens:
    raise PromptTooLong(
      f'prompt_ids: {prompt.size} tokens leave no room for a response in a context of '
      f'{context_tokens} tokens; shorten the prompt'
    )
  need(_is_int(sampling.max_tokens, 1), 'max_tokens', 'an integer, at least 1')
  temperature = sampling.temperature
  need(
    temperature == 0 or MIN_TEMPERATURE <= temperature < math.inf,
    'temperature',
    f'0 (greedy) or at least {MIN_TEMPERATURE}',
  )
  need(0 < sampling.top_p <= 1, 'top_p', 'in (0, 1]')
  need(0 <= sampling.min_p <= 1, 'min_p', 'in [0, 1]')
  for field in ('presence_penalty', 'frequency_penalty'):
    need(math.isfinite(getattr(sampling, field)), field, 'a finite number')
  need(0 < sampling.repetition_penalty < math.inf, 'repetition_penalty', 'positive')
  most = config.max_logit_bias
  need(len(sampling.logit_bias) <= most, 'logit_bias', f'at most {most} tokens')
  ids([token for token, _ in sampling.logit_bias], 'sampling.logit_bias')
  finite = all(math.isfinite(bias) for _, bias in sampling.logit_bias)
  need(finite, 'logit_bias', 'finite numbers')
  most = config.max_top_logprobs
  need(_is_int(sampling.top_logprobs, 0), 'top_logprobs', 'an integer, at least 0')
  need(sampling.top_logprobs <= most, 'top_logprobs', f'at most {most}')
  need(_is_int(sampling.top_k, 0), 'top_k', 'an integer, at least 0')
  need(sampling.seed is None or _is_int(sampling.seed), 'seed', 'an integer or None')
  stop_ids = ids(sampling.stop_ids, 'sampling.stop_ids')
  most = config.max_stop_ids
  need(stop_ids.size <= most, 'stop_ids', f'at most {most} token ids')
  return prompt


def _is_int(value, least: int | None = None) -> bool:
  if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
    return False
  return least is None or value >= least
