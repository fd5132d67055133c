"""M2's chat template: renders OpenAI messages as the exact string M2 was trained on.

Source: facts/m2-and-forge.md §2.1. Rendering gives segments that mark
the text that the model generates (loss and law 4) and the special tokens, so that
gateway and SFT encode the same pieces (`tokenizer.encode_chat`) and a user's text can
never become a special token.

Intended differences from the published template:
  - `content: null` renders as nothing (the template prints `None`);
  - content that the template would drop silently (images, a system message that is
    not the first, arguments that are not a JSON object) raises `ChatError`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from m2jax.text import markup
from m2jax.text.parsing import (
  Delta,
  Message,
  Piece,
  Status,
  StreamParser,
  ToolCall,
  parse,
)

__all__ = (
  'ChatError',
  'Delta',
  'Message',
  'Piece',
  'Segment',
  'Status',
  'StreamParser',
  'Template',
  'ToolCall',
  'continuation',
  'keeps_prefix',
  'parse',
  'render',
  'segments',
)


class ChatError(ValueError):
  """Messages or tools that M2's template cannot express; names the index."""


@dataclasses.dataclass(frozen=True)
class Template:
  """Options of M2's template.

  Attributes:
    default_system: system text for messages without one (M2's; M2.5 and M2.7 add a
      sentence with the model's name).
    keep_all_thinking: render the reasoning of every assistant message. M2's template
      renders only the reasoning after the last user message.
  """

  default_system: str = markup.DEFAULT_SYSTEM
  keep_all_thinking: bool = False


DEFAULT = Template()


class Segment(NamedTuple):
  """A piece of a rendered chat.

  Attributes:
    text: the piece; the rendered string is the concatenation of all pieces.
    owned: the model generates it (reasoning, content, tool calls, `[e~[`).
    special: one special token of the template. Other pieces are plain text, whatever
      they contain.
    message: index of the message it belongs to; −1 for an implied system message,
      len(messages) for the generation prompt.
  """

  text: str
  owned: bool = False
  special: bool = False
  message: int = -1


def render(
  messages: Sequence[Mapping[str, Any]],
  tools: Sequence[Mapping[str, Any]] | None = None,
  add_generation_prompt: bool = False,
  *,
  template: Template = DEFAULT,
) -> str:
  """Renders OpenAI chat messages in M2's template.

  Args:
    messages: dicts with `role` (system, developer, user, assistant, tool), `content`
      (string, list of text parts or None) and, for an assistant, `reasoning_content`
      and `tool_calls`. A first system message may carry `current_date` and
      `current_location`.
    tools: OpenAI tool dicts, with or without the `{'type': 'function'}` envelope.
    add_generation_prompt: end with `]~b]ai\\n<think>\\n`.
    template: options.

  Raises:
    ChatError: the template cannot express the messages; names the index.
  """
  pieces = segments(messages, tools, add_generation_prompt, template=template)
  return ''.join(piece.text for piece in pieces)


def segments(
  messages: Sequence[Mapping[str, Any]],
  tools: Sequence[Mapping[str, Any]] | None = None,
  add_generation_prompt: bool = False,
  *,
  template: Template = DEFAULT,
) -> list[Segment]:
  """`render` as pieces by owner; see `Segment`. Arguments as for `render`.

  An assistant message without reasoning is rendered without a thinking block, so its
  text follows `]~b]ai\\n`, not the generation prompt: demonstrations for SFT should
  have reasoning.
  """
  if not messages:
    raise ChatError('messages is empty: pass at least one message')
  first = messages[0]
  has_system = _role(first, 0) == 'system'
  at = 0 if has_system else -1
  text = (_text(first, 0) if has_system else '') or template.default_system
  if has_system:
    for key, label in (('current_date', 'date'), ('current_location', 'location')):
      if first.get(key):
        text += f'\nCurrent {label}: {first[key]}'
  out = [
    Segment(markup.BOS, special=True, message=at),
    Segment(markup.ROLE, special=True, message=at),
    Segment('system\n' + text, message=at),
  ]
  if tools:
    lines = ''.join(_tool_line(tool, i) for i, tool in enumerate(tools))
    body = markup.TOOLS_HEADER + lines + markup.TOOLS_FOOTER
    out += (
      Segment(body, message=at),
      Segment(markup.TOOL_CALL, special=True, message=at),
      Segment(markup.TOOLS_EXAMPLE, message=at),
      Segment(markup.TOOL_CALL_END, special=True, message=at),
    )
  out += (Segment(markup.EOS, special=True, message=at), Segment('\n', message=at))
  out += _turns(messages, int(has_system), add_generation_prompt, template)
  return _valid(out)


