"""Records of a completion in progress."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable

import numpy as np

from m2jax.gateway import prompts, protocol, sessions
from m2jax.records import CALL_PREFIX, COMPLETION_PREFIX, Completion
from m2jax.rollout.api import Handle
from m2jax.text import chat

# Gets every finished completion. A future that it returns is done when the record is
# durable; the response waits for it.
Record = Callable[[Completion], concurrent.futures.Future | None]


@dataclasses.dataclass(frozen=True)
class Pending:
  """A completion in the engine; `number` is `Completion.request`."""

  id: str
  session: sessions.Session
  request: protocol.ChatRequest
  plan: prompts.Plan
  prompt_ids: np.ndarray
  overrides: tuple[str, ...]
  handle: Handle
  number: int
  started_s: float
  template_version: str = 'm2'

  @property
  def call_prefix(self) -> str:
    """Prefix of the ids of its tool calls; unique to the completion."""
    return CALL_PREFIX + self.id.removeprefix(COMPLETION_PREFIX)


@dataclasses.dataclass(frozen=True)
class Answer:
  """A recorded completion and the response to the client.

  Attributes:
    message: the OpenAI message.
    deltas: the same in the order in which it was sampled, texts joined; chat
      completions have no such order.
    stop: the stop string that ended the response, or None.
    top: if top_logprobs were requested, GenerateResult's top_ids and top_logprobs.
    cached_tokens: cached tokens of the prompt, as in GenerateResult.
  """

  request: protocol.ChatRequest
  completion: Completion
  message: dict
  deltas: tuple[chat.Delta, ...]
  stop: str | None = None
  top: tuple[np.ndarray, ...] = ()
  cached_tokens: int | None = None
