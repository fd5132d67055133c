"""A conversation in comparable form: digests of its messages in place of their text.

Messages are compared by what the template shows of them. A message becomes a record of
two digests, one of role, content and calls, one of the reasoning, so that a session
keeps 32 bytes a message whatever the message holds. Call ids are not shown; they decide
between completions that said the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Sequence

import numpy as np

from m2jax.text import chat

_DIGEST_BYTES = 16
RECORD_BYTES = 2 * _DIGEST_BYTES
_NO_REASONING = bytes(_DIGEST_BYTES)
_CALL_ID = re.compile(r'call_([0-9a-f]{32})_[0-9]+')

COMPLETION_PREFIX = 'chatcmpl-'


def digest(*parts: bytes) -> bytes:
  """16 bytes that no other parts give."""
  return hashlib.blake2b(b''.join(parts), digest_size=_DIGEST_BYTES).digest()


def record(message: dict) -> bytes:
  """A message's record; None, '' and absence are the same.

  Args:
    message: an OpenAI dict in the form `text.chat` takes.
  """
  content = message.get('content') or ''
  if isinstance(content, list):
    content = [part['text'] for part in content]
  shown = [message['role'], content]
  reasoning = ''
  if message['role'] == 'assistant':
    reasoning = message.get('reasoning_content') or ''
    for call in message.get('tool_calls') or ():
      function = call['function']
      arguments = function['arguments']
      if isinstance(arguments, str):
        arguments = json.loads(arguments)
      shown += function['name'], arguments
  said = digest(json.dumps(shown).encode())
  return said + (digest(reasoning.encode()) if reasoning else _NO_REASONING)


def call_ids(message: dict) -> bytes:
  """A digest of the ids of a message's tool calls, in order."""
  ids = [call.get('id') for call in message.get('tool_calls') or ()]
  return digest(json.dumps(ids).encode()) if ids else b''


@dataclasses.dataclass(frozen=True, slots=True)
class History:
  """A request's messages.

  Attributes:
    records: RECORD_BYTES for each message, in order.
    roles: the first letter of each message's role.
    last: index of the last assistant message, or −1.
    last_calls: `call_ids` of that message.
    keeps_prefix: the template writes the messages up to `last` as it wrote them for the
      completion that answered with `last` (`chat.keeps_prefix`).
    claims: for each assistant message the id of the completion that its call ids name,
      or ''.
  """

  records: bytes
  roles: str
  last: int
  last_calls: bytes
  keeps_prefix: bool
  claims: tuple[str, ...]

  def __len__(self) -> int:
    return len(self.roles)

  def answers(self) -> Iterator[tuple[str, bytes]]:
    """Claim and digest of each assistant message, the last first."""
    claims = reversed(self.claims)
    for i in range(len(self.roles) - 1, -1, -1):
      if self.roles[i] == 'a':
        yield next(claims), said(self.records, i)


def said(records: bytes, i: int) -> bytes:
  """Digest of message i without its reasoning."""
  at = i * RECORD_BYTES
  return records[at : at + _DIGEST_BYTES]


def has_reasoning(records: bytes, i: int) -> bool:
  """Whether message i came with reasoning."""
  at = i * RECORD_BYTES
  return records[at + _DIGEST_BYTES : at + RECORD_BYTES] != _NO_REASONING


def common(a: bytes, b: bytes) -> int:
  """The number of first messages that two conversations share."""
  size = min(len(a), len(b))
  if a[:size] == b[:size]:
    return size // RECORD_BYTES
  words = [np.frombuffer(x, np.uint64, size // 8).reshape(-1, 4) for x in (a, b)]
  return int(np.argmax((words[0] != words[1]).any(axis=1)))


def of(messages: Sequence[dict]) -> History:
  """The comparable form of a request's checked messages."""
  said_by = [i for i, m in enumerate(messages) if m['role'] == 'assistant']
  last = said_by[-1] if said_by else -1
  return History(
    records=b''.join(map(record, messages)),
    roles=''.join(message['role'][0] for message in messages),
    last=last,
    last_calls=call_ids(messages[last]) if said_by else b'',
    keeps_prefix=bool(said_by) and chat.keeps_prefix(messages, last),
    claims=tuple(_claim(messages[i]) for i in said_by),
  )


def _claim(message: dict) -> str:
  for call in message.get('tool_calls') or ():
    name = call.get('id')
    match = _CALL_ID.fullmatch(name) if isinstance(name, str) else None
    if match:
      return COMPLETION_PREFIX + match[1]
  return ''
