"""One form for the messages of all clients, before anything is compared or rendered.

Source: facts/clients-and-peers.md §1. Clients spell the same conversation in many ways:

- Reasoning comes back as `reasoning_content` (MiniMax, DeepSeek, vLLM before 0.12),
  `reasoning` (vLLM, OpenRouter), `reasoning_details` (OpenRouter, MiniMax), `thinking`
  (Ollama), `thinking_blocks` (litellm), as parts of the content, or inline as
  `<think>…</think>` at its start. `normalised` makes all of them `reasoning_content`.
- Claude Code puts a line `x-anthropic-billing-header: …; cch=…;` in front of its system
  text; its hash changes with every request, so that no prompt would begin like another.
  It is dropped and counted.

OpenAI's chat dialect passes its messages through `normalised`; the other dialects have
one place for reasoning, and call `without_billing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from m2jax.gateway import fields, history
from m2jax.gateway.errors import invalid
from m2jax.text import chat, markup

# What `normalised` reports, to be counted as `ignored_total{field=…}`.
BILLING = 'billing_header'

_BILLING_LINES = re.compile(r'\A(?:\s*x-anthropic-billing-header:[^\n]*(?:\n|\Z))+')
# The first of these that is not empty is the reasoning.
_TEXTS = ('reasoning_content', 'reasoning', 'thinking')
_LISTS = ('reasoning_details', 'thinking_blocks')
# Parts of the content or of the lists above, with the field of their text. Others, such
# as 'redacted_thinking' and 'reasoning.encrypted', are for the server that wrote them.
_PARTS = {
  'thinking': 'thinking',
  'reasoning': 'text',
  'reasoning.text': 'text',
  'reasoning.summary': 'summary',
}
_OPAQUE = ('redacted_thinking', 'reasoning.encrypted')


def normalised(messages: Any) -> tuple[Any, tuple[str, ...]]:
  """The messages with one name for reasoning, and what was dropped, to be counted.

  Values of other types than expected stay as they are, for the checks that follow.

  Raises:
    ApiError: 400, reasoning that is not text; names the field.
  """
  if not isinstance(messages, list):
    return messages, ()
  found, dropped = [], []
  for i, message in enumerate(messages):
    role = message.get('role') if isinstance(message, dict) else None
    if role in ('system', 'developer'):
      content = _without_billing(message.get('content'))
      if content != message.get('content'):
        dropped.append(BILLING)
        message = {**message, 'content': content}
    elif role == 'assistant':
      message = _assistant(message, f'messages[{i}]')
    found.append(message)
  return found, tuple(dropped)


def without_billing(text: str) -> str:
  """A system text, or a block of one, without a billing header at its start."""
  return _BILLING_LINES.sub('', text)


def tools_digest(tools: list[dict] | None) -> bytes:
  """Equal iff the prompt shows the same tools; b'' without tools.

  Raises:
    ApiError: 400, a tool that cannot be rendered.
  """
  try:
    return history.digest(chat.tool_lines(tools).encode()) if tools else b''
  except (chat.ChatError, UnicodeEncodeError) as error:
    raise invalid(str(error), None) from None


def _without_billing(content: Any) -> Any:
  if isinstance(content, str):
    return without_billing(content)
  if not isinstance(content, list):
    return content
  parts = []
  for part in content:
    if isinstance(part, dict) and isinstance(part.get('text'), str):
      text = without_billing(part['text'])
      if text != part['text']:
        part = {**part, 'text': text}
    parts.append(part)
  return parts


def _assistant(message: dict, where: str) -> dict:
  """The message with its reasoning, if any, only in `reasoning_content`."""
  reasonings = [_text(message.get(name), f'{where}.{name}') for name in _TEXTS]
  reasonings += [
    ''.join(_texts(message.get(name), f'{where}.{name}')) for name in _LISTS
  ]
  content = message.get('content')
  if isinstance(content, list):
    thoughts = [part for part in content if _is_thought(part)]
    reasonings.append('\n'.join(_texts(thoughts, f'{where}.content')))
    content = [part for part in content if not _is_thought(part)]
  reasoning = next(filter(None, reasonings), '')
  reasoning, content = _inline(reasoning, content)
  others = (*_TEXTS, *_LISTS, 'content')
  rest = {name: value for name, value in message.items() if name not in others}
  if reasoning:
    rest['reasoning_content'] = reasoning
  return {**rest, 'content': content}


def _inline(reasoning: str, content: Any) -> tuple[str, Any]:
  """Splits `<think>…</think>` off the start of a content.

  If the client gives the reasoning in a field too, only the same text is split off.
  """
  if isinstance(content, list):
    texts = [part.get('text') for part in content if isinstance(part, dict)]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
      return reasoning, content
    inner, text = _inline(reasoning, ''.join(texts))
    unchanged = text == ''.join(texts)
    return inner, content if unchanged else [{'type': 'text', 'text': text}]
  if not isinstance(content, str) or not content.lstrip().startswith(markup.THINK):
    return reasoning, content
  inner, closed, after = content.lstrip().partition(markup.THINK_END)
  inner = inner.removeprefix(markup.THINK).strip('\n')
  if not closed or (reasoning and reasoning.strip() != inner.strip()):
    return reasoning, content
  return reasoning or inner, after.lstrip('\n')


def _is_thought(part: Any) -> bool:
  kind = part.get('type') if isinstance(part, dict) else None
  return isinstance(kind, str) and (kind in _PARTS or kind in _OPAQUE)


def _text(value: Any, where: str) -> str:
  return '' if value is None else fields.text(value, where)


def _texts(parts: Any, where: str) -> Iterable[str]:
  """The texts of a list of thinking parts."""
  if parts is None:
    return
  for i, part in enumerate(fields.listed(parts, where)):
    if not _is_thought(part):
      raise invalid(f'must be an object of type {", ".join(_PARTS)}', f'{where}[{i}]')
    if part['type'] in _PARTS:
      field = _PARTS[part['type']]
      yield _text(part.get(field), f'{where}[{i}].{field}')
