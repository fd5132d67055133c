"""The sampling fields of a request: which are honoured, overridden or rejected.

A training session always samples the untruncated temperature-1 distribution (law 4),
from the engine's random stream: a seed would make the samples of a group identical. An
evaluation session samples as requested.
"""

from __future__ import annotations

from typing import Any

from m2jax.gateway import fields
from m2jax.gateway.errors import invalid
from m2jax.rollout.api import SamplingParams

# Fields that SamplingParams has under the same name, with the value that is off.
_OFF = {
  'frequency_penalty': 0,
  'presence_penalty': 0,
  'repetition_penalty': 1,
  'min_p': 0,
}


def read(body: dict[str, Any]) -> dict[str, Any]:
  """The sampling fields that are present in the checked fields of a body."""
  found = {name: body[name] for name in FIELDS if body.get(name) is not None}
  return found | {'top_k': max(found['top_k'], 0)} if 'top_k' in found else found


def _logit_bias(value: Any, where: str) -> tuple[tuple[int, float], ...]:
  """OpenAI's object from token id to bias, as SamplingParams has it."""
  if not isinstance(value, dict):
    raise invalid('must be an object from token id to bias', where)
  for token, bias in value.items():
    # isdecimal: int() also takes signs, spaces and underscores.
    if not (token.isascii() and token.isdecimal() and len(token) < 10):
      raise invalid(f'{token[:20]!r} is not a token id', where)
    number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not number or not -100 <= bias <= 100:
      raise invalid('biases must be numbers between -100 and 100', where)
  merged = {int(token): float(bias) for token, bias in value.items()}
  return tuple(merged.items())


FIELDS = fields.Body(
  temperature=fields.number(0, 2),
  top_p=fields.number(0, 1, least=0.01),
  top_k=fields.integer(-1),  # -1 and 0: off
  min_p=fields.number(0, 1),
  seed=fields.integer(-(2**63)),
  frequency_penalty=fields.number(-2, 2),
  presence_penalty=fields.number(-2, 2),
  repetition_penalty=fields.number(0, 10, least=0.01),
  logit_bias=fields.Field(read=_logit_bias),
)


def params(
  asked: dict[str, Any],
  asked_tokens: int | None,
  *,
  training: bool,
  max_tokens: int,
  stop_ids: tuple[int, ...],
  defaults: tuple[float, float, int],
  top_logprobs: int = 0,
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
    top_logprobs: number of most likely tokens to report; of the policy in training.
  """
  if asked_tokens is not None:
    max_tokens = asked_tokens
  if training:
    neutral = {'temperature': 1, 'top_p': 1, 'top_k': 0, 'logit_bias': (), **_OFF}
    overrides = tuple(name for name in asked if asked[name] != neutral.get(name))
    sampled = SamplingParams(max_tokens, stop_ids=stop_ids, top_logprobs=top_logprobs)
    return sampled, overrides
  temperature, top_p, top_k = defaults
  return SamplingParams(
    max_tokens,
    temperature=asked.get('temperature', temperature),
    top_p=asked.get('top_p', top_p),
    top_k=asked.get('top_k', top_k),
    **{name: asked.get(name, off) for name, off in _OFF.items()},
    logit_bias=asked.get('logit_bias', ()),
    top_logprobs=top_logprobs,
    stop_ids=stop_ids,
    seed=asked.get('seed'),
  ), ()
