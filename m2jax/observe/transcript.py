"""A trajectory's chat messages as a readable list of steps.

OpenAI chat dicts (`role`, `content`, `reasoning_content`, `tool_calls`) become task,
thinking, call, observation and answer. The dicts come from agents, so that any value
may have any type; nothing here trusts their structure.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Step:
  """One message, or one part of an assistant message.

  Attributes:
    kind: 'system', 'task', 'thinking', 'text', 'call', 'observation' or 'answer'.
    text: as the model or the tool wrote it.
    turn: number of assistant messages before this one; all steps of an assistant
      message have the same turn.
    tool: name of the tool, for a call.
  """

  kind: str
  text: str
  turn: int
  tool: str = ''


def steps(messages: Sequence[Mapping[str, Any]]) -> list[Step]:
  """All steps of a trajectory in order."""
  found: list[Step] = []
  turn = 0
  for message in messages:
    if not isinstance(message, Mapping):
      continue
    content = plain_text(message.get('content'))
    role = message.get('role')
    if role == 'assistant':
      found += _assistant(message, content, turn)
      turn += 1
    elif content:
      kind = {'tool': 'observation', 'system': 'system', 'user': 'task'}
      found.append(Step(kind.get(str(role), 'text'), content, turn))
  return found


def plain_text(content: Any) -> str:
  """Message content as text: a string, or the text parts of a list of blocks."""
  if isinstance(content, str):
    return content
  if isinstance(content, (list, tuple)):
    return '\n'.join(
      str(part.get('text', '')) if isinstance(part, Mapping) else str(part)
      for part in content
    )
  return '' if content is None else str(content)


def _assistant(message: Mapping[str, Any], content: str, turn: int) -> Iterator[Step]:
  thinking = plain_text(message.get('reasoning_content'))
  calls = message.get('tool_calls')
  calls = calls if isinstance(calls, (list, tuple)) else ()
  if thinking:
    yield Step('thinking', thinking, turn)
  if content:
    yield Step('text' if calls else 'answer', content, turn)
  for call in calls:
    yield Step('call', *_call(call, turn))


def _call(call: Any, turn: int) -> tuple[str, int, str]:
  """Text, turn and tool of a call; the text of a sole string argument is its value."""
  function = call.get('function') if isinstance(call, Mapping) else None
  if not isinstance(function, Mapping):
    return str(call), turn, ''
  tool = str(function.get('name', ''))
  arguments = function.get('arguments')
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments)
    except (ValueError, RecursionError):
      return arguments, turn, tool
  if isinstance(arguments, Mapping) and len(arguments) == 1:
    only = next(iter(arguments.values()))
    if isinstance(only, str):
      return only, turn, tool
  return json.dumps(arguments, ensure_ascii=False, default=str), turn, tool
