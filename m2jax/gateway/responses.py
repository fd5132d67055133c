"""Responses to the client: OpenAI's response object and its stream of chunks.

Reasoning is `reasoning_content`, in messages and in deltas; a client that sends it back
makes it part of the history (facts/m2-and-forge.md §2.1). A tool call that the parser
cannot read is not in `tool_calls`; its markup is in `content`, so that an agent can see
it. A call that the model quotes looks the same; the additional field `parse_status`,
next to `finish_reason`, distinguishes the two (`parsing.Status`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from m2jax.gateway import protocol
from m2jax.gateway.exchange import Answer, Pending
from m2jax.text import chat
from m2jax.text import tokenizer as tokenizer_lib


def message(parsed: chat.Message, call_prefix: str) -> dict:
  """A parsed response as an OpenAI message.

  Args:
    call_prefix: the ids of the calls are '{call_prefix}_{index}'.
  """
  message = parsed.to_openai()
  message['content'] = (parsed.content + broken_text(parsed)) or message['content']
  for i, call in enumerate(message.get('tool_calls') or ()):
    call['id'] = f'{call_prefix}_{i}'
  return message


def broken_text(parsed: chat.Message) -> str:
  """The generated tool-call markup, if no call in it could be read."""
  if parsed.tool_calls or not parsed.broken_calls:
    return ''
  return ('\n' if parsed.content else '') + parsed.call_text


def completion(answer: Answer) -> dict[str, Any]:
  """The body of a chat completion."""
  recorded = answer.completion
  choice = {
    'index': 0,
    'message': answer.message,
    'finish_reason': finish_reason(answer),
    'parse_status': recorded.status,
    'logprobs': None,
  }
  if answer.request.logprobs:
    likeliest = answer.likeliest or ((),) * len(answer.tokens)
    drawn = zip(answer.tokens, recorded.logprobs.tolist(), likeliest, strict=True)
    choice['logprobs'] = {
      'content': [
        _entry(token, logprob) | {'top_logprobs': [_entry(*other) for other in others]}
        for token, logprob, others in drawn
      ]
    }
  return {
    'id': recorded.id,
    'object': 'chat.completion',
    'created': int(recorded.started_s),
    'model': answer.request.model,
    'choices': [choice],
    'usage': usage(answer),
  }


def _entry(token: str, logprob: float) -> dict[str, Any]:
  # JSON has no -inf; OpenAI's clients expect -9999 for it.
  logprob = logprob if math.isfinite(logprob) else -9999.0
  return {'token': token, 'logprob': logprob, 'bytes': list(token.encode())}


def finish_reason(answer: Answer) -> str:
  """OpenAI's finish reason: 'length', 'tool_calls' or 'stop'."""
  reason = answer.completion.finish_reason
  if reason == 'stop' and answer.message.get('tool_calls'):
    return 'tool_calls'
  return reason


def usage(answer: Answer) -> dict[str, int]:
  """Numbers of prompt and sampled tokens."""
  prompt = len(answer.completion.prompt_ids)
  response = len(answer.completion.response_ids)
  return {
    'prompt_tokens': prompt,
    'completion_tokens': response,
    'total_tokens': prompt + response,
  }


class Stream:
  """Chunks of a streamed completion; each method returns JSON texts to send.

  The deltas add up to the recorded message, because both come from the same parser.
  """

  def __init__(self, pending: Pending, tokenizer: tokenizer_lib.Tokenizer):
    self._pending = pending
    self._detokenizer = tokenizer_lib.Detokenizer(tokenizer)
    self._parser = chat.StreamParser(pending.request.tools)
    self._calls = 0
    self._tokens = 0

  def begin(self) -> list[str]:
    """The chunk that names the role."""
    return [self._chunk({'role': 'assistant', 'content': ''})]

  def feed(self, tokens: Sequence[int]) -> list[str]:
    """Chunks for new tokens; none as long as they may be markup."""
    self._tokens += len(tokens)
    return self._deltas(self._parser.feed(self._detokenizer.push(tokens)))

  def end(self, answer: Answer) -> list[str]:
    """The remaining text, the finish reason and, if requested, the usage."""
    events = self.feed(answer.completion.response_ids[self._tokens :].tolist())
    deltas = self._parser.feed(self._detokenizer.flush()) + self._parser.finish()
    events += self._deltas(deltas)
    if broken := broken_text(self._parser.message):
      events.append(self._chunk({'content': broken}))
    status = {'parse_status': answer.completion.status}
    events.append(self._chunk({}, finish_reason(answer), **status))
    if self._pending.request.include_usage:
      events.append(self._event([], usage(answer)))
    return events

  def _deltas(self, deltas: Iterable[chat.Delta]) -> list[str]:
    events = []
    for delta in deltas:
      if delta.kind != 'tool_call':
        events.append(self._chunk({delta.kind: delta.text}))
        continue
      call = {'index': self._calls, **delta.call.to_openai()}
      call['id'] = f'{self._pending.call_prefix}_{self._calls}'
      self._calls += 1
      events.append(self._chunk({'tool_calls': [call]}))
    return events

  def _chunk(self, delta: dict, finish: str | None = None, **fields: str) -> str:
    choice = {'index': 0, 'delta': delta, 'finish_reason': finish, **fields}
    return self._event([choice])

  def _event(self, choices: list[dict], used: dict | None = None) -> str:
    chunk = {
      'id': self._pending.id,
      'object': 'chat.completion.chunk',
      'created': int(self._pending.started_s),
      'model': self._pending.request.model,
      'choices': choices,
    }
    if self._pending.request.include_usage:
      chunk['usage'] = used
    return protocol.dumps(chunk)
