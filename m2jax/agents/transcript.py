"""The chat of a completion as a client sent it, for reports and demonstrations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from m2jax import records
from m2jax.observe.transcript import plain_text

# What the template renders of a message (`text.chat`).
_FIELDS = ('role', 'content', 'reasoning_content', 'tool_calls', 'tool_call_id')
_CALL_FIELDS = ('id', 'type', 'function')


@dataclasses.dataclass
class Exchange:
  """A request and its response, for the report: not what is trained.

  Attributes:
    path: the request's path.
    request: its body.
    response: body of a response that was not streamed; else None.
  """

  path: str
  request: dict[str, Any]
  response: dict[str, Any] | None = None


class Transcript(NamedTuple):
  """A chat: OpenAI messages up to the last answer that is known, and its tools."""

  messages: list[dict[str, Any]]
  tools: Sequence[Mapping[str, Any]] = ()


def of(exchange: Exchange | None) -> Transcript:
  """The chat of an exchange, with the answer unless it was streamed.

  In the dialect of chat completions as sent. Of the others the conversation, without
  its system field and tools, which are no messages there.
  """
  if exchange is None:
    return Transcript([])
  request, response = exchange.request, exchange.response or {}
  if exchange.path.endswith('/messages'):
    answer = {'role': 'assistant', 'content': response.get('content')}
    messages = _dicts(request.get('messages')) + [answer] * bool(answer['content'])
    return Transcript(_of_anthropic(messages))
  if exchange.path.endswith('/responses'):
    items = request.get('input')
    if isinstance(items, str):
      items = [{'role': 'user', 'content': items}]
    return Transcript(_of_responses(_dicts(items) + _dicts(response.get('output'))))
  messages = _dicts(request.get('messages'))
  messages += [choice['message'] for choice in _dicts(response.get('choices'))[:1]]
  return Transcript([*map(_rendered, messages)], request.get('tools') or ())


def _dicts(value: Any) -> list[dict[str, Any]]:
  """The objects of a list, if it is one."""
  found = value if isinstance(value, list) else []
  return [item for item in found if isinstance(item, dict)]


def _rendered(message: Mapping[str, Any]) -> dict[str, Any]:
  found = {name: message[name] for name in _FIELDS if message.get(name) is not None}
  if 'tool_calls' in found:
    found['tool_calls'] = [
      {name: call[name] for name in _CALL_FIELDS if name in call}
      for call in _dicts(found['tool_calls'])
    ]
  return found


def _of_anthropic(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Messages with blocks: results of tools are messages of their own."""
  found: list[dict[str, Any]] = []
  for message in messages:
    role, content = str(message.get('role') or ''), message.get('content')
    blocks = _dicts(content)
    if isinstance(content, str):
      blocks = [{'type': 'text', 'text': content}]
    if role == 'assistant':
      reply = _reply()
      for block in blocks:
        if block.get('type') == 'tool_use':
          _add_call(reply, block.get('id'), block.get('name'), block.get('input'))
        elif block.get('type') == 'thinking':
          _add(reply, 'reasoning_content', block.get('thinking'))
        else:
          _add(reply, 'content', block.get('text'))
      found.append(reply)
      continue
    results = [block for block in blocks if block.get('type') == 'tool_result']
    found += [_result(b.get('tool_use_id'), b.get('content')) for b in results]
    texts = [block for block in blocks if block.get('type') != 'tool_result']
    if texts or not results:
      found.append({'role': role, 'content': plain_text(texts)})
  return found


def _of_responses(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
  """Items: consecutive ones of the model are one message.

  A call of the same completion is of the same message even after results.
  """
  found: list[dict[str, Any]] = []
  reply: dict[str, Any] | None = None
  open_ = False
  for item in items:
    kind = str(item.get('type') or 'message')
    role = str(item.get('role') or '')
    content = plain_text(item.get('content'))
    if kind.endswith('_output'):
      found.append(_result(item.get('call_id'), item.get('output')))
      open_ = False
      continue
    if kind == 'message' and role != 'assistant':
      role = 'system' if role == 'developer' else role
      found.append({'role': role, 'content': content})
      open_, reply = False, None
      continue
    named = records.completion_named({'tool_calls': [{'id': item.get('call_id')}]})
    again = reply and named and named == records.completion_named(reply)
    if not open_ and not again:
      found.append(reply := _reply())
      open_ = True
    if kind == 'message':
      _add(reply, 'content', content)
    elif kind == 'reasoning':
      text = content or plain_text(item.get('summary'))
      _add(reply, 'reasoning_content', text)
    else:
      given = item.get('arguments', {'input': item.get('input')})
      _add_call(reply, item.get('call_id'), item.get('name'), given)
  return found


def _reply() -> dict[str, Any]:
  return {'role': 'assistant', 'content': ''}


def _add(reply: dict[str, Any], field: str, text: Any) -> None:
  if isinstance(text, str) and text:
    reply[field] = reply.get(field, '') + text


def _add_call(reply: dict[str, Any], id_: Any, name: Any, arguments: Any) -> None:
  if not isinstance(arguments, str):
    arguments = json.dumps(arguments, ensure_ascii=False)
  function = {'name': str(name), 'arguments': arguments}
  call = {'id': str(id_), 'type': 'function', 'function': function}
  reply.setdefault('tool_calls', []).append(call)


def _result(id_: Any, content: Any) -> dict[str, Any]:
  return {'role': 'tool', 'tool_call_id': str(id_), 'content': plain_text(content)}
