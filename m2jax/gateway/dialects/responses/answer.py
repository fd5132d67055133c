"""Responses of OpenAI's responses: the object, its stream of events, its errors.

Source: OpenAI's API reference. The object of a plain response and the events of a
streamed one come from the same `Output`, so that items and their ids are equal.
Reasoning is an item with the text itself (`reasoning_text`), since it has no summary;
if the client asks for it, also as `encrypted_content`, which Codex sends back instead.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from m2jax.gateway.dialects import base
from m2jax.gateway.dialects.responses.request import encrypt
from m2jax.gateway.errors import ApiError, ContextTooLong
from m2jax.gateway.exchange import Answer, Pending
from m2jax.gateway.protocol import ChatRequest
from m2jax.records import CALL_PREFIX, COMPLETION_PREFIX
from m2jax.rollout.api import NewTokens
from m2jax.text import chat, markup
from m2jax.text.tokenizer import Tokenizer

_Events = list[dict[str, Any]]
# The name of the argument or input of a call, and of its events.
_CALLS = {
  'function_call': ('arguments', 'response.function_call_arguments'),
  'custom_tool_call': ('input', 'response.custom_tool_call_input'),
}


def error(error: ApiError) -> dict[str, Any]:
  """The error object, with the code that this API has for a full service."""
  body = error.body()
  if error.status == 429:
    body['error']['code'] = 'rate_limit_exceeded'
  return body


def _failure(error: ApiError) -> dict[str, Any]:
  """The error of a failed response: the codes are those that Codex acts on."""
  code = 'server_error'
  if error.status == 429:
    code = 'rate_limit_exceeded'
  elif error.status < 500:
    code = error.code or 'invalid_prompt'
  return {'code': code, 'message': error.message}


def refuse(error: ApiError, request: ChatRequest) -> list[str] | None:
  """A prompt that is too long fails the stream: Codex reads the code only there."""
  if not isinstance(error, ContextTooLong):
    return None
  hex_id, created_s = uuid.uuid4().hex, int(time.time())
  events = _Sequence()
  response = _response(hex_id, created_s, request, [])
  failed = response | {'status': 'failed', 'error': _failure(error)}
  return events(
    [
      {'type': 'response.created', 'response': response},
      {'type': 'response.failed', 'response': failed},
    ]
  )


def body(answers: Sequence[Answer], tokenizer: Tokenizer) -> dict[str, Any]:
  """The response object."""
  [answer] = answers
  hex_id = _hex(answer.completion.id)
  output = Output(hex_id, answer.request)
  output.add(answer.deltas)
  output.close('incomplete' if _cut(answer) else 'completed')
  return _finished(answer, output, tokenizer)


def _hex(completion_id: str) -> str:
  return completion_id.removeprefix(COMPLETION_PREFIX)


def _cut(answer: Answer) -> bool:
  return answer.completion.finish_reason == 'length'


def _response(
  hex_id: str, created_s: int, request: ChatRequest, output: list[dict]
) -> dict[str, Any]:
  """A response in progress."""
  return {
    'id': 'resp_' + hex_id,
    'object': 'response',
    'created_at': created_s,
    'status': 'in_progress',
    'background': False,
    'error': None,
    'incomplete_details': None,
    'model': request.model,
    'output': output,
    'previous_response_id': None,
    'store': False,
    'usage': None,
    **request.echo['fields'],
  }


def _finished(answer: Answer, output: Output, tokenizer: Tokenizer) -> dict[str, Any]:
  """A completed or incomplete response."""
  recorded, cached = answer.completion, answer.cached_tokens
  cut = _cut(answer)
  prompt, response = len(recorded.prompt_ids), len(recorded.response_ids)
  in_progress = _response(
    _hex(recorded.id), int(recorded.started_s), answer.request, output.items
  )
  return in_progress | {
    'status': 'incomplete' if cut else 'completed',
    'incomplete_details': {'reason': 'max_output_tokens'} if cut else None,
    'usage': {
      'input_tokens': prompt,
      'input_tokens_details': {} if cached is None else {'cached_tokens': cached},
      'output_tokens': response,
      'output_tokens_details': {
        'reasoning_tokens': _reasoning_tokens(recorded.response_ids.tolist(), tokenizer)
      },
      'total_tokens': prompt + response,
    },
  }


def _reasoning_tokens(ids: list[int], tokenizer: Tokenizer) -> int:
  """Tokens before the end of the thinking, which has none if the model is cut off."""
  [end] = tokenizer.encode(markup.THINK_END)
  return ids.index(end) if end in ids else len(ids)


class Output:
  """The output items of a response, and the events by which a client builds them.

  Attributes:
    items: the items that have ended.
  """

  def __init__(self, hex_id: str, request: ChatRequest):
    self.items: list[dict[str, Any]] = []
    self._hex, self._echo = hex_id, request.echo
    self._open: dict[str, Any] | None = None
    self._texts: list[str] = []  # of the open item
    self._calls = 0
    self._ids: set[str] = set()

  def add(self, deltas: Iterable[chat.Delta]) -> _Events:
    """The events of new deltas."""
    events: _Events = []
    for delta in deltas:
      if delta.kind == 'tool_call':
        events += self.close('completed')
        events += self._call(delta.call)
        continue
      kind = 'reasoning' if delta.kind == 'reasoning_content' else 'message'
      if self._open is None or self._open['type'] != kind:
        events += self.close('completed')
        events += self._begin(kind)
      self._texts.append(delta.text)
      events.append(self._part_event('delta', delta=delta.text))
    return events

  def close(self, status: str) -> _Events:
    """Ends the open item."""
    if self._open is None:
      return []
    item, text = self._open, ''.join(self._texts)
    part = _part(item, text)
    item['content'], item['status'] = [part], status
    if item['type'] == 'reasoning' and self._echo['encrypted']:
      item['encrypted_content'] = encrypt(text)
    events = [
      self._part_event('done', text=text),
      self._at('response.content_part.done', content_index=0, part=part),
      self._end(item),
    ]
    return events

  def _begin(self, kind: str) -> _Events:
    item: dict[str, Any] = {'type': kind, 'status': 'in_progress', 'content': []}
    if kind == 'reasoning':
      item |= {'id': self._id('rs'), 'summary': []}
    else:
      item |= {'id': self._id('msg'), 'role': 'assistant'}
    self._open, self._texts = item, []
    return [
      self._added(item),
      self._at(
        'response.content_part.added', content_index=0, part=_part(item, '')
      ),
    ]  # fmt: skip

  def _call(self, call: chat.ToolCall) -> _Events:
    item = self._echo['names'].item(call.name, call.arguments)
    field, event = _CALLS[item['type']]
    prefix = 'fc' if item['type'] == 'function_call' else 'ctc'
    item |= {
      'id': f'{prefix}_{self._hex}_{self._calls}',
      'call_id': f'{CALL_PREFIX}{self._hex}_{self._calls}',
      'status': 'completed',
    }
    self._calls += 1
    self._open = item
    text = item[field]
    done = {field: text}
    if item['type'] == 'function_call':
      done['name'] = item['name']
    return [
      self._added(item | {field: '', 'status': 'in_progress'}),
      self._at(f'{event}.delta', delta=text),
      self._at(f'{event}.done', **done),
      self._end(item),
    ]

  def _id(self, prefix: str) -> str:
    """The id of an item; a second one of its kind gets a number."""
    name, count = f'{prefix}_{self._hex}', 1
    while name in self._ids:
      name, count = f'{prefix}_{self._hex}_{count}', count + 1
    self._ids.add(name)
    return name

  def _added(self, item: dict) -> dict[str, Any]:
    return {
      'type': 'response.output_item.added',
      'output_index': len(self.items),
      'item': dict(item),
    }

  def _end(self, item: dict) -> dict[str, Any]:
    event = {
      'type': 'response.output_item.done',
      'output_index': len(self.items),
      'item': item,
    }
    self.items.append(item)
    self._open = None
    return event

  def _part_event(self, what: str, **value: Any) -> dict[str, Any]:
    """An event of the text of the open item."""
    if self._open['type'] == 'reasoning':
      return self._at(f'response.reasoning_text.{what}', content_index=0, **value)
    return self._at(
      f'response.output_text.{what}', content_index=0, logprobs=[], **value
    )

  def _at(self, kind: str, **value: Any) -> dict[str, Any]:
    """An event of the open item."""
    where = {'item_id': self._open['id'], 'output_index': len(self.items)}
    return {'type': kind, **where, **value}


def _part(item: dict, text: str) -> dict[str, Any]:
  if item['type'] == 'reasoning':
    return {'type': 'reasoning_text', 'text': text}
  return {'type': 'output_text', 'text': text, 'annotations': [], 'logprobs': []}


class _Sequence:
  """Numbers the events of a response."""

  def __init__(self):
    self._count = 0

  def __call__(self, events: _Events) -> list[str]:
    out = []
    for value in events:
      out.append(base.event(value | {'sequence_number': self._count}, value['type']))
      self._count += 1
    return out


class Stream(base.Stream):
  """Events of a streamed response."""

  def __init__(self, pendings: Sequence[Pending], tokenizer: Tokenizer):
    super().__init__(pendings, tokenizer)
    [pending] = pendings
    self._tokenizer = tokenizer
    self._in_progress = _response(
      _hex(pending.id), int(pending.started_s), pending.request, []
    )
    self._output = Output(_hex(pending.id), pending.request)
    self._number = _Sequence()

  def begin(self) -> list[str]:
    return self._number(
      [
        {'type': f'response.{name}', 'response': self._in_progress}
        for name in ('created', 'in_progress')
      ]
    )

  def fail(self, error: ApiError) -> list[str]:
    response = self._in_progress | {
      'status': 'failed',
      'error': _failure(error),
      'output': self._output.items,
    }
    return self._number([{'type': 'response.failed', 'response': response}])

  def _events(
    self, choice: int, deltas: Sequence[chat.Delta], tokens: NewTokens, count: int
  ) -> list[str]:
    return self._number(self._output.add(deltas))

  def _last(self, answers: Sequence[Answer]) -> list[str]:
    [answer] = answers
    events = self._output.close('incomplete' if _cut(answer) else 'completed')
    response = _finished(answer, self._output, self._tokenizer)
    name = f'response.{response["status"]}'
    return self._number([*events, {'type': name, 'response': response}])