def continuation(
  messages: Sequence[Mapping[str, Any]],
  index: int,
  add_generation_prompt: bool = True,
  *,
  template: Template = DEFAULT,
) -> list[Segment]:
  """The pieces after the `[e~[` of assistant message `index`.

  A gateway appends them to recorded ids instead of encoding the history again (law 4):
  `segments(messages, …)` ends with them. Valid only if `keeps_prefix` is true.
  """
  if messages[index].get('role') != 'assistant':
    raise ChatError(
      f'messages[{index}]: a continuation follows an assistant message, not '
      f'{messages[index].get("role")!r}'
    )
  turns = _turns(messages, index + 1, add_generation_prompt, template)
  return _valid([Segment('\n', message=index), *turns])


def keeps_prefix(
  messages: Sequence[Mapping[str, Any]], index: int, *, template: Template = DEFAULT
) -> bool:
  """Whether later messages leave the prompt up to assistant message `index` unchanged.

  After a later user message, M2's template omits earlier reasoning, so that the prompt
  differs from the recorded ids; within a tool cycle it does not.
  """
  later = messages[index + 1 :]
  return template.keep_all_thinking or all(m.get('role') != 'user' for m in later)


def _valid(pieces: list[Segment]) -> list[Segment]:
  """Raises ChatError for lone surrogates, which JSON allows and UTF-8 does not."""
  for piece in pieces:
    if not piece.text.isascii():
      try:
        piece.text.encode()
      except UnicodeEncodeError:
        where = f'messages[{piece.message}]' if piece.message >= 0 else 'tools'
        raise ChatError(
          f'{where} contains a lone surrogate: not valid Unicode'
        ) from None
  return pieces


def _turns(
  messages: Sequence[Mapping[str, Any]],
  start: int,
  add_generation_prompt: bool,
  template: Template,
) -> Iterator[Segment]:
  """Pieces of messages[start:], then the generation prompt."""
  roles = [_role(message, i) for i, message in enumerate(messages)]
  users = [i for i, role in enumerate(roles) if role == 'user']
  last_user = -1 if template.keep_all_thinking or not users else users[-1]
  # The template only remembers whether the last assistant message called a tool.
  before = [i for i in range(start) if roles[i] == 'assistant']
  called = bool(before and messages[before[-1]].get('tool_calls'))
  previous = roles[start - 1] if start else None
  for i in range(start, len(messages)):
    message, role = messages[i], roles[i]
    if previous == 'tool' and role != 'tool':
      yield from _end(i - 1)
    if role == 'user':
      yield Segment(markup.ROLE, special=True, message=i)
      yield Segment('user\n' + _text(message, i), message=i)
      yield from _end(i)
    elif role == 'assistant':
      called = bool(message.get('tool_calls'))
      yield from _assistant(message, i, i > last_user)
    elif role == 'tool':
      if not called:
        raise ChatError(
          f'messages[{i}]: a tool message needs an assistant message with tool_calls '
          'before it'
        )
      if previous != 'tool':
        yield Segment(markup.ROLE, special=True, message=i)
        yield Segment('tool', message=i)
      yield Segment(_responses(message, i), message=i)
    else:
      raise ChatError(
        f'messages[{i}]: a system message must be the first; merge it into messages[0]'
      )
    previous = role
  if previous == 'tool':
    yield from _end(len(messages) - 1)
  if add_generation_prompt:
    n = len(messages)
    yield Segment(markup.ROLE, special=True, message=n)
    yield Segment('ai\n', message=n)
    yield Segment(markup.THINK, special=True, message=n)
    yield Segment('\n', message=n)


def _end(i: int) -> Iterator[Segment]:
  yield Segment(markup.EOS, special=True, message=i)
  yield Segment('\n', message=i)


