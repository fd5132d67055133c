"""Continuous batching: requests from any thread, one engine thread that serves them.

The loop places waiting requests in slots (first come, first served, but for requests that
wait one prefill for a prefix they share), prefills within a budget, decodes a few steps,
and delivers what ended. Weights are swapped between two device calls, in flight:
every token carries the version that sampled it, and its log-probability is that of the
distribution really drawn from.

K/V computed under older weights stays in use, for requests in flight always and for
parked prefixes when `reuse_stale_prefix` is set. A token's recorded log-probability then
is that of (current weights, older K/V): exactly what was sampled, and so the right
behaviour policy for importance ratios, but not what a full forward under either version
gives. Without `reuse_stale_prefix` only requests in flight at a swap see such a mixture.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import concurrent.futures
import dataclasses
import threading
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from m2jax.rollout import prefill_plan
from m2jax.rollout import requests
from m2jax.rollout.api import GenerateRequest
from m2jax.rollout.api import GenerateResult
from m2jax.rollout.engine import Engine
from m2jax.rollout.engine import make_slots
from m2jax.rollout.engine import RUNNING
from m2jax.rollout.engine import STOP
from m2jax.rollout.slot_table import SlotTable
from m2jax.rollout.slot_table import State

_RATE_WINDOW_S = 10.0
_TOTALS = (
  'prompt_tokens',
  'prefix_hit_tokens',
  'prefill_tokens',
  'prefill_padding_tokens',
  'sampled_tokens',
  'decode_calls',
  'copies',
  'completions',
  'cancelled',
  'failed',
  'weight_updates',
)


class EngineError(RuntimeError):
  """The engine could not serve a request; the request itself was in order."""


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
  """How the engine thread divides its time.

  Attributes:
    decode_steps: steps per decode call; the host wakes once per call.
    prefill_budget_tokens: padded prompt tokens computed between two decode calls.
    min_copy_tokens: shortest shared prefix worth a copy, or worth waiting for.
    reuse_stale_prefix: parked K/V of older weights may be reused (see above).
    max_failures: consecutive failing steps after which the scheduler gives up.
    seed: of the stream that requests without a seed draw from.
  """

  decode_steps: int = 8
  prefill_budget_tokens: int = 1024
  min_copy_tokens: int = 8
  reuse_stale_prefix: bool = True
  max_failures: int = 3
  seed: int = 0


@dataclasses.dataclass(eq=False)
class _Job:
  prompt: np.ndarray
  request: GenerateRequest
  seed: int
  on_tokens: Callable[[tuple[int, ...]], None] | None
  future: concurrent.futures.Future
  slot: int = -1


@dataclasses.dataclass(frozen=True)
class Handle:
  """A request under way.

  Attributes:
    future: of a GenerateResult, or of EngineError. Its own `cancel` does nothing.
    cancel: ends the request; the future then gives what was sampled so far, with
      finish_reason 'cancelled'.
  """

  future: concurrent.futures.Future
  cancel: Callable[[], None]


class Scheduler:
  """Serves requests on an engine from a thread of its own.

  `submit`, `update_weights`, `stats` and a handle's `cancel` may be called from any
  thread. Weights given to the scheduler must not be donated by their owner.
  """

  def __init__(
    self,
    engine: Engine,
    variables: Any,
    version: int = 0,
    config: SchedulerConfig | None = None,
  ):
    self._engine = engine
    self._config = config = config or SchedulerConfig()
    if not 1 <= config.decode_steps <= engine.config.max_steps:
      raise ValueError(
        f'SchedulerConfig.decode_steps={config.decode_steps}: must be in '
        f'[1, EngineConfig.max_steps={engine.config.max_steps}]'
      )
    self._variables = engine.load_params(variables)
    self._version = version
    self._wake = threading.Condition()
    # Under _wake: messages from other threads.
    self._inbox: list[_Job] = []
    self._cancels: list[_Job] = []
    self._next_weights: tuple[Any, int] | None = None
    self._random = np.random.default_rng(config.seed)
    self._stopping = False
    self._dead: str | None = None
    # The engine thread's own.
    self._state = engine.init_decode_state()
    self._waiting: collections.deque[_Job] = collections.deque()
    self._table = self._new_table()
    self._jobs: dict[int, _Job] = {}  # by slot
    self._ready: list[int] = []  # slots prefilled, not yet admitted
    self._counts = collections.Counter()
    self._rates = collections.deque([(time.monotonic(), 0)])
    self._failures = 0
    self._thread = threading.Thread(target=self._run, name='rollout', daemon=True)

  def _new_table(self) -> SlotTable:
    config = self._engine.config
    return SlotTable(
      config.slots,
      config.context_tokens,
      min_copy_tokens=self._config.min_copy_tokens,
    )

  # --- Any thread.

  def start(self, *, warmup: bool = True) -> Scheduler:
    """Compiles all shapes (unless told not to), then starts the engine thread."""
    if warmup:
      self._state = self._engine.warmup(self._variables, self._state)
    self._thread.start()
    return self

  def stop(self) -> None:
    """Ends the thread after its current step; unfinished requests get EngineError."""
    with self._wake:
      self._stopping = True
      self._wake.notify()
    if self._thread.ident is not None:
      self._thread.join()
    self._give_up('the engine was stopped')

  @property
  def alive(self) -> bool:
    """Whether requests are being served."""
    return self._thread.is_alive() and self._dead is None

  def submit(
    self,
    request: GenerateRequest,
    on_tokens: Callable[[tuple[int, ...]], None] | None = None,
  ) -> Handle:
    """Queues a request.

    Args:
      on_tokens: called from the engine's thread with new tokens as they are drawn, a few
        at a time; must return quickly. The future resolves after its last call.

    Raises:
      PromptTooLong: the prompt leaves no room for a response.
      ValueError: a field is out of range; the message names it.
      EngineError: the scheduler has stopped.
    """
    prompt = requests.check(
      request,
      vocab_size=self._engine.cfg.vocab_size,
      context_tokens=self._engine.config.context_tokens,
      max_stop_ids=self._engine.config.max_stop_ids,
    )
    future = concurrent.futures.Future()
    # From now on only the handle cancels; asyncio.wrap_future would otherwise.
    future.set_running_or_notify_cancel()
    with self._wake:
      if self._dead is not None:
        raise EngineError(f'the rollout engine is not running: {self._dead}')
      seed = request.sampling.seed
      if seed is None:
        seed = int(self._random.integers(2**63))
      job = _Job(prompt, request, seed, on_tokens, future)
      self._inbox.append(job)
      self._wake.notify()
    return Handle(future, lambda: self._cancel(job))

  def update_weights(self, variables: Any, version: int) -> None:
    """Swaps the weights before the next device call; requests in flight go on.

    Raises:
      ValueError: version goes back, or shapes or dtypes differ from the present weights.
    """
    variables = self._engine.load_params(variables)
    if _form(variables) != _form(self._variables):
      raise ValueError("variables: tree, shapes or dtypes differ from the engine's")
    with self._wake:
      latest = self._next_weights[1] if self._next_weights else self._version
      if version < latest:
        raise ValueError(f'version={version}: the engine already has {latest}')
      self._next_weights = (variables, version)
      self._wake.notify()

  def stats(self) -> dict[str, float]:
    """Counters since the start and the present state; a snapshot, cheap.

    Keys: queue_length, active_slots, parked_slots, slots, policy_version,
    tokens_per_s (over the last ten seconds), and totals: prompt_tokens,
    prefix_hit_tokens, prefill_tokens, prefill_padding_tokens, sampled_tokens,
    decode_calls, copies, completions, cancelled, failed, weight_updates.
    """
    with self._wake:
      waiting = len(self._inbox) + len(self._waiting)
    now, (then, before) = time.monotonic(), self._rates[0]
    idle = self._table.state == State.IDLE
    totals = {key: self._counts[key] for key in _TOTALS}
    rate = (totals['sampled_tokens'] - before) / max(now - then, 1e-9)
    return totals | {
      'queue_length': waiting,
      'active_slots': int(np.sum(~idle)),
      'parked_slots': int(np.sum(idle & (self._table.held > 0))),
      'slots': len(idle),
      'policy_version': self._version,
      'tokens_per_s': rate,
    }

  def _cancel(self, job: _Job) -> None:
    with self._wake:
      self._cancels.append(job)
      self._wake.notify()

  # --- The engine thread.

  def _run(self) -> None:
    while True:
      with self._wake:
        self._wake.wait_for(self._has_work)
        if self._stopping:
          return
        cancels = self._take_messages()
      try:
        for job in cancels:
          self._end_cancelled(job)
        self._tick()
      except Exception as error:  # a step failed: nothing of its state can be trusted
        logging.exception('rollout step failed')
        self._recover(error)
        if self._dead is not None:
          return

  def _has_work(self) -> bool:
    return bool(
      self._stopping
      or self._inbox
      or self._cancels
      or self._next_weights
      or self._waiting
      or self._jobs
    )

  def _take_messages(self) -> list[_Job]:
    """Takes what other threads left; under _wake. Returns the cancelled requests."""
    self._waiting.extend(self._inbox)
    self._inbox.clear()
    cancels, self._cancels = self._cancels, []
    if self._next_weights is not None:
      self._variables, self._version = self._next_weights
      self._next_weights = None
      self._counts['weight_updates'] += 1
    return cancels

  def _end_cancelled(self, job: _Job) -> None:
    if self._jobs.get(job.slot) is job:
      self._end(job, 'cancelled')
    elif job in self._waiting:
      self._waiting.remove(job)
      self._deliver(job, 0, 'cancelled')

  def _tick(self) -> None:
    budget = self._config.prefill_budget_tokens
    self._place()
    while budget > 0 and (used := self._prefill()):
      budget -= used
      self._place()  # those that waited for a prefix that is there now
    self._admit()
    self._decode()

  def _place(self) -> None:
    """Moves waiting requests to idle slots, copying the prefixes they share."""
    table, held_back = self._table, []
    copies = []
    while self._waiting and (table.state == State.IDLE).any():
      job = self._waiting.popleft()
      usable = np.ones(len(table.state), bool)
      if not self._config.reuse_stale_prefix:
        usable = table.kv_version == self._version
      placement = table.place(job.prompt, usable)
      if placement is None:
        held_back.append(job)
        continue
      table.take(placement, job.prompt, self._version)
      if placement.source != placement.slot:
        copies.append((placement.source, placement.slot, placement.hit_tokens))
      job.slot = placement.slot
      self._jobs[job.slot] = job
      self._counts['prompt_tokens'] += len(job.prompt)
      self._counts['prefix_hit_tokens'] += placement.hit_tokens
      if table.held[job.slot] == table.target[job.slot]:
        self._ready.append(job.slot)
    self._waiting.extendleft(reversed(held_back))
    # In the order of placement: a later one may take the slot an earlier one copies.
    while copies:
      batch, copies = copies[: len(table.state)], copies[len(table.state) :]
      sources, targets, hits = zip(*batch)
      self._state = self._engine.copy_rows(
        self._state,
        self._rows(sources, len(table.state)),
        self._rows(targets, len(table.state)),
        np.int32(len(batch)),
        context=self._context(max(hits)),
      )
      self._counts['copies'] += len(batch)

  def _prefill(self) -> int:
    """One prefill call; returns its padded tokens, 0 when nothing was left to do."""
    table = self._table
    # Oldest first: `used` is when the slot was taken.
    slots = np.flatnonzero((table.state == State.PREFILL) & (table.held < table.target))
    if not slots.size:
      return 0
    slots = slots[np.argsort(table.used[slots])]
    remaining = table.target[slots] - table.held[slots]
    which, rows, chunk = prefill_plan.choose(
      remaining, self._engine.config.prefill_shapes
    )
    slots = slots[which]
    # A chunk that would pass the end of the context begins earlier, over known tokens.
    last = self._engine.config.context_tokens - chunk
    starts = np.minimum(table.held[slots], last)
    tokens = np.zeros((rows, chunk), np.int32)
    tokens[: len(slots)] = table.tokens[
      slots[:, None], starts[:, None] + np.arange(chunk)
    ]
    self._state = self._engine.prefill_rows(
      self._variables,
      self._state,
      self._rows(slots, rows),
      np.int32(len(slots)),
      tokens,
      self._rows(starts, rows),
      context=self._context(int(starts.max())),
    )
    reached = np.minimum(starts + chunk, table.target[slots])
    computed = int(np.sum(reached - table.held[slots]))
    table.held[slots] = reached
    self._counts['prefill_tokens'] += computed
    self._counts['prefill_padding_tokens'] += rows * chunk - computed
    self._ready.extend(slots[reached == table.target[slots]].tolist())
    return rows * chunk

  def _admit(self) -> None:
    """Lets the prefilled slots decode."""
    ready = [slot for slot in self._ready if slot in self._jobs]
    self._ready.clear()
    if not ready:
      return
    config = self._engine.config
    slots = make_slots(config.slots, config.max_stop_ids)
    for row, slot in enumerate(ready):
      job = self._jobs[slot]
      sampling, n = job.request.sampling, len(job.prompt)
      slots.length[row] = n - 1
      slots.token[row] = job.prompt[-1]
      slots.remaining[row] = min(sampling.max_tokens, config.context_tokens - n)
      slots.seed[row] = (job.seed >> 32) & 0xFFFFFFFF, job.seed & 0xFFFFFFFF
      slots.temperature[row] = sampling.temperature
      slots.top_p[row] = sampling.top_p
      slots.top_k[row] = min(sampling.top_k, self._engine.cfg.vocab_size)
      slots.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
    self._state = self._engine.admit(
      self._state, self._rows(ready, config.slots), np.int32(len(ready)), slots
    )
    self._table.state[ready] = State.DECODE

  def _decode(self) -> None:
    """One decode call, and what follows from it for each request."""
    table = self._table
    slots = table.where(State.DECODE)
    if not slots.size:
      return
    rows = next(r for r in self._engine.config.decode_rows if r >= len(slots))
    self._state, sampled = self._engine.generate_many(
      self._variables,
      self._state,
      self._rows(slots, rows),
      np.int32(len(slots)),
      np.int32(self._config.decode_steps),
      context=self._context(int(table.held[slots].max())),
    )
    sampled = jax.tree.map(lambda x: x[: len(slots)], jax.device_get(sampled))
    before = table.held[slots] + 1
    table.append(slots, sampled.counts, sampled.tokens, sampled.logprobs, self._version)
    self._count_sampled(int(sampled.counts.sum()))
    finite = np.isfinite(sampled.logprobs).all(axis=1)
    for row in np.flatnonzero(~finite):
      self._fail(
        self._jobs[int(slots[row])],
        EngineError(f'the weights of version {self._version} give non-finite logits'),
      )
    for row, slot in enumerate(slots.tolist()):
      job = self._jobs.get(slot)
      if job is not None and job.on_tokens is not None:
        self._stream(job, int(before[row]))
    for row in np.flatnonzero(sampled.ended != RUNNING):
      job = self._jobs.get(int(slots[row]))
      if job is not None:
        self._end(job, 'stop' if sampled.ended[row] == STOP else 'length')

  def _count_sampled(self, tokens: int) -> None:
    self._failures = 0
    self._counts['decode_calls'] += 1
    self._counts['sampled_tokens'] += tokens
    now = time.monotonic()
    self._rates.append((now, self._counts['sampled_tokens']))
    while len(self._rates) > 2 and self._rates[0][0] < now - _RATE_WINDOW_S:
      self._rates.popleft()

  def _stream(self, job: _Job, begin: int) -> None:
    end = self._table.held[job.slot] + 1
    try:
      job.on_tokens(tuple(self._table.tokens[job.slot, begin:end].tolist()))
    except Exception as error:  # the caller's fault costs the caller's request only
      logging.exception('on_tokens raised')
      self._fail(job, EngineError(f'on_tokens raised {error!r}'))

  def _end(self, job: _Job, reason: str) -> None:
    """The request of a slot ends with what it has; the slot is parked."""
    table, slot = self._table, job.slot
    decoded = table.state[slot] == State.DECODE
    count = int(table.held[slot]) + 1 - len(job.prompt) if decoded else 0
    del self._jobs[slot]
    table.park(slot)
    self._deliver(job, count, reason)

  def _deliver(self, job: _Job, count: int, reason: str) -> None:
    begin = len(job.prompt)
    take = lambda x: tuple(x[job.slot, begin : begin + count].tolist())
    table = self._table
    self._counts['cancelled' if reason == 'cancelled' else 'completions'] += 1
    job.future.set_result(
      GenerateResult(
        tokens=take(table.tokens),
        logprobs=take(table.logprobs),
        versions=take(table.versions),
        finish_reason=reason,
      )
    )

  def _fail(self, job: _Job, error: EngineError) -> None:
    if self._jobs.get(job.slot) is job:
      del self._jobs[job.slot]
      self._table.drop(job.slot)
    self._counts['failed'] += 1
    job.future.set_exception(error)

  def _recover(self, cause: Exception) -> None:
    """After a failed step: its requests fail, the state is made anew, the rest go on."""
    error = EngineError(f'a rollout step failed: {cause!r}')
    error.__cause__ = cause
    for job in list(self._jobs.values()):
      self._fail(job, error)
    self._ready.clear()
    self._failures += 1
    if self._failures >= self._config.max_failures:
      self._give_up(f'{self._failures} steps failed in a row, the last with {cause!r}')
      return
    self._table = self._new_table()
    self._state = self._engine.init_decode_state()

  def _give_up(self, reason: str) -> None:
    with self._wake:
      self._dead = self._dead or reason
      self._waiting.extend(self._inbox)
      self._inbox.clear()
    for job in [*self._jobs.values(), *self._waiting]:
      self._fail(job, EngineError(f'the rollout engine is not running: {self._dead}'))
    self._waiting.clear()

  def _rows(self, values, size: int) -> np.ndarray:
    rows = np.zeros(size, np.int32)
    rows[: len(values)] = values
    return rows

  def _context(self, tokens: int) -> int:
    """The smallest compiled context that holds so many tokens."""
    return next(c for c in self._engine.config.contexts if c >= tokens)


def _form(variables) -> tuple:
  leaves, structure = jax.tree.flatten(variables)
  return structure, [(x.shape, x.dtype) for x in leaves]
