"""The sampling fields of a request: which are honoured, overridden or rejected.

A training session always samples the untruncated temperature-1 distribution (law 4),
from the engine's random stream: a seed would make the samples of a group identical. An
evaluation session samples as requested, as far as the engine supports it.
"""

from __future__ import annotations

from typing import Any

from m2jax.gateway.errors import invalid
from m2jax.gateway.fields import integer
from m2jax.rollout.api import SamplingParams

# Sampling fields that the engine lacks, with the value that means "off".
_UNSUPPORTED = {
  'frequency_penalty': 0,
  'presence_penalty': 0,
  'repetition_penalty': 1,
  'min_p': 0,
  'logit_bias': {},
}


def read(data: dict) -> dict[str, Any]:
  """The sampling fields that are present; checks their ranges."""
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
      raise invalid(f'must be between {low} and {high}, not {value}', field)
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
      raise invalid('must be an object from token id to bias', 'logit_bias')
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
  """The engine's sampling parameters, and the overridden fields.

  A field with the value that a training session uses anyway does not count.

  Args:
    asked: sampling fields, from `read`.
    asked_tokens: response limit of the request, or None.
    training: whether the session is of that mode.
    max_tokens: limit of requests without one.
    stop_ids: ids that end a message.
    defaults: temperature, top_p and top_k for evaluation requests without them.

  Raises:
    ApiError: 400, in evaluation, for a sampling field that the engine lacks.
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
        f'the engine does not support it; omit it or send {off}',
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
