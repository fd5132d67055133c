"""From messages to prompt ids: recorded ids where they hold, the template elsewhere.

The one place where law 4 is decided. A prompt either starts with the recorded ids of a
completion, prompt and response, or is the full encoding of its messages with the reason
why. Nothing in between exists.

`plan` decides, from digests; `encode` then encodes what is new, where the messages are:
in this process or in a reader's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from m2jax.gateway import history as history_lib
from m2jax.gateway import protocol, sessions
from m2jax.gateway.errors import invalid
from m2jax.records import Completion
from m2jax.text import chat, markup
from m2jax.text import tokenizer as tokenizer_lib

# Follows a response that the engine ended before the model did.
_CLOSING = chat.Segment(markup.EOS, special=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
  """What of a request has to be encoded.

  Attributes:
    after: index of the assistant message whose recorded ids come before it; −1: none,
      the whole prompt.
    closing: begin with an end-of-message token.
    known_tokens: number of recorded ids before it.
    context_tokens: what the engine's context holds.
  """

  after: int
  closing: bool
  known_tokens: int
  context_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
  """Where a request's prompt comes from.

  Attributes:
    parent: the completion that it extends, or None.
    follows: id of the completion whose answer its messages show last, or None.
    fork_reason: a key of sessions.FORK_REASONS where there is no parent, else None.
    part: what is to be encoded.
  """

  parent: sessions.Node | None
  follows: str | None
  fork_reason: str | None
  part: Part

  @property
  def closed_by_gateway(self) -> bool:
    """The parent's response was cut off (by length), so the end-of-message token after
    it is the gateway's, not the model's."""
    return self.part.closing

  def prompt_ids(self, encoded: np.ndarray) -> np.ndarray:
    """The whole prompt from the encoded part, int32."""
    return np.concatenate([self.parent.ids(), encoded]) if self.parent else encoded

  def node(
    self,
    request: protocol.ChatRequest,
    completion: Completion,
    message: dict,
    *,
    closed: bool,
  ) -> sessions.Node:
    """What the session keeps of the completion.

    Args:
      message: what the client was given, as an OpenAI dict.
      closed: the response ends with the end-of-message token.
    """
    history = request.history
    known = self.part.known_tokens
    return sessions.Node(
      completion.id,
      self.parent,
      request.tools_digest,
      (history.records + history_lib.record(message), history.roles + 'a'),
      np.concatenate([completion.prompt_ids[known:], completion.response_ids]),
      call_ids=history_lib.call_ids(message),
      closed=closed,
    )


def plan(
  session: sessions.Session, request: protocol.ChatRequest, context_tokens: int
) -> Plan:
  """Finds what a request extends, or why it forks; changes nothing."""
  history, tools = request.history, request.tools_digest
  node = session.find(tools, history)
  if node is not None and history.keeps_prefix:
    part = Part(history.last, not node.closed, node.tokens, context_tokens)
    return Plan(node, node.id, None, part)
  reason = 'thinking_closed' if node else session.fork_reason(tools, history)
  follows = node.id if node else session.follows(history)
  return Plan(None, follows, reason, Part(-1, False, 0, context_tokens))


def encode(
  messages: Sequence[dict],
  tools: Sequence[dict] | None,
  part: Part,
  tokenizer: tokenizer_lib.Tokenizer,
) -> np.ndarray:
  """Encodes a part of a request.

  Raises:
    ApiError: 400, the template cannot express the messages; or their bytes alone take
      more tokens than the context has left, found before anything is encoded.
  """
  try:
    if part.after < 0:
      pieces = chat.segments(messages, tools, add_generation_prompt=True)
    else:
      pieces = chat.continuation(messages, part.after)
  except chat.ChatError as error:
    raise invalid(str(error), None) from error
  if part.closing:
    pieces = [_CLOSING, *pieces]
  text = ''.join(piece.text for piece in pieces if not piece.special)
  special = sum(piece.special for piece in pieces)
  fewest = part.known_tokens + special + tokenizer.fewest_tokens(text)
  if fewest >= part.context_tokens:
    raise protocol.too_long(
      f'the prompt has at least {fewest} tokens', part.context_tokens
    )
  return np.asarray(tokenizer_lib.encode_chat(tokenizer, pieces).ids, np.int32)
