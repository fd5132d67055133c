"""Prompt ids of messages, from recorded ids or from the template.

This module implements law 4. A prompt either starts with the recorded ids of a
completion, prompt and response, or is the full encoding of its messages, with a reason.

`plan` decides which, by digests; `encode` then encodes the new part in the process that
has the messages: this one or a reader.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from m2jax.gateway import history as history_lib
from m2jax.gateway import nodes, protocol, sessions
from m2jax.gateway.errors import ContextTooLong, invalid
from m2jax.records import Completion
from m2jax.text import chat, markup
from m2jax.text import tokenizer as tokenizer_lib

# Closes a response that the engine ended, not the model.
_CLOSING = chat.Segment(markup.EOS, special=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
  """The part of a request to encode.

  Attributes:
    after: index of the assistant message whose recorded ids precede it; −1 for the
      whole prompt.
    closing: start with an end-of-message token.
    known_tokens: number of recorded ids before it.
    context_tokens: size of the engine's context.
    reasoning: (message index, reasoning) of messages that the client sent without it.
  """

  after: int
  closing: bool
  known_tokens: int
  context_tokens: int
  reasoning: tuple[tuple[int, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
  """The source of a request's prompt.

  Attributes:
    parent: the completion that it extends, or None.
    follows: id of the completion of the last answer in its messages, or None.
    fork_reason: a key of forks.REASONS if there is no parent, else None.
    part: the part to encode.
    history: the request's history, with restored reasoning.
    restored: number of messages with restored reasoning that the parent did not have.
    repeated: whether the same request has been recorded before.
    compacted: whether it is the first after the client compacted its context.
  """

  parent: nodes.Node | None
  follows: str | None
  fork_reason: str | None
  part: Part
  history: history_lib.History
  restored: int
  repeated: bool
  compacted: bool = False

  @property
  def closed_by_gateway(self) -> bool:
    """Whether the end-of-message token after the parent's response is the gateway's.

    This is the case if the response was truncated by its length.
    """
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
  ) -> nodes.Node:
    """The node of the completion in its session.

    Args:
      message: the OpenAI message that the client received.
      closed: whether the response ends with the end-of-message token.
    """
    known = self.part.known_tokens
    return nodes.Node(
      completion.id,
      self.parent,
      request.tools_digest,
      self.history,
      np.concatenate([completion.prompt_ids[known:], completion.response_ids]),
      history_lib.answer(message),
      response_tokens=len(completion.response_ids),
      closed=closed,
      agent=request.hints.agent,
      window=request.hints.window,
    )


def plan(
  session: sessions.Session,
  request: protocol.ChatRequest,
  tokenizer: tokenizer_lib.Tokenizer,
  context_tokens: int,
  *,
  restore: bool = True,
  untrained: Collection[str] = ('auxiliary', 'compaction'),
) -> Plan:
  """Finds the completion that a request extends, or why it forks. No side effects.

  Args:
    restore: whether reasoning that the client dropped is restored; never where the
      client says that it has edited its context.
    untrained: classes of requests that are not part of the task.
  """
  history, tools, hints = request.history, request.tools_digest, request.hints
  if hints.request_class in untrained:
    part = Part(-1, False, 0, context_tokens)
    return Plan(None, None, hints.request_class, part, history, 0, False)
  compacted = hints.compacted
  if hints.window and not session.has_window(hints.window):
    compacted = True
  edited = request.context_edit is not None or compacted
  restored: dict[int, nodes.Node] = {}
  if restore and not edited:
    history, restored = session.restored(history)
  repeated = session.is_repeated(tools, history)
  node = session.find(tools, history)
  if node is not None and history.keeps_prefix:
    part = Part(history.last, not node.closed, node.tokens, context_tokens)
    new = sum(i >= node.messages - 1 for i in restored)
    return Plan(node, node.id, None, part, history, new, repeated, compacted)
  reason = 'thinking_closed' if node else session.fork_reason(tools, history)
  if edited and reason != 'first':
    reason = 'context_edited'
  elif reason == 'new_conversation' and hints.request_class == 'subagent':
    reason = 'sub_agent'
  elif reason != 'first' and hints.agent and not session.has_agent(hints.agent):
    reason = 'sub_agent'
  follows = node.id if node else session.follows(history)
  last_user = history.roles.rfind('u')  # the template omits reasoning before it
  texts = tuple(
    (i, _reasoning(source, tokenizer))
    for i, source in restored.items()
    if i > last_user
  )
  part = Part(-1, False, 0, context_tokens, texts)
  count = len(restored)
  return Plan(None, follows, reason, part, history, count, repeated, compacted)


def _reasoning(node: nodes.Node, tokenizer: tokenizer_lib.Tokenizer) -> str:
  """The reasoning of a recorded response, which sessions store as ids only."""
  pieces = tokenizer_lib.pieces(tokenizer, node.response_ids.tolist())
  return chat.parse(pieces).reasoning


def encode(
  messages: Sequence[dict],
  tools: Sequence[dict] | None,
  part: Part,
  tokenizer: tokenizer_lib.Tokenizer,
  template: chat.Template = chat.DEFAULT,
) -> np.ndarray:
  """Encodes a part of a request.

  Raises:
    ApiError: 400, the template cannot express the messages, or a lower bound from
      their bytes shows before encoding that the context is too short.
  """
  if part.reasoning:
    messages = list(messages)
    for i, reasoning in part.reasoning:
      messages[i] = {**messages[i], 'reasoning_content': reasoning}
  try:
    if part.after < 0:
      pieces = chat.segments(messages, tools, True, template=template)
    else:
      pieces = chat.continuation(messages, part.after, template=template)
  except chat.ChatError as error:
    raise invalid(str(error), None) from error
  if part.closing:
    pieces = [_CLOSING, *pieces]
  text = ''.join(piece.text for piece in pieces if not piece.special)
  special = sum(piece.special for piece in pieces)
  fewest = part.known_tokens + special + tokenizer.fewest_tokens(text)
  if fewest >= part.context_tokens:
    raise ContextTooLong(
      f'your messages have at least {fewest} tokens', part.context_tokens, fewest
    )
  return np.asarray(tokenizer_lib.encode_chat(tokenizer, pieces).ids, np.int32)
