"""Conversations as digests of their messages, for comparison.

Messages are compared by what the template renders. The record of a message is two
digests, one of role, content and calls, one of the reasoning, so that a session stores
32 bytes per message of any size. Call ids are not rendered; they distinguish
completions with the same content.
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
  content = digest(json.dumps(shown).encode())
  return content + (digest(reasoning.encode()) if reasoning else _NO_REASONING)


def call_ids(message: dict) -> bytes:
  """A digest of the ids of a message's tool calls, in order."""
  ids = [call.get('id') for call in message.get('tool_calls') or ()]
  return digest(json.dumps(ids).encode()) if ids else b''


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
    """Claim and content digest of each assistant message, the last first."""
    claims = reversed(self.claims)
    for i in range(len(self.roles) - 1, -1, -1):
      if self.roles[i] == 'a':
        yield next(claims), content_digest(self.records, i)


def content_digest(records: bytes, i: int) -> bytes:
  """Digest of message i without its reasoning."""
  at = i * RECORD_BYTES
  return records[at : at + _DIGEST_BYTES]


def has_reasoning(records: bytes, i: int) -> bool:
  """Whether message i has reasoning."""
  at = i * RECORD_BYTES
  return records[at + _DIGEST_BYTES : at + RECORD_BYTES] != _NO_REASONING


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
    claims=tuple(_claim(messages[i]) for i in answers),
  )


def _claim(message: dict) -> str:
  for call in message.get('tool_calls') or ():
    name = call.get('id')
    match = _CALL_ID.fullmatch(name) if isinstance(name, str) else None
    if match:
      return COMPLETION_PREFIX + match[1]
  return ''
