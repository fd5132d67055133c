"""M2's chat template: renders OpenAI messages as the exact string M2 was trained on.

Source: facts/m2-and-forge.md §2.1. Rendering gives segments that mark
the text that the model generates (loss and law 4) and the special tokens, so that
gateway and SFT encode the same pieces (`tokenizer.encode_chat`) and a user's text can
never become a special token.

Intended differences from the published template:
  - `content: null` renders as nothing (the template prints `None`);
  - of a tool, only name, description and parameters are rendered: what else clients
    send (`strict`, cache marks) is for servers;
  - content that the template would drop silently (images, arguments that are not a
    JSON object) raises `ChatError`, and so does a call that the parser would not read
    back as it was (`invokes`).

System messages inside a conversation. The template drops them silently. Moved to the
front they would change the first tokens of every later prompt, so that no recorded
prefix could be extended; as user messages they would make the template drop all
reasoning before them, since it renders only the reasoning after the last user message.
So, like vLLM (facts/clients-and-peers.md §1), each stays where it is:
  - after a tool result or a user message it joins that message, after a blank line (or
    as one more `<response>` if the result is a list): M2 knows such text;
  - after an assistant message it is a `system` block of its own, in place;
  - system messages at the front, before all others, are one system text.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from m2jax.text import invokes, markup
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
  'in_call_order',
  'keeps_prefix',
  'parse',
  'render',
  'segments',
  'tool_lines',
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
    version: 'm2', or 'm2.1' for M2.1, M2.5 and M2.7: the values that a tool call can
      express (`invokes`).
    tools_header, tools_footer: the text before and after the list of tools. Others than
      M2's are for SFT: they teach to read the list, wherever it is.
  """

  default_system: str = markup.DEFAULT_SYSTEM
  keep_all_thinking: bool = False
  version: str = 'm2'
  tools_header: str = markup.TOOLS_HEADER
  tools_footer: str = markup.TOOLS_FOOTER

  def __post_init__(self):
    if self.version not in invokes.VERSIONS:
      raise ValueError(
        f'Template.version {self.version!r}: must be one of {invokes.VERSIONS}'
      )


DEFAULT = Template()
_TOOL_KEYS = ('name', 'description', 'parameters')
_JOINT = '\n\n'  # between a message and a system message that joins it


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
      `current_location`; the module's docstring says where others are rendered.
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
  roles = [_role(message, i) for i, message in enumerate(messages)]
  systems = next((i for i, role in enumerate(roles) if role != 'system'), len(roles))
  at = 0 if systems else -1
  texts = (_text(messages[i], i) for i in range(systems))
  text = _JOINT.join(filter(None, texts)) or template.default_system
  if systems:
    for key, label in (('current_date', 'date'), ('current_location', 'location')):
      if first.get(key):
        text += f'\nCurrent {label}: {first[key]}'
  out = [
    Segment(markup.BOS, special=True, message=at),
    Segment(markup.ROLE, special=True, message=at),
    Segment('system\n' + text, message=at),
  ]
  if tools:
    body = template.tools_header + tool_lines(tools) + template.tools_footer
    out += (
      Segment(body, message=at),
      Segment(markup.TOOL_CALL, special=True, message=at),
      Segment(markup.TOOLS_EXAMPLE, message=at),
      Segment(markup.TOOL_CALL_END, special=True, message=at),
    )
  out += (Segment(markup.EOS, special=True, message=at), Segment('\n', message=at))
  out += _turns(messages, systems, add_generation_prompt, template)
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


