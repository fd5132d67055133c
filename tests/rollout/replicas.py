"""Engine replicas without an engine, for tests of the router."""

from __future__ import annotations

import concurrent.futures

import numpy as np

from m2jax.rollout.api import EngineError, GenerateResult, Handle, NewTokens, PageEvent
from m2jax.rollout.serving.batcher import TOTALS


class FakeReplica:
  """Scheduler's interface; requests end when the test says so.

  Attributes:
    requests: (request, on_tokens, future) in order of arrival.
    published: versions it was given.
  """

  context_tokens = 64

  def __init__(self, version: int = 0, **stats):
    self.requests: list[tuple] = []
    self.published: list[int] = []
    self.version, self.alive, self.stopped_reason = version, True, None
    self.cancelled: list[int] = []
    self.events: list[PageEvent] = []
    self._stats = dict(
      pages=8, page_tokens=4, slots=2, prefill_budget_tokens=16, decode_steps=2
    )
    self._stats.update(stats)

  def submit(self, request, on_tokens=None) -> Handle:
    if not self.alive:
      raise EngineError('it has stopped')
    if len(request.prompt_ids) > 32:
      raise ValueError('prompt_ids: too long')
    future = concurrent.futures.Future()
    number = len(self.requests)
    self.requests.append((request, on_tokens, future))
    return Handle(future, lambda: self._cancel(number))

  def _cancel(self, number: int) -> None:
    if self.requests[number][2].done():
      return
    self.cancelled.append(number)
    self.finish(number, (), 'cancelled')

  def finish(self, number: int, tokens=(1, 2), reason='length') -> None:
    request, on_tokens, future = self.requests[number]
    if tokens and on_tokens is not None:
      on_tokens(NewTokens(tokens, np.zeros(len(tokens), np.float32)))
    tokens = np.array(tokens, np.int32)
    versions = np.full(tokens.size, self.version, np.int64)
    logprobs = np.zeros(tokens.size, np.float32)
    future.set_result(GenerateResult(tokens, logprobs, versions, reason))

  def die(self, reason: str = 'out of memory') -> None:
    """Fails all requests, as `Scheduler` does when it gives up."""
    self.alive, self.stopped_reason = False, reason
    for _, _, future in self.requests:
      if not future.done():
        future.set_exception(EngineError(reason))

  def update_weights(self, variables, version: int) -> None:
    if not self.alive:
      raise EngineError('it has stopped')
    self.published.append(version)
    self.version = version

  def stats(self) -> dict:
    totals = dict.fromkeys(TOTALS, 0)
    return totals | self._stats | {'policy_version': self.version, 'queue_length': 1}

  def page_events(self) -> list[PageEvent]:
    events, self.events = self.events, []
    return events

  def stop(self) -> None:
    self.die('it was stopped')
