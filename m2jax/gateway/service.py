"""From a checked request to a recorded completion: prompt, engine, parse, record.

`submit` and `finish` run on the gateway's loop; between them the engine works. What the
engine sampled is recorded before any of it counts as answered (law 4).
"""

from __future__ import annotations

import concurrent.futures
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from m2jax.gateway import prompts, protocol, responses, sessions
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.counters import Counters
from m2jax.gateway.errors import ApiError, invalid
from m2jax.gateway.exchange import Answer, Engine, Pending
from m2jax.records import Completion
from m2jax.rollout.api import GenerateRequest, GenerateResult, PromptTooLong


class ChatService:
  """Completions for sessions, from an engine, into `record`.

  Attributes:
    config, tokenizer, sessions, counters: as given.
  """

  def __init__(
    self,
    config: GatewayConfig,
    tokenizer,
    engine: Engine,
    record: Callable[[Completion], None],
    open_sessions: sessions.Sessions,
  ):
    self.config = config
    self.tokenizer = tokenizer
    self.sessions = open_sessions
    self.counters = Counters()
    self._engine = engine
    self._record = record
    self._stop_ids = (tokenizer.eos_id,)
    self._defaults = (config.temperature, config.top_p, config.top_k)

  def health(self) -> tuple[bool, dict[str, Any]]:
    """Whether the engine works, and its figures."""
    try:
      stats = self._engine.stats()
    except Exception as error:
      return False, {'error': str(error)}
    return self._engine.alive, stats

  def submit(
    self,
    session: sessions.Session,
    request: protocol.ChatRequest,
    on_tokens: Callable[[Sequence[int]], None] | None = None,
  ) -> Pending:
    """Builds the prompt and hands it to the engine.

    Raises:
      ApiError: 404 unknown model, 400 bad messages or a prompt too long, 503 no engine.
    """
    if request.model != self.config.model_name:
      raise ApiError(
        404,
        f'model: {request.model!r} is not served here; use {self.config.model_name!r}',
        param='model',
        code='model_not_found',
      )
    sampling, overrides = protocol.sampling_params(
      request,
      training=session.mode == 'training',
      max_tokens=self.config.default_max_tokens,
      stop_ids=self._stop_ids,
      defaults=self._defaults,
    )
    prompt = prompts.build(session, request, self.tokenizer)
    try:
      handle = self._engine.submit(GenerateRequest(prompt.ids, sampling), on_tokens)
    except PromptTooLong as error:
      raise invalid(str(error), 'messages', 'context_length_exceeded') from error
    except ValueError as error:  # a sampling field out of the engine's range
      raise invalid(str(error), None) from error
    except Exception as error:
      raise _engine_down(error) from error
    self._count_prompt(prompt, request, overrides)
    return Pending(
      id='chatcmpl-' + uuid.uuid4().hex,
      session=session,
      request=request,
      prompt=prompt,
      overrides=overrides,
      handle=handle,
      started_s=time.time(),
    )

  def finish(
    self, pending: Pending, future: concurrent.futures.Future[GenerateResult]
  ) -> Answer | None:
    """Records a finished completion; None when it was cancelled.

    A cancelled completion is recorded too if it has tokens, but nothing can extend it.

    Raises:
      ApiError: 503, the engine failed; nothing is recorded then.
    """
    try:
      result = future.result()
    except BaseException as error:  # CancelledError is none of Exception's
      raise _engine_down(error) from error
    session, prompt = pending.session, pending.prompt
    text = self.tokenizer.decode(result.tokens)
    message, status = responses.message(
      text, pending.request.tools, pending.call_prefix
    )
    completion = Completion(
      id=pending.id,
      session=session.key,
      turn=session.turns,
      parent=prompt.parent,
      fork_reason=None if prompt.fork_reason == 'first' else prompt.fork_reason,
      continues=prompt.continues,
      prompt_ids=prompt.ids,
      response_ids=result.tokens,
      logprobs=result.logprobs,
      versions=result.versions,
      experts=result.experts,
      finish_reason=result.finish_reason,
      status=status,
      overrides=pending.overrides,
      started_s=pending.started_s,
      ended_s=time.time(),
    )
    cancelled = result.finish_reason == 'cancelled'
    if result.tokens or not cancelled:
      self._record(completion)
      session.turns += 1
      self._count_completion(completion)
    if cancelled:
      return None
    closed = result.tokens[-1:] == self._stop_ids
    session.add(prompt.node(completion, message, closed=closed))
    tokens = ()
    if pending.request.logprobs:
      tokens = tuple(self.tokenizer.decode([token]) for token in result.tokens)
    return Answer(pending.request, completion, message, text, tokens)

  def _count_prompt(self, prompt, request, overrides):
    count = self.counters.add
    if prompt.fork_reason:
      count('forks_total', reason=prompt.fork_reason)
    else:
      count('extensions_total')
    if prompt.closed_by_gateway:
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
  logging.error('gateway: the engine refused or failed: %r', error)
  return ApiError(
    503,
    f'the engine is not available: {error}',
    type='server_error',
    code='engine_unavailable',
  )
