"""The chat of a completion as a client sent it, for reports and demonstrations."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# What the template renders of a message (`text.chat`).
_FIELDS = ('role', 'content', 'reasoning_content', 'tool_calls', 'tool_call_id')
_CALL_FIELDS = ('id', 'type', 'function')


@dataclasses.dataclass
class Exchange:
  """A request and its response, for the report: not what is trained.

  Attributes:
    path: of the request.
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
  """The chat of an exchange.

  In the dialect of chat completions, as sent, with the answer unless it was streamed;
  messages of other dialects are only readable.
  """
  if exchange is None:
    return Transcript([])
  request, response = exchange.request, exchange.response or {}
  if not exchange.path.endswith('/chat/completions'):
    shown = request.get('messages') or request.get('input') or ()
    return Transcript([_readable(item) for item in shown if isinstance(item, dict)])
  messages = [m for m in request.get('messages') or () if isinstance(m, dict)]
  messages += [choice['message'] for choice in (response.get('choices') or ())[:1]]
  return Transcript([*map(_rendered, messages)], request.get('tools') or ())


def _rendered(message: Mapping[str, Any]) -> dict[str, Any]:
  found = {name: message[name] for name in _FIELDS if message.get(name) is not None}
  if calls := found.get('tool_calls'):
    found['tool_calls'] = [
      {name: call[name] for name in _CALL_FIELDS if name in call} for call in calls
    ]
  return found


def _readable(item: Mapping[str, Any]) -> dict[str, Any]:
  content = item.get('content', item)
  if not isinstance(content, str):
    content = json.dumps(content, ensure_ascii=False)
  return {'role': item.get('role') or item.get('type') or '', 'content': content}
