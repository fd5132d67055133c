"""An engine double: real threads and futures, scripted tokens. For tests only."""

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from m2jax.rollout.api import GenerateRequest, GenerateResult, NewTokens, PromptTooLong


@dataclasses.dataclass(frozen=True)
class Handle:
  future: concurrent.futures.Future
  cancelled: threading.Event

  def cancel(self):
    self.cancelled.set()


class ScriptedEngine:
  """Answers with what `script(request)` returns, a few tokens at a time.

  `script` may return an exception, which the future then raises. `delay_s` sleeps
  before each piece. `results` keeps every request with what was sampled for it.
  `cached_tokens` is reported of every prompt.
  """

  def __init__(
    self,
    script: Callable[[GenerateRequest], Sequence[int]],
    *,
    context_tokens: int = 100_000,
    delay_s: float = 0.0,
    piece_tokens: int = 3,
    workers: int = 8,
    cached_tokens: int | None = None,
  ):
    self.cached_tokens = cached_tokens
    self.script = script
    self.context_tokens = context_tokens
    self.delay_s = delay_s
    self.piece_tokens = piece_tokens
    self.alive, self.stopped_reason = True, None
    self.version = 0
    self.requests: list[GenerateRequest] = []
    self.results: list[tuple[GenerateRequest, GenerateResult]] = []
    self.handles: list[Handle] = []  # of `requests`
    self.sampled = 0  # tokens of all requests
    self.cancelled = collections.Counter()
    self._counting = threading.Lock()
    self._pool = concurrent.futures.ThreadPoolExecutor(workers)

  def submit(self, request, on_tokens=None) -> Handle:
    if not self.alive:
      raise RuntimeError('the scripted engine is down')
    if len(request.prompt_ids) >= self.context_tokens:
      raise PromptTooLong(
        f'the prompt has {len(request.prompt_ids)} tokens; the context holds '
        f'{self.context_tokens}'
      )
    self.requests.append(request)
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    handle = Handle(future, threading.Event())
    self.handles.append(handle)
    self._pool.submit(self._serve, request, handle, on_tokens)
    return handle

  def _serve(self, request, handle, on_tokens):
    try:
      handle.future.set_result(self._sample(request, handle, on_tokens))
    except BaseException as error:
      handle.future.set_exception(error)

  def _sample(self, request, handle, on_tokens):
    script = self.script(request)
    if isinstance(script, Exception):
      raise script
    limit = min(
      request.sampling.max_tokens, self.context_tokens - len(request.prompt_ids)
    )
    tokens: list[int] = []
    reason = 'length'
    for token in list(script)[:limit]:
      if len(tokens) % self.piece_tokens == 0 and self.delay_s:
        time.sleep(self.delay_s)
      if handle.cancelled.is_set():
        reason = 'cancelled'
        with self._counting:
          self.cancelled['requests'] += 1
        break
      tokens.append(token)
      with self._counting:
        self.sampled += 1
      if on_tokens and len(tokens) % self.piece_tokens == 0:
        on_tokens(self._new(request, tokens[-self.piece_tokens :]))
      if token in request.sampling.stop_ids:
        reason = 'stop'
        break
    rest = len(tokens) % self.piece_tokens
    if on_tokens and rest:
      on_tokens(self._new(request, tokens[-rest:]))
    new = self._new(request, tokens)
    result = GenerateResult(
      tokens=np.array(tokens, np.int32),
      logprobs=new.logprobs,
      versions=np.full(len(tokens), self.version, np.int32),
      finish_reason=reason,
      top_ids=new.top_ids,
      top_logprobs=new.top_logprobs,
      cached_tokens=self.cached_tokens,
    )
    self.results.append((request, result))
    return result

  def _new(self, request, tokens) -> NewTokens:
    """Tokens with made-up log-probabilities: the same whenever they are asked for."""
    logprobs = -np.array([(token * 37 % 101 + 1) / 101 for token in tokens], np.float32)
    likeliest = request.sampling.top_logprobs
    if not likeliest:
      return NewTokens(tokens, logprobs)
    ids = np.tile(np.arange(likeliest, dtype=np.int32), (len(tokens), 1))
    return NewTokens(tokens, logprobs, ids, -ids.astype(np.float32))

  def stats(self):
    return {'policy_version': self.version, 'active_slots': 0}

  def page_events(self):
    return ()

  def close(self):
    self._pool.shutdown()
