"""A recorded completion in the forest of its session (`sessions`)."""

from __future__ import annotations

import numpy as np

from m2jax.gateway import history as history_lib
from m2jax.gateway.history import History

# Approximate size of a completion's objects and table entries, besides its data.
_COMPLETION_BYTES = 1000


def name_digest(name: str) -> bytes:
  """What replaces an id that a client gives; b'' if it gives none."""
  return history_lib.digest(name.encode()) if name else b''


class Node:
  """A recorded completion, which later requests may extend.

  Attributes:
    id: the completion's id.
    parent: the completion that it extends, or None.
    tools: digest of the request's tools.
    agent, window: digests of the ids of the sub-agent that asked and of its context
      window (`hints`), or b''.
    answer: digests of its message.
    response_tokens: length of the response.
    closed: whether the response ends with the end-of-message token.
    records, roles: records and roles of the messages after the parent's, ending with
      the answer (`History`).
    new_ids: token ids of prompt and response after the parent's.
    messages, tokens: length of the whole conversation.
    key: key that completions with the same messages and answer share, whatever the
      answer's reasoning and the tools.
    prompt: digest of tools and messages without the answer.
  """

  __slots__ = (
    'agent', 'answer', 'closed', 'id', 'key', 'messages', 'new_ids', 'parent', 'prompt',
    'records', 'response_tokens', 'roles', 'tokens', 'tools', 'window',
  )  # fmt: skip

  def __init__(
    self,
    completion_id: str,
    parent: Node | None,
    tools: bytes,
    history: History,
    new_ids: np.ndarray,
    answer: history_lib.Answer,
    *,
    response_tokens: int,
    closed: bool,
    agent: str = '',
    window: str = '',
  ):
    """Stores what `history`, the messages of the request, adds to the parent's."""
    records, roles = history.records + answer.record, history.roles + 'a'
    start = parent.messages if parent else 0
    self.id, self.parent, self.tools = completion_id, parent, tools
    self.answer, self.closed = answer, closed
    self.response_tokens = response_tokens
    self.agent, self.window = name_digest(agent), name_digest(window)
    self.records = records[start * history_lib.RECORD_BYTES :]
    self.roles = roles[start:]
    self.new_ids = new_ids
    self.messages = len(roles)
    self.tokens = len(new_ids) + (parent.tokens if parent else 0)
    self.key = history_lib.answer_key(records, len(roles) - 1)
    self.prompt = history_lib.digest(tools, history.records)

  def ids(self) -> np.ndarray:
    """Token ids of prompt and response, int32."""
    parts, node = [], self
    while node is not None:
      parts.append(node.new_ids)
      node = node.parent
    return np.concatenate(parts[::-1])

  @property
  def response_ids(self) -> np.ndarray:
    """Token ids of the response, int32."""
    return self.new_ids[len(self.new_ids) - self.response_tokens :]

  @property
  def reasoning(self) -> bytes:
    """Digest of the answer's reasoning."""
    return history_lib.reasoning_of(self.answer.record, 0)

  @property
  def has_reasoning(self) -> bool:
    """Whether the answer has reasoning."""
    return history_lib.has_reasoning(self.answer.record, 0)

  @property
  def size_bytes(self) -> int:
    """Approximate size in memory."""
    return 4 * len(self.new_ids) + len(self.records) + len(self.roles) + (
      _COMPLETION_BYTES
    )  # fmt: skip