def _assistant(message: Mapping[str, Any], i: int, keep: bool) -> Iterator[Segment]:
  content = _text(message, i)
  reasoning = message.get('reasoning_content')
  if not isinstance(reasoning, str):
    reasoning, closed, after = content.partition(markup.THINK_END)
    if closed:
      reasoning = reasoning.split(markup.THINK)[-1].strip('\n')
      content = after.strip('\n')
    else:
      reasoning = ''
  yield Segment(markup.ROLE, special=True, message=i)
  yield Segment('ai\n', message=i)
  if reasoning and keep:
    yield Segment(markup.THINK, special=True, message=i)
    yield Segment('\n', message=i)
    yield Segment(reasoning + '\n', owned=True, message=i)
    yield Segment(markup.THINK_END, owned=True, special=True, message=i)
    content = '\n\n' + content
  calls = message.get('tool_calls')
  if calls:
    content += '\n'
  if content:
    yield Segment(content, owned=True, message=i)
  if calls:
    yield Segment(markup.TOOL_CALL, owned=True, special=True, message=i)
    block = ''.join(
      _invoke(call, f'messages[{i}].tool_calls[{k}]') for k, call in enumerate(calls)
    )
    yield Segment('\n' + block, owned=True, message=i)
    yield Segment(markup.TOOL_CALL_END, owned=True, special=True, message=i)
  yield Segment(markup.EOS, owned=True, special=True, message=i)
  yield Segment('\n', message=i)


def _invoke(call: Any, where: str) -> str:
  function = call.get('function', call) if isinstance(call, Mapping) else None
  name = function.get('name') if isinstance(function, Mapping) else None
  if not isinstance(name, str) or not name:
    raise ChatError(f'{where}: needs a function with a name')
  arguments = function.get('arguments')
  if isinstance(arguments, str):
    try:
      arguments = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
      raise ChatError(f'{where}.function.arguments: not JSON ({error})') from None
  elif arguments is None:
    arguments = {}
  if not isinstance(arguments, Mapping):
    raise ChatError(
      f'{where}.function.arguments: must be a JSON object, not '
      f'{type(arguments).__name__}'
    )
  lines = [f'<invoke name="{name}">\n']
  for key, value in arguments.items():
    if not isinstance(value, str):
      value = json.dumps(value, ensure_ascii=False)
    lines.append(f'<parameter name="{key}">{value}</parameter>\n')
  lines.append('</invoke>\n')
  return ''.join(lines)


def _responses(message: Mapping[str, Any], i: int) -> str:
  """One `<response>`; for a list one per part, with the closing tag on a new line."""
  content = message.get('content')
  if isinstance(content, list) and content:
    parts = (_part(part, i, k) for k, part in enumerate(content))
    return ''.join(f'\n<response>{part}\n</response>' for part in parts)
  return f'\n<response>{_text(message, i)}</response>'


def _tool_line(tool: Any, i: int) -> str:
  function = tool.get('function', tool) if isinstance(tool, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(function.get('name'), str):
    raise ChatError(f'tools[{i}]: needs a function with a name')
  return f'<tool>{json.dumps(function, ensure_ascii=False)}</tool>\n'


def _role(message: Any, i: int) -> str:
  role = message.get('role') if isinstance(message, Mapping) else None
  if role == 'developer':  # OpenAI's newer name for the system message.
    return 'system'
  if role not in ('system', 'user', 'assistant', 'tool'):
    raise ChatError(
      f'messages[{i}].role is {role!r}: use system, developer, user, assistant or tool'
    )
  return role


def _text(message: Mapping[str, Any], i: int) -> str:
  content = message.get('content')
  if content is None:
    return ''
  if isinstance(content, str):
    return content
  if isinstance(content, list):
    return ''.join(_part(part, i, k) for k, part in enumerate(content))
  raise ChatError(
    f'messages[{i}].content is {type(content).__name__}: use a string, a list of text '
    'parts or null'
  )


def _part(part: Any, i: int, k: int) -> str:
  if isinstance(part, str):
    return part
  if isinstance(part, Mapping) and part.get('type') == 'text':
    text = part.get('text')
    if isinstance(text, str):
      return text
  kind = part.get('type') if isinstance(part, Mapping) else type(part).__name__
  raise ChatError(f'messages[{i}].content[{k}] is {kind!r}: M2 accepts text parts only')