def in_call_order(
  messages: Sequence[Mapping[str, Any]], *, complete: bool = True
) -> list[Mapping[str, Any]]:
  """The messages with the results of parallel calls in the order of the calls.

  The template shows no ids: the model knows by the order which call a result is of.
  Results change places among themselves, up to the next assistant message. They keep
  their order where a call or a result has no id.

  Args:
    complete: whether every call needs a result; otherwise a message's calls may all
      have none.

  Raises:
    ChatError: a result of no call, or a call without a result; names the index.
  """
  out = list(messages)
  answers = [i for i, m in enumerate(messages) if m.get('role') == 'assistant']
  for start, end in itertools.pairwise([*answers, len(messages)]):
    calls: Sequence[Mapping] = messages[start].get('tool_calls') or ()
    places = [i for i in range(start + 1, end) if messages[i].get('role') == 'tool']
    ids: list[Any] = [call.get('id') for call in calls]
    given: list[Any] = [messages[i].get('tool_call_id') for i in places]
    if not calls or not all(ids) or not all(given):
      continue
    left: dict[str, list[int]] = collections.defaultdict(list)
    for k in reversed(range(len(ids))):
      left[ids[k]].append(k)
    found = {}
    for i, answered in zip(places, given, strict=True):
      if not left.get(answered):
        raise ChatError(
          f'messages[{i}].tool_call_id: {answered[:100]!r} is none of the calls of '
          f'messages[{start}] that have no result yet'
        )
      found[left[answered].pop()] = messages[i]
    if len(found) < len(ids) and (complete or found):
      k = next(k for k in range(len(ids)) if k not in found)
      raise ChatError(
        f'messages[{start}].tool_calls[{k}]: no tool message has the result of '
        f'{ids[k][:100]!r}'
      )
    for i, k in zip(places, sorted(found), strict=True):
      out[i] = found[k]
  return out


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
    if role == 'system' and previous in ('user', 'tool'):
      continue  # joined that message
    if previous == 'tool' and role != 'tool':
      yield from _end(i - 1)
    if role in ('user', 'system'):
      joined = _joined(messages, roles, i) if role == 'user' else []
      text = _JOINT.join(filter(None, [_text(message, i), *joined]))
      yield Segment(markup.ROLE, special=True, message=i)
      yield Segment(f'{role}\n{text}', message=i)
      yield from _end(i)
    elif role == 'assistant':
      called = bool(message.get('tool_calls'))
      yield from _assistant(message, i, i > last_user, template.version)
    elif role == 'tool':
      if not called:
        raise ChatError(
          f'messages[{i}]: a tool message needs an assistant message with tool_calls '
          'before it'
        )
      if previous != 'tool':
        yield Segment(markup.ROLE, special=True, message=i)
        yield Segment('tool', message=i)
      yield Segment(_responses(message, i, _joined(messages, roles, i)), message=i)
    previous = role
  if previous == 'tool':
    yield from _end(len(messages) - 1)
  if add_generation_prompt:
    n = len(messages)
    yield Segment(markup.ROLE, special=True, message=n)
    yield Segment('ai\n', message=n)
    yield Segment(markup.THINK, special=True, message=n)
    yield Segment('\n', message=n)


def _joined(
  messages: Sequence[Mapping[str, Any]], roles: Sequence[str], i: int
) -> list[str]:
  """Texts of the system messages that follow message i and join it."""
  texts = []
  for j in range(i + 1, len(messages)):
    if roles[j] != 'system':
      break
    texts.append(_text(messages[j], j))
  return texts


def _end(i: int) -> Iterator[Segment]:
  yield Segment(markup.EOS, special=True, message=i)
  yield Segment('\n', message=i)


def _assistant(
  message: Mapping[str, Any], i: int, keep: bool, version: str
) -> Iterator[Segment]:
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
    try:
      block = ''.join(
        invokes.write_call(call, f'messages[{i}].tool_calls[{k}]', version)
        for k, call in enumerate(calls)
      )
    except ValueError as error:
      raise ChatError(str(error)) from None
    yield Segment('\n' + block, owned=True, message=i)
    yield Segment(markup.TOOL_CALL_END, owned=True, special=True, message=i)
  yield Segment(markup.EOS, owned=True, special=True, message=i)
  yield Segment('\n', message=i)


def _responses(message: Mapping[str, Any], i: int, joined: Sequence[str]) -> str:
  """One `<response>`; for a list one per part, with the closing tag on a new line."""
  content = message.get('content')
  if isinstance(content, list) and content:
    parts = [_part(part, i, k) for k, part in enumerate(content)]
    return ''.join(f'\n<response>{part}\n</response>' for part in [*parts, *joined])
  text = _JOINT.join(filter(None, [_text(message, i), *joined]))
  return f'\n<response>{text}</response>'


def tool_lines(tools: Sequence[Mapping[str, Any]]) -> str:
  """The lines that describe tools in a prompt. Raises ChatError; names the index."""
  return ''.join(_tool_line(tool, i) for i, tool in enumerate(tools))


def _tool_line(tool: Any, i: int) -> str:
  function = tool.get('function', tool) if isinstance(tool, Mapping) else None
  if not isinstance(function, Mapping) or not isinstance(function.get('name'), str):
    raise ChatError(f'tools[{i}]: needs a function with a name')
  shown = {key: function[key] for key in function if key in _TOOL_KEYS}
  return f'<tool>{json.dumps(shown, ensure_ascii=False)}</tool>\n'


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
