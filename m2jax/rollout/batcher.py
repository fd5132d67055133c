"""The work of the engine thread: place, prefill, decode, deliver. Starts no threads.

One `tick` places waiting requests in idle slots (first come, first served, except that
a request waits for a prefix that is being prefilled for another one), prefills within a
budget, decodes a few steps and delivers the finished requests.

Axes: P rows of a call, N decode steps of a call.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging

from m2jax.checks import require
from m2jax.rollout import decode_plan, prefill_plan
from m2jax.rollout.api import GenerateRequest, GenerateResult
from m2jax.rollout.decode_state import RUNNING, STOP, make_slots
from m2jax.rollout.engine import Engine
from m2jax.rollout.slot_table import SlotTable, State

_RATE_WINDOW_S = 10.0
TOTALS = (
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
  """The engine could not serve a request, although the request was valid."""


class EngineLost(EngineError):
  """No call of the engine will succeed again; says why."""


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
  """How the engine thread divides its time.

  Attributes:
    decode_steps: steps per decode call; the host wakes once per call.
    prefill_budget_tokens: padded prompt tokens computed between two decode calls.
    min_copy_tokens: shortest shared prefix that is copied or waited for.
    reuse_stale_prefix: parked K/V of older weights may be reused (see scheduler.py).
    max_failures: consecutive failing steps after which the scheduler gives up.
    seed: of the random stream for requests without a seed.
  """

  decode_steps: int = 8
  prefill_budget_tokens: int = 1024
  min_copy_tokens: int = 8
  reuse_stale_prefix: bool = True
  max_failures: int = 3
  seed: int = 0

  def __post_init__(self):
    for field in ('decode_steps', 'prefill_budget_tokens', 'min_copy_tokens'):
      require(self, getattr(self, field) >= 1, field, 'at least 1')


@dataclasses.dataclass(eq=False)
class Job:
  """A request in progress; slot is -1 while it waits."""

  prompt: np.ndarray
  request: GenerateRequest
  seed: int
  on_tokens: Callable[[tuple[int, ...]], None] | None
  future: concurrent.futures.Future
  slot: int = -1


class Batcher:
  """The engine's requests, slots and device state; used by one thread.

  Attributes:
    variables, version: the weights in use; may be replaced between two ticks.
    state: the engine's DecodeState.
    waiting: requests without a slot, oldest first.
    jobs: requests by slot.
    counts: totals since the start, by the names in TOTALS.
    failures: failed ticks since the last successful decode call.
  """

  def __init__(
    self, engine: Engine, variables: Any, version: int, config: SchedulerConfig
  ):
    if config.decode_steps > engine.config.max_steps:
      raise ValueError(
        f'SchedulerConfig.decode_steps={config.decode_steps}: must be at most '
        f'EngineConfig.max_steps={engine.config.max_steps}'
      )
    self.engine = engine
    self.config = config
    self.variables = variables
    self.version = version
    self.waiting: collections.deque[Job] = collections.deque()
    self.counts = collections.Counter()
    self.failures = 0
    self._rates = collections.deque([(time.monotonic(), 0)])
    self.reset()

  def reset(self) -> None:
    """Empties the slots and creates a new device state; keeps the waiting requests."""
    config = self.engine.config
    self.state = self.engine.init_decode_state()
    self.table = SlotTable(
      config.slots,
      config.context_tokens,
      min_copy_tokens=self.config.min_copy_tokens,
    )
    self.jobs: dict[int, Job] = {}
    self._ready: list[int] = []  # slots prefilled, not yet admitted

  @property
  def busy(self) -> bool:
    return bool(self.waiting or self.jobs)

  @property
  def tokens_per_s(self) -> float:
    """Sampled tokens over the last ten seconds."""
    then, before = self._rates[0]
    elapsed = max(time.monotonic() - then, 1e-9)
    return (self.counts['sampled_tokens'] - before) / elapsed

  def cancel(self, job: Job) -> None:
    """Finishes a request with its tokens so far; no effect on a finished one."""
    if self.jobs.get(job.slot) is job:
      self._end(job, 'cancelled')
    elif job in self.waiting:
      self.waiting.remove(job)
      self._deliver(job, 0, 'cancelled')

  def tick(self) -> None:
    budget = self.config.prefill_budget_tokens
    self._place()
    while budget > 0 and (used := self._prefill()):
      budget -= used
      self._place()  # requests that waited for a prefix that is now cached
    self._admit()
    self._decode()

  def _place(self) -> None:
    """Moves waiting requests to idle slots, copying the prefixes they share."""
    table, held_back = self.table, []
    copies = []
    # Requests held back still claim a slot: later requests do not overtake them.
    limit = self.engine.config.decode_rows[-1]
    while self.waiting and len(self.jobs) + len(held_back) < limit:
      job = self.waiting.popleft()
      usable = np.ones(len(table.state), bool)
      if not self.config.reuse_stale_prefix:
        usable = table.kv_version == self.version
      placement = table.place(job.prompt, usable)
      if placement is None:
        held_back.append(job)
        continue
      table.take(placement, job.prompt, self.version)
      if placement.source != placement.slot:
        copies.append((placement.source, placement.slot, placement.hit_tokens))
      job.slot = placement.slot
      self.jobs[job.slot] = job
      self.counts['prompt_tokens'] += len(job.prompt)
      self.counts['prefix_hit_tokens'] += placement.hit_tokens
      if table.held[job.slot] == table.target[job.slot]:
        self._ready.append(job.slot)
    self.waiting.extendleft(reversed(held_back))
    if copies:
      # In the order of placement: a later request may take the slot that an earlier
      # one copies from.
      sources, targets, hits = zip(*copies, strict=True)
      self.state = self.engine.copy_rows(
        self.state,
        self._rows(sources, len(table.state)),
        self._rows(targets, len(table.state)),
        np.int32(len(copies)),
        context=self._context(max(hits)),
      )
      self.counts['copies'] += len(copies)

  def _prefill(self) -> int:
    """One prefill call; returns its padded tokens, 0 if there was nothing to do."""
    table = self.table
    # Oldest first: `used` is when the slot was taken.
    slots = np.flatnonzero((table.state == State.PREFILL) & (table.held < table.target))
    if not slots.size:
      return 0
    slots = slots[np.argsort(table.used[slots])]
    remaining = table.target[slots] - table.held[slots]
    which, rows, chunk = prefill_plan.choose(
      remaining, self.engine.config.prefill_shapes
    )
    slots = slots[which]
    # A chunk that would exceed the context starts earlier, at tokens already computed.
    last = self.engine.config.context_tokens - chunk
    starts = np.minimum(table.held[slots], last)
    tokens = np.zeros((rows, chunk), np.int32)
    tokens[: len(slots)] = table.tokens[
      slots[:, None], starts[:, None] + np.arange(chunk)
    ]
    self.state = self.engine.prefill_rows(
      self.variables,
      self.state,
      self._rows(slots, rows),
      np.int32(len(slots)),
      tokens,
      self._rows(starts, rows),
      context=self._context(int(starts.max())),
    )
    reached = np.minimum(starts + chunk, table.target[slots])
    computed = int(np.sum(reached - table.held[slots]))
    table.held[slots] = reached
    self.counts['prefill_tokens'] += computed
    self.counts['prefill_padding_tokens'] += rows * chunk - computed
    self._ready.extend(slots[reached == table.target[slots]].tolist())
    return rows * chunk

  def _admit(self) -> None:
    """Sets the prefilled slots decoding."""
    ready, self._ready = self._ready, []
    if not ready:
      return
    config = self.engine.config
    slots = make_slots(config.slots, config.max_stop_ids)
    for row, slot in enumerate(ready):
      job = self.jobs[slot]
      sampling, n = job.request.sampling, len(job.prompt)
      slots.length[row] = n - 1
      slots.token[row] = job.prompt[-1]
      slots.remaining[row] = min(sampling.max_tokens, config.context_tokens - n)
      slots.seed[row] = (job.seed >> 32) & 0xFFFFFFFF, job.seed & 0xFFFFFFFF
      slots.temperature[row] = sampling.temperature
      slots.top_p[row] = sampling.top_p
      slots.top_k[row] = min(sampling.top_k, self.engine.cfg.vocab_size)
      slots.stop_ids[row, : len(sampling.stop_ids)] = sampling.stop_ids
    self.state = self.engine.admit(
      self.state, self._rows(ready, config.slots), np.int32(len(ready)), slots
    )
    self.table.state[ready] = State.DECODE

  def _decode(self) -> None:
    """Decodes a few steps of every active slot, at the least cost."""
    slots, config = self.table.where(State.DECODE), self.engine.config
    if not slots.size:
      return
    held = self.table.held[slots]
    for which, rows, context in decode_plan.choose(
      held, config.decode_rows, config.contexts
    ):
      if not self._decode_call(slots[which], rows, context):
        return

  def _decode_call(self, slots: np.ndarray, rows: int, context: int) -> bool:
    """One decode call and its effect on each request; False if all requests failed."""
    table = self.table
    self.state, sampled = self.engine.generate_many(
      self.variables,
      self.state,
      self._rows(slots, rows),
      np.int32(len(slots)),
      np.int32(self.config.decode_steps),
      context=context,
    )
    sampled = jax.tree.map(lambda x: x[: len(slots)], jax.device_get(sampled))
    before = table.held[slots] + 1
    table.append(slots, sampled.counts, sampled.tokens, sampled.logprobs, self.version)
    self._count_sampled(int(sampled.counts.sum()))
    drawn = np.arange(sampled.logprobs.shape[1]) < sampled.counts[:, None]
    broken = (~np.isfinite(sampled.logprobs) & drawn).any(axis=1)
    if broken.any():
      # NaN in the cache would spread: an attention weight of 0 times NaN is NaN.
      self.fail_running(
        EngineError(f'the weights of version {self.version} give non-finite logits')
      )
      self.reset()
      return False
    for slot, begin in zip(slots.tolist(), before.tolist(), strict=True):
      job = self.jobs.get(slot)
      if job is not None and job.on_tokens is not None:
        self._stream(job, begin)
    for row in np.flatnonzero(sampled.finish_code != RUNNING):
      job = self.jobs.get(int(slots[row]))
      if job is not None:
        self._end(job, 'stop' if sampled.finish_code[row] == STOP else 'length')
    return True

  def _count_sampled(self, tokens: int) -> None:
    self.failures = 0
    self.counts['decode_calls'] += 1
    self.counts['sampled_tokens'] += tokens
    now = time.monotonic()
    self._rates.append((now, self.counts['sampled_tokens']))
    while len(self._rates) > 2 and self._rates[0][0] < now - _RATE_WINDOW_S:
      self._rates.popleft()

  def _stream(self, job: Job, begin: int) -> None:
    end = self.table.held[job.slot] + 1
    try:
      job.on_tokens(tuple(self.table.tokens[job.slot, begin:end].tolist()))
    except Exception as error:  # an error of one caller fails that request only
      logging.exception('on_tokens raised')
      self.fail(job, EngineError(f'on_tokens raised {error!r}'))

  def _end(self, job: Job, reason: str) -> None:
    """Finishes a request with its tokens so far and parks its slot."""
    table, slot = self.table, job.slot
    decoded = table.state[slot] == State.DECODE
    count = int(table.held[slot]) + 1 - len(job.prompt) if decoded else 0
    del self.jobs[slot]
    table.park(slot)
    self._deliver(job, count, reason)

  def _deliver(self, job: Job, count: int, reason: str) -> None:
    begin = len(job.prompt)
    take = lambda x: x[job.slot, begin : begin + count].copy()
    table = self.table
    self.counts['cancelled' if reason == 'cancelled' else 'completions'] += 1
    job.future.set_result(
      GenerateResult(
        tokens=take(table.tokens),
        logprobs=take(table.logprobs),
        versions=take(table.versions),
        finish_reason=reason,
        experts=self._experts(job, begin + count),
      )
    )

  def _experts(self, job: Job, tokens: int) -> np.ndarray | None:
    """GenerateResult.experts of the request's first `tokens` tokens."""
    if not self.engine.config.record_experts:
      return None
    cfg = self.engine.cfg
    ids = np.full((tokens, cfg.num_layers, cfg.experts_per_token), -1, np.int16)
    held = int(self.table.held[job.slot]) if job.slot >= 0 else 0
    if held := min(held, tokens):
      found = self.engine.expert_ids(
        self.state, np.int32(job.slot), context=self._context(held)
      )
      ids[:held] = np.asarray(found)[:held]
    return ids

  def fail(self, job: Job, error: EngineError) -> None:
    """Fails a request with an error; the cache of its slot is not reused."""
    if self.jobs.get(job.slot) is job:
      del self.jobs[job.slot]
      self.table.drop(job.slot)
    self.counts['failed'] += 1
    job.future.set_exception(error)

  def fail_running(self, error: EngineError) -> None:
    """Fails the requests that have slots."""
    for job in list(self.jobs.values()):
      self.fail(job, error)
    self._ready.clear()

  def _rows(self, values, size: int) -> np.ndarray:
    rows = np.zeros(size, np.int32)
    rows[: len(values)] = values
    return rows

  def _context(self, tokens: int) -> int:
    """The smallest compiled context that holds `tokens` tokens."""
    return next(c for c in self.engine.config.contexts if c >= tokens)
