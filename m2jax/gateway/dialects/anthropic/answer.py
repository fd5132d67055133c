"""Responses of Anthropic's messages: the object, its stream of events, its errors.

Source: Anthropic's API reference. Reasoning is a thinking block, with a signature: a
digest of the text, which comes back with the block and is not checked, since the text
itself decides whether the history is the recorded one (`sessions`).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from typing import Any

from m2jax.gateway import history
from m2jax.gateway.dialects import base
from m2jax.gateway.dialects.anthropic.request import NO_THREADS
from m2jax.gateway.errors import ApiError, ContextTooLong
from m2jax.gateway.exchange import Answer, Pending
from m2jax.records import COMPLETION_PREFIX
from m2jax.rollout.api import NewTokens
from m2jax.text import chat
from m2jax.text.tokenizer import Tokenizer

_ERRORS = {
  400: 'invalid_request_error',
  401: 'authentication_error',
  403: 'permission_error',
  404: 'not_found_error',
  413: 'request_too_large',
  429: 'rate_limit_error',
  503: 'overloaded_error',
}
_INDEX = re.compile(r'\[(\d+)\]')


def error(error: ApiError) -> dict[str, Any]:
  """The error object. Claude Code finds a long prompt by its wording and numbers."""
  message = error.message
  if isinstance(error, ContextTooLong):
    message = f'prompt is too long: {error.what}'
    if error.prompt_tokens is not None:
      message = (
        f'prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens} '
        'maximum'
      )
  elif error.param:  # the service writes messages.0.content
    path = _INDEX.sub(r'.\1', error.param)
    message = path + message.removeprefix(error.param)
  fault: dict[str, Any] = {
    'type': _ERRORS.get(error.status, 'api_error'),
    'message': message,
  }
  if error.code == NO_THREADS:
    fault['details'] = {'error_code': error.code, 'unsupported': [error.param]}
  return {'type': 'error', 'error': fault}


def body(answers: Sequence[Answer], tokenizer: Tokenizer) -> dict[str, Any]:
  """The message object."""
  [answer] = answers
  recorded = answer.completion
  ids = (call['id'] for call in answer.message.get('tool_calls') or ())
  blocks: list[dict[str, Any]] = []
  for delta in answer.deltas:
    if delta.kind == 'reasoning_content':
      blocks.append(_thinking(delta.text))
    elif delta.kind == 'content':
      blocks.append({'type': 'text', 'text': delta.text})
    else:
      blocks.append(_tool_use(next(ids), delta.call.name, delta.call.arguments))
  return _message(recorded.id, answer.request.model, blocks) | {
    'stop_reason': _stop_reason(answer),
    'stop_sequence': answer.stop,
    'usage': _usage(answer),
  }


def _message(completion_id: str, model: str, blocks: list[dict]) -> dict[str, Any]:
  return {
    'id': 'msg_' + completion_id.removeprefix(COMPLETION_PREFIX),
    'type': 'message',
    'role': 'assistant',
    'model': model,
    'content': blocks,
    'stop_reason': None,
    'stop_sequence': None,
  }


def _thinking(text: str) -> dict[str, Any]:
  return {'type': 'thinking', 'thinking': text, 'signature': _signature(text)}


def _signature(text: str) -> str:
  return base64.b64encode(history.digest(text.encode())).decode()


def _tool_use(call_id: str, name: str, values: dict) -> dict[str, Any]:
  return {'type': 'tool_use', 'id': call_id, 'name': name, 'input': values}


def _usage(answer: Answer) -> dict[str, int]:
  recorded, cached = answer.completion, answer.cached_tokens
  usage = {
    'input_tokens': len(recorded.prompt_ids) - (cached or 0),
    'output_tokens': len(recorded.response_ids),
  }
  if cached is not None:  # nothing is written because a client asks for it
    usage |= {'cache_creation_input_tokens': 0, 'cache_read_input_tokens': cached}
  return usage


def _stop_reason(answer: Answer) -> str:
  recorded, limit = answer.completion, answer.request.max_tokens
  if recorded.finish_reason == 'length':
    full = limit is None or len(recorded.response_ids) < limit
    return 'model_context_window_exceeded' if full else 'max_tokens'
  if answer.stop is not None:
    return 'stop_sequence'
  return 'tool_use' if answer.message.get('tool_calls') else 'end_turn'


class Stream(base.Stream):
  """Events of a streamed message: one block is open at a time."""

  def __init__(self, pendings: Sequence[Pending], tokenizer: Tokenizer):
    super().__init__(pendings, tokenizer)
    [self._pending] = pendings
    self._open: str | None = None  # type of the open block
    self._thought: list[str] = []  # text of the open thinking block
    self._blocks = 0  # that have ended
    self._calls = 0

  def begin(self) -> list[str]:
    pending = self._pending
    message = _message(pending.id, pending.request.model, [])
    # The engine says at the end what was cached.
    message['usage'] = {'input_tokens': len(pending.prompt_ids), 'output_tokens': 0}
    return [_event('message_start', message=message), self.ping()]

  def ping(self) -> str:
    return _event('ping')

  def fail(self, error_: ApiError) -> list[str]:
    return [base.event(error(error_), 'error')]

  def _events(
    self, choice: int, deltas: Sequence[chat.Delta], tokens: NewTokens, count: int
  ) -> list[str]:
    events = []
    for delta in deltas:
      if delta.kind == 'reasoning_content':
        events += self._ensure('thinking', {'thinking': '', 'signature': ''})
        self._thought.append(delta.text)
        events.append(self._delta('thinking_delta', thinking=delta.text))
      elif delta.kind == 'content':
        events += self._ensure('text', {'text': ''})
        events.append(self._delta('text_delta', text=delta.text))
      else:
        events += self._call(delta.call)
    return events

  def _call(self, call: chat.ToolCall) -> list[str]:
    block = _tool_use(f'{self._pending.call_prefix}_{self._calls}', call.name, {})
    self._calls += 1
    text = json.dumps(call.arguments, ensure_ascii=False)
    return [
      *self._close(),
      *self._ensure('tool_use', block),
      self._delta('input_json_delta', partial_json=text),
      *self._close(),
    ]

  def _ensure(self, kind: str, block: dict) -> list[str]:
    """Opens a block of this type, unless one is open."""
    if self._open == kind:
      return []
    events = self._close()
    self._open = kind
    block = {'type': kind, **block}
    return events + [
      _event('content_block_start', index=self._blocks, content_block=block)
    ]

  def _close(self) -> list[str]:
    if self._open is None:
      return []
    events = []
    if self._open == 'thinking':
      signature = _signature(''.join(self._thought))
      events.append(self._delta('signature_delta', signature=signature))
      self._thought.clear()
    events.append(_event('content_block_stop', index=self._blocks))
    self._open = None
    self._blocks += 1
    return events

  def _delta(self, kind: str, **value: str) -> str:
    delta = {'type': kind, **value}
    return _event('content_block_delta', index=self._blocks, delta=delta)

  def _last(self, answers: Sequence[Answer]) -> list[str]:
    [answer] = answers
    stopped = {'stop_reason': _stop_reason(answer), 'stop_sequence': answer.stop}
    return [
      *self._close(),
      _event('message_delta', delta=stopped, usage=_usage(answer)),
      _event('message_stop'),
    ]


def _event(kind: str, **value: Any) -> str:
  return base.event({'type': kind, **value}, kind)
