"""The engine as a service: any thread submits requests, one thread serves them.

Weights change between two device calls, with requests in flight: every token records
the version that sampled it, and its log-probability under the distribution it was
actually sampled from (DESIGN law 4).

K/V computed under older weights stay in use for requests in flight, and for cached
prefixes if `reuse_stale_prefix` is set. A token's recorded log-probability is
then that of (current weights, older K/V). This is exactly the policy that sampled it,
and therefore the right denominator of an importance ratio, but it differs from a full
forward pass under either version. Without `reuse_stale_prefix` only requests in flight
during an update use mixed versions.

A seeded request draws the same random numbers regardless of the rest of the batch. Its
logits may still differ in the last bits between batch sizes, because matmuls do, unless
the model's numerics are invariant.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging

from m2jax.rollout.api import (
  EngineError,
  EngineLost,
  GenerateRequest,
  Handle,
  NewTokens,
  PageEvent,
  Serving,
)
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving import requests
from m2jax.rollout.serving.batcher import TOTALS, Batcher
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.drafting import Drafting
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.serving.sequences import State
from m2jax.rollout.serving.swap import Swap


class Scheduler(Serving):
  """Serves requests on an engine, in its own thread.

  The caller must not donate weights that it has passed here.
  """

  def __init__(
    self,
    engine: Engine,
    variables: Any,
    version: int = 0,
    config: SchedulerConfig | None = None,
    make_batcher: Callable[..., Batcher] = Batcher,
  ):
    config = config or SchedulerConfig()
    self._engine = engine
    self._max_failures = config.max_failures
    self._signature = _signature(variables)
    self._batcher = make_batcher(engine, engine.load_params(variables), version, config)
    self._thread = threading.Thread(target=self._run, name='rollout', daemon=True)
    self._wake = threading.Condition()
    # Under _wake: messages to the engine thread.
    self._inbox: list[Job] = []
    self._cancels: list[Job] = []
    self._next_weights: Swap | None = None
    self._latest_version = version
    self._swap: Swap | None = None  # used by the engine thread
    self._part_bytes = config.weights_part_bytes
    self._gather_s = config.gather_s
    self._random = np.random.default_rng(config.seed)
    self._stopping = False
    self._dead: str | None = None

  def start(self, *, warmup: bool = True) -> Scheduler:
    """Compiles all shapes (unless `warmup` is False), then starts the engine thread."""
    if warmup:
      self._batcher.warmup()
    self._thread.start()
    return self

  def stop(self) -> None:
    """Stops the thread after its current step; unfinished requests fail."""
    with self._wake:
      self._stopping = True
      self._wake.notify()
    if self._thread.ident is not None:
      self._thread.join()
    self._give_up('it was stopped')
    if self._batcher.tiers is not None:
      self._batcher.tiers.close()

  @property
  def context_tokens(self) -> int:
    return self._engine.config.context_tokens

  @property
  def drafting(self) -> Drafting:
    """What has been measured of drafts; changes while requests are served."""
    return self._batcher.drafting

  @property
  def alive(self) -> bool:
    return self._thread.is_alive() and self._dead is None

  @property
  def stopped_reason(self) -> str | None:
    return self._dead

  def submit(
    self,
    request: GenerateRequest,
    on_tokens: Callable[[NewTokens], None] | None = None,
  ) -> Handle:
    engine = self._engine
    prompt = requests.check(request, engine.cfg.vocab_size, engine.config)
    future = concurrent.futures.Future()
    # From here on only the handle can cancel; otherwise asyncio.wrap_future could.
    future.set_running_or_notify_cancel()
    with self._wake:
      if self._dead is not None:
        raise EngineError(f'the rollout engine is not running: {self._dead}')
      seed = request.sampling.seed
      if seed is None:
        seed = int(self._random.integers(2**63))
      job = Job(prompt, request, int(seed), on_tokens, future)
      self._inbox.append(job)
      self._wake.notify()
    return Handle(future, lambda: self._cancel(job))

  def update_weights(self, variables: Any, version: int) -> None:
    """The weights may be placed for another mesh. On one device this places them and
    waits for it; on a mesh the engine's thread does, between its calls."""
    if _signature(variables) != self._signature:
      raise ValueError("variables: tree, shapes or dtypes differ from the engine's")
    self._check_version(version)
    if self._engine.loads_in_any_thread:
      parts = iter([jax.block_until_ready(self._engine.load_params(variables))])
    else:
      parts = self._engine.load_parts(variables, self._part_bytes)
    with self._wake:
      self._check_version(version)
      self._next_weights, self._latest_version = Swap(parts, version), version
      self._wake.notify()

  def _check_version(self, version: int) -> None:
    latest = self._latest_version
    if version <= latest:  # a version identifies one set of weights
      raise ValueError(
        f'version={version}: must be above {latest}, which the engine already has'
      )

  def stats(self) -> dict[str, float]:
    """A cheap snapshot of the state, and totals since the start.

    queue_length, active_slots, slots, pages, page_tokens, cached_pages (of prefixes
    that no request reads), free_pages, peak_pages (the most in use at once since the
    state was made), page_bytes (of all pages, on the devices), evicted_pages,
    prefill_budget_tokens, decode_steps, policy_version, tokens_per_s (sampled, over the
    last ten seconds), update_pause_s and update_pause_longest_s (`swap.Pauses`), the
    totals of `batcher.TOTALS` and those of `Drafting.stats`; with more memory for pages
    also `Tiers.stats`.
    """
    batcher = self._batcher
    with self._wake:
      waiting = len(self._inbox) + len(batcher.waiting)
    table = batcher.table
    return {key: batcher.counts[key] for key in TOTALS} | {
      'queue_length': waiting,
      'active_slots': int(np.sum(table.state != State.IDLE)),
      'slots': len(table.state),
      'pages': sum(cache.pages for cache in table.caches),
      'cached_pages': sum(cache.cached for cache in table.caches),
      'free_pages': sum(cache.available - cache.cached for cache in table.caches),
      'peak_pages': sum(cache.peak for cache in table.caches),
      'page_bytes': sum(x.nbytes for x in jax.tree.leaves(batcher.state.pages)),
      'evicted_pages': sum(cache.evicted for cache in table.caches),
      'page_tokens': table.page_tokens,
      'prefill_budget_tokens': batcher.config.prefill_budget_tokens,
      'decode_steps': batcher.config.decode_steps,
      'policy_version': batcher.version,
      'tokens_per_s': batcher.tokens_per_s,
      **batcher.pauses.stats(),
      **batcher.drafting.stats(),
      **(batcher.tiers.stats() if batcher.tiers is not None else {}),
    }

  def page_events(self) -> list[PageEvent]:
    return self._batcher.journal.read()

  def wake(self) -> None:
    """Lets the engine thread see what its batcher has been given by another thread."""
    with self._wake:
      self._wake.notify()

  def _cancel(self, job: Job) -> None:
    with self._wake:
      self._cancels.append(job)
      self._wake.notify()

  # --- The engine thread.

  def _run(self) -> None:
    counts, finished = self._batcher.counts, 0  # requests, by the last tick
    while self._dead is None:
      with self._wake:
        if not self._wake.wait_for(self._has_work, self._gather_s):
          self._wake.wait_for(self._has_work, self._batcher.poll_s)
          finished = len(self._batcher.table.state)
        self._gather(finished)
        if self._stopping:
          return
        cancels = self._take_messages()
      try:
        self._replace_weights()
        for job in cancels:
          self._batcher.cancel(job)
        before = counts['completions']
        self._batcher.tick()
        finished = counts['completions'] - before
      except EngineLost as error:
        self._give_up(str(error))
      except Exception as error:  # the state after a failed step is unknown
        logging.exception('a rollout step failed')
        self._recover(error)

  def _gather(self, expected: int) -> None:
    """Lets agents that answer at once do so, before the next calls. Needs _wake.

    Requests that arrive between two ticks share their prefill and decode calls; agents
    that miss each other by a moment would otherwise run a call apart from then on.

    Args:
      expected: maximum number of requests to wait for.
    """
    arrived = -1
    while arrived < len(self._inbox) < expected:
      if self._stopping or self._batcher.waiting:
        return
      arrived = len(self._inbox)
      self._wake.wait(self._gather_s)

  def _has_work(self) -> bool:
    messages = self._inbox or self._cancels or self._next_weights or self._swap
    return bool(self._stopping or messages or self._batcher.busy)

  def _take_messages(self) -> list[Job]:
    """Takes messages of other threads; returns cancelled requests. Needs _wake."""
    batcher = self._batcher
    batcher.waiting.extend(self._inbox)
    self._inbox.clear()
    cancels, self._cancels = self._cancels, []
    if self._swap is None:  # else those on their way come first
      self._swap, self._next_weights = self._next_weights, None
    return cancels

  def _replace_weights(self) -> None:
    """Places a part of new weights; replaces the old ones when all are placed.

    Raises:
      EngineLost: they cannot be placed. They will not be sent again, and the old ones
        must not keep serving as if they were the latest.
    """
    swap, self._swap = self._swap, None
    if swap is None:
      return
    try:
      weights = swap.advance(to_the_end=not self._batcher.busy)
    except Exception as error:
      raise EngineLost(
        f'the weights of version {swap.version} cannot be placed: {error!r}'
      ) from error
    if weights is None:
      self._swap = swap
    else:
      self._batcher.replace_weights(weights, swap.version)

  def _recover(self, cause: Exception) -> None:
    """Fails the requests in slots, creates a new state; waiting requests continue."""
    batcher = self._batcher
    error = EngineError(f'a rollout step failed: {cause!r}')
    error.__cause__ = cause
    batcher.fail_running(error)
    batcher.failures += 1
    if batcher.failures >= self._max_failures:
      self._give_up(f'{batcher.failures} steps failed in a row, the last: {cause!r}')
      return
    try:
      batcher.reset()
    except Exception as error:  # such as no memory for a new cache
      self._give_up(f'cannot create a new state after {cause!r}: {error!r}')

  def _give_up(self, reason: str) -> None:
    batcher = self._batcher
    with self._wake:
      self._dead = self._dead or reason
      batcher.waiting.extend(self._inbox)
      self._inbox.clear()
    error = EngineError(f'the rollout engine is not running: {self._dead}')
    batcher.fail_running(error)
    while batcher.waiting:
      batcher.fail(batcher.waiting.popleft(), error)


def _signature(variables) -> tuple:
  leaves, structure = jax.tree.flatten(variables)
  return structure, [(x.shape, x.dtype) for x in leaves]
