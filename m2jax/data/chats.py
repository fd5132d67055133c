"""Demonstrations as chats: JSON lines of OpenAI messages, and what SFT trains of them.

On disk one chat is one line, `{"messages": […], "tools": […]}`; `tools` may be left
out, other keys are ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from absl import logging

from m2jax.data import demos
from m2jax.forest import Sample
from m2jax.text import chat, tokenizer


class Chat(NamedTuple):
  """A whole conversation.

  Attributes:
    name: for error messages.
    messages, tools: OpenAI dicts.
  """

  name: str
  messages: Sequence[Mapping[str, Any]]
  tools: Sequence[Mapping[str, Any]] = ()

  def text(self) -> str:
    """As the template writes it."""
    return chat.render(self.messages, self.tools)


def with_system(messages: Iterable[Mapping[str, Any]], system: str | None) -> list:
  """The messages under a system prompt, unless None or they bring one."""
  messages = list(messages)
  own = messages and messages[0].get('role') in ('system', 'developer')
  if system is None or own:
    return messages
  return [{'role': 'system', 'content': system}, *messages]


def read(
  path: str | os.PathLike,
  *,
  system: str | None = None,
  tools: Sequence[Mapping[str, Any]] = (),
) -> list[Chat]:
  """Reads chats.

  Args:
    path: of the JSON lines.
    system, tools: for chats that bring none.

  Raises:
    FileNotFoundError: no such file.
    ValueError: a line is no chat that trains something; names it. Or there is none.
  """
  chats = []
  with open(path, encoding='utf-8') as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      where = f'{os.fspath(path)}, line {number}'
      try:
        record = json.loads(line)
        found = Chat(
          where, with_system(record['messages'], system), record.get('tools') or tools
        )
        owned = any(piece.owned for piece in chat.segments(found.messages, found.tools))
      except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f'{where}: not a chat: {error!r}') from error
      if not owned:
        raise ValueError(f'{where}: no assistant message to learn from')
      chats.append(found)
  if not chats:
    raise ValueError(f'{os.fspath(path)} holds no chats')
  return chats


def encode(
  chats: Iterable[Chat], tok: tokenizer.Tokenizer, max_tokens: int
) -> list[Sample]:
  """Chats as samples: what the assistant wrote is trained, the rest is read.

  Chats of more than `max_tokens` are left out with a warning.

  Raises:
    ValueError: none is left, or a chat has no assistant message.
  """
  chats, samples = list(chats), []
  for found in chats:
    pieces = chat.segments(found.messages, found.tools)
    ids, owned = tokenizer.encode_chat(tok, pieces)
    if not any(owned):
      raise ValueError(f'{found.name}: no assistant message to learn from')
    length = max(i for i, mine in enumerate(owned) if mine) + 1
    if length > max_tokens:
      logging.warning(
        '%s has %d tokens, more than %d: left out', found.name, length, max_tokens
      )
      continue
    samples.append(demos.sample(ids[:length], owned[:length]))
  if not samples:
    raise ValueError(
      f'none of {len(chats)} demonstrations has at most {max_tokens} tokens'
    )
  return samples
