"""The one internal request that every dialect's JSON body becomes (`dialects`).

Validation is by hand rather than by models: docs/gateway.md has the measured reasons.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from m2jax.gateway import formats
from m2jax.gateway import hints as hints_lib
from m2jax.gateway import history as history_lib
from m2jax.gateway import messages as messages_lib
from m2jax.gateway.errors import ContextTooLong, invalid
from m2jax.text import chat

# Created once: json.dumps with options creates an encoder on every call.
dumps = json.JSONEncoder(ensure_ascii=False).encode

# Minimum bytes that the template renders per message, call, argument or tool.
_PART_BYTES = len('<tool></tool>')

# Edits of its context that an agent can declare: such a request begins a branch with
# that cause, and reasoning that it leaves out stays out.
CONTEXT_EDITS = ('drop_results', 'drop_thinking', 'window', 'summarise', 'restart')


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """A checked request, without the text of its messages.

  Attributes:
    model: the requested model.
    history: digests of its messages.
    tools: OpenAI tool dicts, or None if there are none.
    tools_digest: equal iff the prompt's tools are; b'' without tools.
    max_tokens: requested response limit, or None.
    sampling: the sampling fields that are present and not null, as sent.
    stream, include_usage, logprobs, top_logprobs: as OpenAI defines them.
    n: number of completions.
    stop: strings that end the response when its content has one of them.
    format: the response's format, if it is not free.
    context_edit: how the agent says that it has edited the messages, one of
      CONTEXT_EDITS, or None.
    hints: what the client says of the request.
    ignored: names of fields accepted without effect that are worth counting.
    echo: what the dialect needs of the body to write the response.
  """

  model: str
  history: history_lib.History
  tools: list[dict] | None
  tools_digest: bytes
  max_tokens: int | None
  sampling: dict[str, Any]
  stream: bool
  include_usage: bool = False
  logprobs: bool = False
  top_logprobs: int = 0
  n: int = 1
  stop: tuple[str, ...] = ()
  format: formats.Format | None = None
  context_edit: str | None = None
  hints: hints_lib.Hints = hints_lib.Hints()
  ignored: tuple[str, ...] = ()
  echo: dict[str, Any] = dataclasses.field(default_factory=dict)


# A request and its messages: OpenAI dicts as for `text.chat`, with 'developer' replaced
# by 'system' and the arguments of calls as objects.
Parsed = tuple[ChatRequest, list[dict]]


def parsed(
  messages: list[dict],
  tools: list[dict] | None,
  *,
  complete: bool = True,
  **fields: Any,
) -> Parsed:
  """The request of checked messages and tools; `fields` are ChatRequest's others.

  `complete`: see `chat.in_call_order`.

  Raises:
    ApiError: 400, a result of no call or a call without one (`chat.in_call_order`).
  """
  try:
    messages = chat.in_call_order(messages, complete=complete)
  except chat.ChatError as error:
    raise invalid(str(error), None) from None
  request = ChatRequest(
    history=history_lib.of(messages),
    tools=tools,
    tools_digest=messages_lib.tools_digest(tools),
    **fields,
  )
  return request, messages


def check_count(
  messages: list[dict],
  request: ChatRequest,
  context_tokens: int,
  longest_token_bytes: int,
) -> None:
  """Rejects more messages, calls, arguments and tools than fit into the context.

  The template renders at least _PART_BYTES for each, so that no text is inspected.

  Raises:
    ApiError: 400.
  """
  parts = len(messages) + len(request.tools or ())
  for message in messages:
    content = message['content']
    parts += len(content) if isinstance(content, list) else 0
    for call in message.get('tool_calls', ()):
      parts += 1 + len(call['function']['arguments'])
  if parts * _PART_BYTES > context_tokens * longest_token_bytes:
    raise ContextTooLong(
      f'the request has {parts} messages, tools, calls and arguments', context_tokens
    )
