"""Conversations as digests of their messages, for comparison.

Messages are compared by their content: what the template renders, except that white
space around an assistant's text, the order of a call's arguments and spellings of the
same JSON value make no difference, because clients change them and the recorded ids
replace them anyway. The record of a message is two digests, one of role, content and
calls, one of the reasoning, so that a session stores 32 bytes per message of any size.
Call ids are not rendered; they distinguish completions with the same content.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from m2jax.records import completion_named
from m2jax.text import chat

_DIGEST_BYTES = 16
RECORD_BYTES = 2 * _DIGEST_BYTES
_NO_REASONING = bytes(_DIGEST_BYTES)


def digest(*parts: bytes) -> bytes:
  """A digest of 16 bytes of the concatenated parts."""
  return hashlib.blake2b(b''.join(parts), digest_size=_DIGEST_BYTES).digest()


def record(message: dict) -> bytes:
  """The record of a message; None, '' and absence are equivalent.

  Args:
    message: an OpenAI dict as for `text.chat`.
  """
  content = message.get('content') or ''
  if isinstance(content, list):
    content = [part['text'] for part in content]
  reasoning = ''
  if message['role'] == 'assistant':
    content = content.strip()
    reasoning = (message.get('reasoning_content') or '').strip()
  return _content(message, content) + reasoning_digest(reasoning)


def reasoning_digest(reasoning: str) -> bytes:
  """The second half of a record."""
  return digest(reasoning.encode()) if reasoning else _NO_REASONING


def words(message: dict) -> bytes:
  """A digest of an assistant message's text and calls that ignores white space."""
  content = message.get('content') or ''
  return _content(message, ''.join(content.split()))


def _content(message: dict, content: str | list[str]) -> bytes:
  shown = [message['role'], content]
  if message['role'] == 'assistant':
    for call in message.get('tool_calls') or ():
      function = call['function']
      arguments = function['arguments']
      if isinstance(arguments, str):
        arguments = json.loads(arguments)
      shown += function['name'], _canonical(arguments)
  return digest(json.dumps(shown, sort_keys=True).encode())


def _canonical(value: Any) -> Any:
  """JSON with 1.0 as 1, which JavaScript clients cannot tell apart."""
  if isinstance(value, dict):
    return {key: _canonical(item) for key, item in value.items()}
  if isinstance(value, list):
    return [_canonical(item) for item in value]
  return int(value) if isinstance(value, float) and value.is_integer() else value


def call_ids(message: dict) -> bytes:
  """A digest of the ids of a message's tool calls, in order."""
  ids = [call.get('id') for call in message.get('tool_calls') or ()]
  return digest(json.dumps(ids).encode()) if ids else b''


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
  """Digests of an assistant message: its `record`, `call_ids` and `words`."""

  record: bytes
  call_ids: bytes
  words: bytes


def answer(message: dict) -> Answer:
  """The digests of a completion's message, as the client receives it."""
  return Answer(record(message), call_ids(message), words(message))


@dataclasses.dataclass(frozen=True, slots=True)
class History:
  """The messages of a request.

  Attributes:
    records: RECORD_BYTES per message, in order.
    roles: the first letter of each message's role.
    last: index of the last assistant message, or −1.
    last_calls: `call_ids` of that message.
    keeps_prefix: whether the template renders the messages up to `last` as it did for
      the completion that returned `last` (`chat.keeps_prefix`).
    claims: per assistant message, the id of the completion in its call ids, or ''.
    words: `words` of each assistant message.
  """

  records: bytes
  roles: str
  last: int
  last_calls: bytes
  keeps_prefix: bool
  claims: tuple[str, ...]
  words: tuple[bytes, ...]

  def __len__(self) -> int:
    return len(self.roles)

  def words_at(self, i: int) -> bytes:
    """`words` of assistant message i."""
    return self.words[self.roles.count('a', 0, i)]

  def answers(self) -> Iterator[tuple[str, bytes]]:
    """Claim and content digest of each assistant message, the last first."""
    claims = reversed(self.claims)
    for i in range(len(self.roles) - 1, -1, -1):
      if self.roles[i] == 'a':
        yield next(claims), content_digest(self.records, i)


def content_digest(records: bytes, i: int) -> bytes:
  """Digest of message i without its reasoning."""
  at = i * RECORD_BYTES
  return records[at : at + _DIGEST_BYTES]


def reasoning_of(records: bytes, i: int) -> bytes:
  """Digest of message i's reasoning."""
  at = i * RECORD_BYTES
  return records[at + _DIGEST_BYTES : at + RECORD_BYTES]


def answer_key(records: bytes, i: int) -> bytes:
  """A digest of the records before message i and of its content."""
  return digest(records[: i * RECORD_BYTES + _DIGEST_BYTES])


def has_reasoning(records: bytes, i: int) -> bool:
  """Whether message i has reasoning."""
  return reasoning_of(records, i) != _NO_REASONING


def with_reasoning(
  history: History, find: Callable[[str, bytes], bytes | None]
) -> tuple[History, list[int]]:
  """A history with reasoning for assistant messages that have none.

  Takes time linear in the messages; if all have reasoning, almost none.

  Args:
    find: the digest of the reasoning of a message, from its claim and its `answer_key`
      in the result, or None.

  Returns:
    The history, and the indices of the messages that were changed.
  """
  parts, changed = [], []
  hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
  claims, start = iter(history.claims), 0
  for i, role in enumerate(history.roles):
    claim = next(claims) if role == 'a' else ''
    if role != 'a' or has_reasoning(history.records, i):
      continue
    at = i * RECORD_BYTES + _DIGEST_BYTES
    known = history.records[start:at]
    hasher.update(known)
    reasoning = find(claim, hasher.digest()) or _NO_REASONING
    if reasoning != _NO_REASONING:
      changed.append(i)
    hasher.update(reasoning)
    parts += known, reasoning
    start = at + _DIGEST_BYTES
  if not changed:
    return history, changed
  records = b''.join([*parts, history.records[start:]])
  return dataclasses.replace(history, records=records), changed


def common(a: bytes, b: bytes) -> int:
  """The number of leading messages that two conversations share."""
  size = min(len(a), len(b))
  if a[:size] == b[:size]:
    return size // RECORD_BYTES
  words = [np.frombuffer(x, np.uint64, size // 8).reshape(-1, 4) for x in (a, b)]
  return int(np.argmax((words[0] != words[1]).any(axis=1)))


def of(messages: Sequence[dict]) -> History:
  """The history of a request's checked messages."""
  answers = [i for i, m in enumerate(messages) if m['role'] == 'assistant']
  last = answers[-1] if answers else -1
  return History(
    records=b''.join(map(record, messages)),
    roles=''.join(message['role'][0] for message in messages),
    last=last,
    last_calls=call_ids(messages[last]) if answers else b'',
    keeps_prefix=bool(answers) and chat.keeps_prefix(messages, last),
    claims=tuple(completion_named(messages[i]) for i in answers),
    words=tuple(words(messages[i]) for i in answers),
  )
