"""Computes and records the completion of a checked request.

`submit` and `finish` run on the gateway's loop; the engine works between them. Sampled
tokens are recorded before the response is complete (law 4); where the record goes to a
database that other processes read, `finish` waits for its commit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import logging

from m2jax.gateway import (
  history,
  prompts,
  protocol,
  readers,
  responses,
  sampling,
  sessions,
)
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.counters import Counters
from m2jax.gateway.errors import ApiError, invalid, too_large
from m2jax.gateway.exchange import Answer, Engine, Pending, Record
from m2jax.records import Completion
from m2jax.rollout.api import GenerateRequest, GenerateResult, PromptTooLong
from m2jax.text import chat
from m2jax.text import tokenizer as tokenizer_lib

# JSON's longest encoding of one byte of text: an ASCII character as \u0041.
_JSON_BYTES = 6


class ChatService:
  """Completions of an engine for sessions, passed to `record`.

  Attributes:
    config, tokenizer, sessions: as passed. counters: of this service.
  """

  def __init__(
    self,
    config: GatewayConfig,
    tokenizer,
    engine: Engine,
    record: Record,
    open_sessions: sessions.Sessions,
  ):
    self.config = config
    self.tokenizer = tokenizer
    self.sessions = open_sessions
    self.counters = Counters()
    self._engine = engine
    self._context_tokens = engine.context_tokens
    self._readers = readers.Readers(config, tokenizer, engine.context_tokens)
    self._record = record
    self._stop_ids = (tokenizer.eos_id,)
    self._defaults = (config.temperature, config.top_p, config.top_k)

  def read(
    self, body: bytearray
  ) -> contextlib.AbstractAsyncContextManager[readers.Reading]:
    """Reads a body: `readers.Readers.read`."""
    return self._readers.read(body)

  def close(self):
    """Kills the reader processes; they restart on demand."""
    self._readers.close()

  @property
  def body_limit(self) -> tuple[int, ApiError]:
    """The maximum bytes of a body, and the error of a larger one."""
    config, longest = self.config, self.tokenizer.longest_token_bytes
    if longest is not None:
      prompt_bytes = _JSON_BYTES * longest * self._context_tokens
      limit = config.body_overhead_bytes + prompt_bytes
      if limit < config.max_body_bytes:
        what = f'the body is larger than {limit} bytes'
        return limit, protocol.too_long(what, self._context_tokens)
    limit = config.max_body_bytes
    return limit, too_large(f'the body is larger than max_body_bytes={limit}')

  def health(self) -> tuple[bool, dict[str, Any]]:
    """Whether the engine is running, and its statistics."""
    try:
      stats = self._engine.stats()
    except Exception as error:
      return False, {'error': str(error)}
    return self._engine.alive, stats

  async def submit(
    self,
    key: str,
    reading: readers.Reading,
    on_tokens: Callable[[Sequence[int]], None] | None = None,
  ) -> Pending:
    """Builds the prompt and submits it to the engine.

    From here on the session of an unknown key is stored.

    Args:
      key: of the session.

    Raises:
      ApiError: 401 unknown key, 404 unknown model, 400 invalid messages or a prompt
        that is too long, 503 no engine.
    """
    request = reading.request
    session = self.sessions.find(key)
    if request.model != self.config.model_name:
      raise ApiError(
        404,
        f'model: {request.model[:200]!r} is not served here; use '
        f'{self.config.model_name!r}',
        param='model',
        code='model_not_found',
      )
    sampled, overrides = sampling.params(
      request.sampling,
      request.max_tokens,
      training=session.mode == 'training',
      max_tokens=self.config.default_max_tokens,
      stop_ids=self._stop_ids,
      defaults=self._defaults,
      top_logprobs=request.top_logprobs,
    )
    plan = prompts.plan(session, request, self._context_tokens)
    prompt_ids = plan.prompt_ids(await reading.encode(plan.part))
    try:
      handle = self._engine.submit(GenerateRequest(prompt_ids, sampled), on_tokens)
    except PromptTooLong as error:
      raise invalid(str(error), 'messages', 'context_length_exceeded') from error
    except ValueError as error:  # a sampling field out of the engine's range
      raise invalid(str(error), None) from error
    except Exception as error:
      raise _engine_down(error) from error
    self._count_prompt(plan, request, overrides)
    return Pending(
      id=history.COMPLETION_PREFIX + uuid.uuid4().hex,
      session=self.sessions.keep(session),
      request=request,
      plan=plan,
      prompt_ids=prompt_ids,
      overrides=overrides,
      handle=handle,
      started_s=time.time(),
    )

  async def finish(
    self, pending: Pending, future: concurrent.futures.Future[GenerateResult]
  ) -> Answer | None:
    """Records a finished completion; returns None if it was cancelled.

    A cancelled completion with tokens is recorded too, but cannot be extended.

    Raises:
      ApiError: 503, the engine failed, and nothing is recorded.
    """
    try:
      result = future.result()
    except BaseException as error:  # CancelledError is not an Exception
      raise _engine_down(error) from error
    session, plan, request = pending.session, pending.plan, pending.request
    parsed = chat.parse(
      tokenizer_lib.pieces(self.tokenizer, result.tokens.tolist()), request.tools
    )
    message = responses.message(parsed, pending.call_prefix)
    completion = Completion(
      id=pending.id,
      session=session.key,
      turn=session.turns,
      parent=plan.parent.id if plan.parent else None,
      follows=plan.follows,
      fork_reason=None if plan.fork_reason == 'first' else plan.fork_reason,
      prompt_ids=pending.prompt_ids,
      response_ids=result.tokens,
      logprobs=result.logprobs,
      versions=result.versions,
      experts=result.experts,
      finish_reason=result.finish_reason,
      status=str(parsed.status),
      overrides=pending.overrides,
      started_s=pending.started_s,
      ended_s=time.time(),
    )
    cancelled = result.finish_reason == 'cancelled'
    if len(result.tokens) or not cancelled:
      recorded = self._record(completion)
      session.turns += 1
      self._count_completion(completion)
      if recorded is not None:
        await asyncio.wrap_future(recorded)
    if cancelled:
      return None
    closed = tuple(result.tokens[-1:].tolist()) == self._stop_ids
    session.add(plan.node(request, completion, message, closed=closed))
    self.sessions.trim()
    tokens, likeliest = (), ()
    if request.logprobs:
      tokens = self._texts(result.tokens)
    if request.top_logprobs:
      likeliest = tuple(
        tuple(zip(self._texts(ids), logprobs.tolist(), strict=True))
        for ids, logprobs in zip(result.top_ids, result.top_logprobs, strict=True)
      )
    return Answer(request, completion, message, tokens, likeliest)

  def _texts(self, ids: np.ndarray) -> tuple[str, ...]:
    return tuple(self.tokenizer.decode([token]) for token in ids.tolist())

  def _count_prompt(self, plan, request, overrides):
    count = self.counters.add
    if plan.fork_reason:
      count('forks_total', reason=plan.fork_reason)
    else:
      count('extensions_total')
    if plan.closed_by_gateway:
      count('closed_by_gateway_total')
    for field in overrides:
      count('overrides_total', field=field)
    for field in request.ignored:
      count('ignored_total', field=field)

  def _count_completion(self, completion: Completion):
    count = self.counters.add
    count('completions_total', finish_reason=completion.finish_reason)
    count('parsed_total', status=completion.status)
    count('prompt_tokens_total', len(completion.prompt_ids))
    count('response_tokens_total', len(completion.response_ids))


def _engine_down(error: BaseException) -> ApiError:
  # Not once for each of the requests that fail together.
  logging.log_every_n_seconds(
    logging.ERROR, 'gateway: the engine failed: %r', 5.0, error
  )
  return ApiError(
    503,
    f'the engine is not available: {error}',
    type='server_error',
    code='engine_unavailable',
  )
