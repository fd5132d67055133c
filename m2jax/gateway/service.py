"""Computes and records the completion of a checked request.

`submit` and `finish` run on the gateway's loop; the engine works between them. Sampled
tokens are recorded before the response is complete (law 4); where the record goes to a
database that other processes read, `finish` waits for its commit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from m2jax.gateway import deltas, formats, prompts, readers, sampling, sessions
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.counters import Counters
from m2jax.gateway.errors import ApiError, ContextTooLong, invalid, too_large
from m2jax.gateway.exchange import Answer, Pending, Record
from m2jax.records import COMPLETION_PREFIX, Completion
from m2jax.rollout.api import (
  GenerateRequest,
  GenerateResult,
  GrammarError,
  Handle,
  NewTokens,
  PromptTooLong,
  Serving,
)

_EPOCH_S = time.time() - time.monotonic()
# JSON's longest encoding of one byte of text: an ASCII character as \u0041.
_JSON_BYTES = 6


class ChatService:
  """Completions of an engine for sessions, passed to `record`.

  Attributes:
    config, tokenizer, sessions: as passed. counters: of this service.
    context_tokens: size of the engine's context.
    view_key: key that /metrics needs beyond loopback; '': no key is accepted.
  """

  def __init__(
    self,
    config: GatewayConfig,
    tokenizer,
    engine: Serving,
    record: Record,
    open_sessions: sessions.Sessions,
  ):
    self.config = config
    self.tokenizer = tokenizer
    self.sessions = open_sessions
    self.counters = Counters()
    self.view_key = ''
    self._engine = engine
    self.context_tokens = engine.context_tokens
    self._readers = readers.Readers(config, tokenizer, engine.context_tokens)
    self._record = record
    self._formats = formats.Formats(tokenizer)
    self._stop_ids = (tokenizer.eos_id,)
    self._defaults = (config.temperature, config.top_p, config.top_k)

  def read(
    self, body: bytearray, dialect: str
  ) -> contextlib.AbstractAsyncContextManager[readers.Reading]:
    """Reads a body of a dialect: `readers.Readers.read`."""
    return self._readers.read(body, dialect)

  def close(self):
    """Kills the reader processes; they restart on demand."""
    self._readers.close()

  @property
  def body_limit(self) -> tuple[int, ApiError]:
    """The maximum bytes of a body, and the error of a larger one."""
    config, longest = self.config, self.tokenizer.longest_token_bytes
    if longest is not None:
      prompt_bytes = _JSON_BYTES * longest * self.context_tokens
      limit = config.body_overhead_bytes + prompt_bytes
      if limit < config.max_body_bytes:
        what = f'the body is larger than {limit} bytes'
        return limit, ContextTooLong(what, self.context_tokens)
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
    on_tokens: Callable[[int, NewTokens], None] | None = None,
  ) -> list[Pending]:
    """Builds the prompt and submits it to the engine, once for each of `n` choices.

    From here on the session of an unknown key is stored.

    Args:
      key: the session's key.
      on_tokens: called from the engine's thread with a choice and its new tokens.

    Raises:
      ApiError: 401 unknown key, 404 unknown model, 400 invalid messages or a prompt
        that is too long, 503 no engine.
    """
    request = reading.request
    session = self.sessions.find(key)
    self._check_model(request.model)
    first = session.requests  # in the order in which they arrived
    session.requests += request.n
    sampled, overrides = sampling.params(
      request.sampling,
      request.max_tokens,
      training=session.mode == 'training',
      max_tokens=self.config.default_max_tokens,
      stop_ids=self._stop_ids,
      defaults=self._defaults,
      top_logprobs=request.top_logprobs,
    )
    grammar = await self._formats.grammar(
      request.format, calls=bool(request.tools), training=session.mode == 'training'
    )
    plan = prompts.plan(
      session,
      request,
      self.tokenizer,
      self.context_tokens,
      restore=self.config.restore_reasoning,
      untrained=self.config.untrained_classes,
    )
    prompt_ids = plan.prompt_ids(await reading.encode(plan.part))
    generate = GenerateRequest(prompt_ids, sampled, grammar)
    handles = self._generate(generate, request.n, on_tokens)
    self._count_prompt(plan, request, overrides)
    session = self.sessions.keep(session)
    return [
      Pending(
        id=COMPLETION_PREFIX + uuid.uuid4().hex,
        session=session,
        request=request,
        plan=plan,
        prompt_ids=prompt_ids,
        overrides=overrides,
        handle=handle,
        number=number,
        started_s=_now_s(),
        template_version=self.config.template_version,
      )
      for number, handle in enumerate(handles, start=first)
    ]

  async def count(self, key: str, reading: readers.Reading) -> np.ndarray:
    """Token ids of a request's prompt, encoded as a whole, of any length.

    Raises:
      ApiError: 401, 404, 400 as `submit`.
    """
    self.sessions.find(key)
    self._check_model(reading.request.model)
    if (prompt := reading.request.echo.get('prompt')) is not None:
      return np.asarray(self.tokenizer.encode(prompt), np.int32)
    return await reading.encode(prompts.Part(-1, False, 0, sys.maxsize))

  def _check_model(self, model: str) -> None:
    if model != self.config.model_name:
      raise ApiError(
        404,
        f'model: {model[:200]!r} is not served here; use {self.config.model_name!r}',
        param='model',
        code='model_not_found',
      )

  def _generate(
    self,
    request: GenerateRequest,
    n: int,
    on_tokens: Callable[[int, NewTokens], None] | None,
  ) -> list[Handle]:
    """Submits a request n times: all, or none, are in the engine."""
    handles: list[Handle] = []
    sampled, tokens = request.sampling, len(request.prompt_ids)
    try:
      for choice in range(n):
        listen = functools.partial(on_tokens, choice) if on_tokens else None
        if choice and sampled.seed is not None:  # the same seed draws the same tokens
          sampled = dataclasses.replace(sampled, seed=sampled.seed + 1)
          request = dataclasses.replace(request, sampling=sampled)
        handles.append(self._engine.submit(request, listen))
    except Exception as error:
      for handle in handles:
        handle.cancel()
      if isinstance(error, PromptTooLong):
        raise ContextTooLong(
          f'your messages have {tokens} tokens, which leave no room for a '
          'response', self.context_tokens, tokens,
        ) from error  # fmt: skip
      if isinstance(error, ValueError):  # a sampling field out of the engine's range
        raise invalid(str(error), None) from error
      raise _engine_down(error) from error
    return handles

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
    except GrammarError as error:
      raise invalid(str(error), pending.request.format.field) from error
    except BaseException as error:  # CancelledError is not an Exception
      raise _engine_down(error) from error
    session, plan, request = pending.session, pending.plan, pending.request
    version = self.config.template_version
    reader = deltas.Deltas(self.tokenizer, request.tools, request.stop, version)
    found = deltas.joined(reader.feed(result.tokens.tolist()) + reader.finish())
    if reader.stop is not None:
      result = _cut(result, len(pending.prompt_ids), reader.tokens)
    parsed = reader.message
    message = deltas.message(parsed, pending.call_prefix)
    completion = Completion(
      id=pending.id,
      session=session.name,
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
      request=pending.number,
      started_s=pending.started_s,
      ended_s=_now_s(),
      tool_s=request.hints.tool_s,
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
    if request.hints.request_class not in self.config.untrained_classes:
      session.add(plan.node(request, completion, message, closed=closed))
      self.sessions.trim()
    top = (result.top_ids, result.top_logprobs) if request.top_logprobs else ()
    return Answer(
      request, completion, message, tuple(found), reader.stop, top, result.cached_tokens
    )

  def _count_prompt(self, plan, request, overrides):
    count = self.counters.add
    if plan.fork_reason:
      count('forks_total', reason=plan.fork_reason)
    else:
      count('extensions_total')
    if plan.closed_by_gateway:
      count('closed_by_gateway_total')
    if request.context_edit is not None:
      count('context_edits_total', edit=request.context_edit)
    if plan.compacted:
      count('context_edits_total', edit='compacted')
    if request.hints.request_class:
      count('request_classes_total', request_class=request.hints.request_class)
    if plan.restored:
      count('reasoning_restored_total', plan.restored)
    if plan.repeated:
      count('repeated_total')
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


def _now_s() -> float:
  """Seconds since the epoch, by a clock that never steps."""
  return _EPOCH_S + time.monotonic()


def _cut(result: GenerateResult, prompt: int, tokens: int) -> GenerateResult:
  """The first tokens of a result, which end with a stop string."""
  fields = ['tokens', 'logprobs', 'versions']
  if result.top_ids is not None:
    fields += ['top_ids', 'top_logprobs']
  first = {field: getattr(result, field)[:tokens] for field in fields}
  if result.experts is not None:
    first['experts'] = result.experts[: prompt + tokens]
  return dataclasses.replace(result, finish_reason='stop', **first)


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
