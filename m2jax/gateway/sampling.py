"""The sampling fields of a request: which are honoured, overridden and refused.

A training session samples the untruncated temperature-1 distribution, whatever was
asked (law 4), from the engine's own stream: a seed would make the samples of a group
repeat one another. An evaluation session is sampled as asked, as far as the engine can.
"""

from __future__ import annotations

from typing import Any

from m2jax.gateway.errors import invalid
from m2jax.gateway.fields import integer
from m2jax.rollout.api import SamplingParams

# Sampling fields the engine lacks, with the value that means "off".
_UNSUPPORTED = {
  'frequency_penalty': 0,
  'presence_penalty': 0,
  'repetition_penalty': 1,
  'min_p': 0,
  'logit_bias': {},
}


def read(data: dict) -> dict[str, Any]:
  """The sampling fields that are present, range-checked."""
  found: dict[str, Any] = {}
  bounds = {
    'temperature': (0, 2),
    'top_p': (0, 1),
    'frequency_penalty': (-2, 2),
    'presence_penalty': (-2, 2),
    'repetition_penalty': (0, 10),
    'min_p': (0, 1),
  }
  for field, (low, high) in bounds.items():
    value = data.get(field)
    if value is None:
      continue
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise invalid('must be a number', field)
    if not low <= value <= high or (field == 'top_p' and value == 0):
      raise invalid(f'must lie between {low} and {high}, not {value}', field)
    found[field] = value
  top_k = integer(data, 'top_k')
  if top_k is not None:
    if top_k < -1:
      raise invalid('must be at least 1, or 0 for off', 'top_k')
    found['top_k'] = max(top_k, 0)
  seed = integer(data, 'seed')
  if seed is not None:
    found['seed'] = seed
  logit_bias = data.get('logit_bias')
  if logit_bias is not None:
    if not isinstance(logit_bias, dict):
      raise invalid('must be an object of token id to bias', 'logit_bias')
    found['logit_bias'] = logit_bias
  return found


def params(
  asked: dict[str, Any],
  asked_tokens: int | None,
  *,
  training: bool,
  max_tokens: int,
  stop_ids: tuple[int, ...],
  defaults: tuple[float, float, int],
) -> tuple[SamplingParams, tuple[str, ...]]:
  """How the engine samples, and the fields that were overridden.

  A field that asks for what a training session does anyway is no override.

  Args:
    asked: as `read` gives it.
    asked_tokens: response limit of the request, or None.
    training: the session's mode.
    max_tokens: limit when the request has none.
    stop_ids: ids that end a message.
    defaults: temperature, top_p and top_k of evaluation where the request is silent.

  Raises:
    ApiError: 400, in evaluation, for a sampling field the engine cannot honour.
  """
  if asked_tokens is not None:
    max_tokens = asked_tokens
  if training:
    neutral = {'temperature': 1, 'top_p': 1, 'top_k': 0, **_UNSUPPORTED}
    overrides = tuple(name for name in asked if asked[name] != neutral.get(name))
    return SamplingParams(max_tokens, stop_ids=stop_ids), overrides
  for name, off in _UNSUPPORTED.items():
    if name in asked and asked[name] != off:
      raise invalid(
        f'the engine cannot apply it; leave it out or send {off}',
        name,
        'unsupported_parameter',
      )
  temperature, top_p, top_k = defaults
  return SamplingParams(
    max_tokens,
    temperature=asked.get('temperature', temperature),
    top_p=asked.get('top_p', top_p),
    top_k=asked.get('top_k', top_k),
    stop_ids=stop_ids,
    seed=asked.get('seed'),
  ), ()
