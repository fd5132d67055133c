"""From messages to prompt ids: recorded ids where they hold, the template elsewhere.

The one place where law 4 is decided. A prompt either starts with the recorded ids of a
completion, prompt and response, or is the full encoding of its messages with the reason
why. Nothing in between exists.
"""

from __future__ import annotations

import dataclasses

from m2jax.gateway import protocol, sessions
from m2jax.gateway.errors import invalid
from m2jax.records import Completion
from m2jax.text import chat, markup
from m2jax.text import tokenizer as tokenizer_lib

# Follows a response that the engine ended before the model did.
_CLOSING = chat.Segment(markup.EOS, special=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
  """A request's prompt and where it comes from.

  Attributes:
    ids: token ids to feed.
    parent: id of the completion that `ids` extends, or None.
    fork_reason: a key of sessions.FORK_REASONS where there is no parent, else None.
    continues: where there is no parent, id of the completion that the request goes on
      from and whose ids the template does not keep, else None.
    closed_by_gateway: the parent's response was cut off (by length), so the
      end-of-message token after it is the gateway's, not the model's.
    tools, history: the request in comparable form (sessions.Node).
  """

  ids: tuple[int, ...]
  parent: str | None
  fork_reason: str | None
  continues: str | None
  closed_by_gateway: bool
  tools: str
  history: tuple[sessions.Shown, ...]

  def node(
    self, completion: Completion, message: dict, *, closed: bool
  ) -> sessions.Node:
    """The tree's node of this prompt's completion.

    Args:
      message: what the client was given, as an OpenAI dict.
      closed: the response ends with the end-of-message token.
    """
    return sessions.Node(
      id=completion.id,
      tools=self.tools,
      history=(*self.history, sessions.shown(message)),
      call_ids=sessions.call_ids(message),
      ids=completion.prompt_ids + completion.response_ids,
      closed=closed,
    )


def build(
  session: sessions.Session,
  request: protocol.ChatRequest,
  tokenizer: tokenizer_lib.Tokenizer,
) -> Prompt:
  """The prompt of a request.

  Args:
    session: searched for a completion to extend; not changed.

  Raises:
    ApiError: 400, the template cannot express the messages.
  """
  messages = request.messages
  history = tuple(map(sessions.shown, messages))
  parent, fork_reason, closing = None, None, ()
  try:
    node = _recorded(session, messages, request.tools_json, history)
    if node is None:
      fork_reason = session.fork_reason(request.tools_json, history)
    else:
      # Sharing the recorded strings keeps a session's memory linear in its text.
      history = node.history + history[len(node.history) :]
      last = len(node.history) - 1
      if chat.keeps_prefix(messages, last):
        parent = node
        closing = () if node.closed else (_CLOSING,)
        pieces = [*closing, *chat.continuation(messages, last)]
      else:
        fork_reason = 'thinking_closed'
    if parent is None:
      pieces = chat.segments(messages, request.tools, add_generation_prompt=True)
  except chat.ChatError as error:
    raise invalid(str(error), None) from error
  ids = tuple(tokenizer_lib.encode_chat(tokenizer, pieces).ids)
  return Prompt(
    ids=parent.ids + ids if parent else ids,
    parent=parent.id if parent else None,
    fork_reason=fork_reason,
    continues=node.id if node and not parent else None,
    closed_by_gateway=bool(closing),
    tools=request.tools_json,
    history=history,
  )


def _recorded(
  session: sessions.Session,
  messages: list[dict],
  tools: str,
  history: tuple[sessions.Shown, ...],
) -> sessions.Node | None:
  """The completion that the request's last assistant message came from."""
  for last in range(len(messages) - 1, -1, -1):
    if messages[last]['role'] == 'assistant':
      ids = sessions.call_ids(messages[last])
      return session.find(tools, history[: last + 1], ids)
  return None
