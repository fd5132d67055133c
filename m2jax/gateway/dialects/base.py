"""What a dialect is: one wire format of requests, answers, streams and errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from m2jax.gateway.deltas import Deltas
from m2jax.gateway.errors import ApiError
from m2jax.gateway.exchange import Answer, Pending
from m2jax.gateway.protocol import ChatRequest, Parsed, dumps
from m2jax.rollout.api import NewTokens
from m2jax.text import chat
from m2jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Dialect:
  """A wire format of requests and errors.

  Attributes:
    name: the dialect's name.
    path: where requests are posted.
    schema: that of the model's name → that of a body, for the OpenAPI document.
    parse: a body's object → the request and its messages. Raises ApiError, which
      names the field.
    error: an error → the response's object.
  """

  name: str
  path: str
  schema: Callable[[dict], dict]
  parse: Callable[[dict], Parsed]
  error: Callable[[ApiError], dict]


@dataclasses.dataclass(frozen=True)
class Completing(Dialect):
  """A dialect of conversations that the model continues.

  Attributes:
    body: the answers to a request, `n` of them, tokenizer → the response's object.
    stream: pending answers, tokenizer → the response's events.
    refuse: an error of a request that asks for a stream → the events of a response
      with status 200, or None for a response with the error's status.
  """

  body: Callable[[Sequence[Answer], Tokenizer], dict]
  stream: Callable[[Sequence[Pending], Tokenizer], Stream]
  refuse: Callable[[ApiError, ChatRequest], list[str] | None] = lambda *_: None


@dataclasses.dataclass(frozen=True)
class Counting(Dialect):
  """A dialect of questions for the tokens of a prompt.

  Attributes:
    body: the request, the prompt's ids, the engine's context in tokens, tokenizer →
      the response's object.
  """

  body: Callable[[ChatRequest, np.ndarray, int, Tokenizer], dict]


class Stream:
  """Server-sent events of a response; each method returns texts to send.

  Attributes:
    deltas: the parsed response of each choice.
  """

  def __init__(self, pendings: Sequence[Pending], tokenizer: Tokenizer):
    self._pendings = pendings
    self.deltas = [
      Deltas(tokenizer, each.request.tools, each.request.stop, each.template_version)
      for each in pendings
    ]

  def begin(self) -> list[str]:
    """The events before the first token."""
    return []

  def feed(self, choice: int, tokens: NewTokens) -> list[str]:
    """Events of new tokens; none as long as they may be markup."""
    deltas = self.deltas[choice]
    before = deltas.tokens
    new = deltas.feed(tokens)
    return self._events(choice, new, tokens, deltas.tokens - before)

  def end(self, answers: Sequence[Answer]) -> list[str]:
    """Events of the remaining text and of the end of the response."""
    events: list[str] = []
    for choice, answer in enumerate(answers):
      deltas, recorded = self.deltas[choice], answer.completion
      start = deltas.tokens
      rest = NewTokens(
        recorded.response_ids[start:].tolist(),
        recorded.logprobs[start:],
        *(top[start:] for top in answer.top),
      )
      new = deltas.feed(rest) + deltas.finish()
      events += self._events(choice, new, rest, len(rest))
    return events + self._last(answers)

  def fail(self, error: ApiError) -> list[str]:
    """The events of an error, which end the response."""
    raise NotImplementedError

  def ping(self) -> str:
    """A keep-alive event, sent when there was no event for some time."""
    return ': ping\n\n'

  def _events(
    self, choice: int, deltas: Sequence[chat.Delta], tokens: NewTokens, count: int
  ) -> list[str]:
    """The events of deltas, which are of the first `count` tokens or earlier ones."""
    raise NotImplementedError

  def _last(self, answers: Sequence[Answer]) -> list[str]:
    """The last events."""
    raise NotImplementedError


def event(data: Any, name: str | None = None) -> str:
  """One server-sent event with a JSON value."""
  return (
    f'event: {name}\ndata: {dumps(data)}\n\n' if name else f'data: {dumps(data)}\n\n'
  )
