"""Responses of OpenAI's chat completions: the object, and its stream of chunks.

Reasoning is `reasoning_content`, in messages and in deltas; a client that sends it back
makes it part of the history (facts/m2-and-forge.md §2.1). A tool call that the parser
cannot read is not in `tool_calls`; its markup is in `content`, so that an agent can see
it. A call that the model quotes looks the same; the additional field `parse_status`,
next to `finish_reason`, distinguishes the two (`parsing.Status`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from m2jax.gateway.dialects import base
from m2jax.gateway.errors import ApiError
from m2jax.gateway.exchange import Answer, Pending
from m2jax.rollout.api import NewTokens
from m2jax.text import chat
from m2jax.text.tokenizer import Tokenizer

_DONE = 'data: [DONE]\n\n'


def body(answers: Sequence[Answer], tokenizer: Tokenizer) -> dict[str, Any]:
  """The body of a chat completion."""
  first = answers[0]
  return {
    'id': first.completion.id,
    'object': 'chat.completion',
    'created': int(first.completion.started_s),
    'model': first.request.model,
    'choices': [_choice(i, answer, tokenizer) for i, answer in enumerate(answers)],
    'usage': usage(answers),
  }


def _choice(index: int, answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
  recorded, logprobs = answer.completion, None
  if answer.request.logprobs:
    tokens = NewTokens(recorded.response_ids.tolist(), recorded.logprobs, *answer.top)
    logprobs = {'content': _entries(tokens, len(tokens), tokenizer)}
  return {
    'index': index,
    'message': answer.message,
    'finish_reason': finish_reason(answer),
    'parse_status': recorded.status,
    'logprobs': logprobs,
  }


def _entries(tokens: NewTokens, count: int, tokenizer: Tokenizer) -> list[dict]:
  """OpenAI's log-probabilities of the first `count` tokens."""

  def entry(token: int, logprob: float) -> dict[str, Any]:
    # JSON has no -inf; OpenAI's clients expect -9999 for it.
    logprob = logprob if math.isfinite(logprob) else -9999.0
    data = tokenizer.decode_bytes([token])  # perhaps a part of a character
    text = data.decode('utf-8', 'replace')
    return {'token': text, 'logprob': logprob, 'bytes': list(data)}

  entries = []
  for i in range(count):
    others = []
    if tokens.top_ids is not None:
      others = zip(
        tokens.top_ids[i].tolist(), tokens.top_logprobs[i].tolist(), strict=True
      )
    entries.append(
      entry(tokens[i], float(tokens.logprobs[i]))
      | {'top_logprobs': [entry(*other) for other in others]}
    )
  return entries


def finish_reason(answer: Answer) -> str:
  """OpenAI's finish reason: 'length', 'tool_calls' or 'stop'."""
  reason = answer.completion.finish_reason
  if reason == 'stop' and answer.message.get('tool_calls'):
    return 'tool_calls'
  return reason


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
  """Numbers of prompt and sampled tokens, and of cached ones if the engine says."""
  prompt = len(answers[0].completion.prompt_ids)
  response = sum(len(answer.completion.response_ids) for answer in answers)
  found: dict[str, Any] = {
    'prompt_tokens': prompt,
    'completion_tokens': response,
    'total_tokens': prompt + response,
  }
  if (cached := answers[0].cached_tokens) is not None:
    found['prompt_tokens_details'] = {'cached_tokens': cached}
  return found


class Stream(base.Stream):
  """Chunks of a streamed completion; the deltas add up to the recorded messages."""

  def __init__(self, pendings: Sequence[Pending], tokenizer: Tokenizer):
    super().__init__(pendings, tokenizer)
    self._request = pendings[0].request
    self._tokenizer = tokenizer
    self._calls = [0] * len(pendings)

  def begin(self) -> list[str]:
    """The chunks that name the role."""
    delta = {'role': 'assistant', 'content': ''}
    return [self._chunk(choice, delta) for choice in range(len(self._pendings))]

  def fail(self, error: ApiError) -> list[str]:
    return [base.event(error.body())]

  def _events(
    self, choice: int, deltas: Sequence[chat.Delta], tokens: NewTokens, count: int
  ) -> list[str]:
    logprobs = None
    if self._request.logprobs and count:
      logprobs = {'content': _entries(tokens, count, self._tokenizer)}
    events = []
    for delta in self._deltas(choice, deltas) or ([{}] if logprobs else []):
      events.append(self._chunk(choice, delta, logprobs=logprobs))
      logprobs = None
    return events

  def _deltas(self, choice: int, deltas: Sequence[chat.Delta]) -> list[dict]:
    out = []
    for delta in deltas:
      if delta.kind != 'tool_call':
        out.append({delta.kind: delta.text})
        continue
      call = {'index': self._calls[choice], **delta.call.to_openai()}
      call['id'] = f'{self._pendings[choice].call_prefix}_{self._calls[choice]}'
      self._calls[choice] += 1
      out.append({'tool_calls': [call]})
    return out

  def _last(self, answers: Sequence[Answer]) -> list[str]:
    """The finish reasons and, if requested, the usage."""
    events = [
      self._chunk(i, {}, finish_reason(answer), parse_status=answer.completion.status)
      for i, answer in enumerate(answers)
    ]
    if self._request.include_usage:
      events.append(self._event([], usage(answers)))
    return [*events, _DONE]

  def _chunk(
    self,
    choice: int,
    delta: dict,
    finish: str | None = None,
    logprobs: dict | None = None,
    **extra: str,
  ) -> str:
    chunk = {'index': choice, 'delta': delta, 'finish_reason': finish, **extra}
    if self._request.logprobs:
      chunk['logprobs'] = logprobs
    return self._event([chunk])

  def _event(self, choices: list[dict], used: dict | None = None) -> str:
    first = self._pendings[0]
    chunk = {
      'id': first.id,
      'object': 'chat.completion.chunk',
      'created': int(first.started_s),
      'model': self._request.model,
      'choices': choices,
    }
    if self._request.include_usage:
      chunk['usage'] = used
    return base.event(chunk)
