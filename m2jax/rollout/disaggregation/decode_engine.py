"""Prefill and decoding on engines of their own: the decode side, like `Scheduler`.

A request is placed as on one engine: it gets a slot and pages, and its longest cached
prefix is found in the decode engine's own cache. The missing pages are then requested
from a prefill engine (`handover.Prefills`), unless they are few: the decode engine
prefills up to `HandoverConfig.local_tokens` itself. Pages are written to the sequence's
own pages as they arrive; when the last has, the sequence decodes. All tokens are drawn
here, with a version and a random stream as on one engine (`serving`).

The prefill engine is an aid, never a condition: if it stops, refuses or is silent for
too long, the decode engine prefills what is missing itself and counts it.

Weights are replaced here first, then at the prefill engine, which computes nothing for
a version before it has its weights. Pages of newer weights than the decode engine's
wait for those weights if the engine has been given them; otherwise (another decode
engine of the same prefill engine got them first) it prefills itself. Pages of older
weights or of several versions are used only by the request in flight that asked for
them, like its own older keys and values, and are never cached.

Axes: n pages of a part.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging

from m2jax.rollout.disaggregation import break_even, handover
from m2jax.rollout.disaggregation.handover import (
  Ask,
  HandoverConfig,
  HandoverError,
  NewerWeights,
  Part,
  Prefills,
)
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.engine.pages import UNUSED, Pages
from m2jax.rollout.serving.batcher import Batcher
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.serving.scheduler import Scheduler

TOTALS = (
  'handovers',
  'handover_tokens',
  'handover_pages',
  'handover_bytes',
  'handover_failures',
  'handover_timeouts',
  'handover_newer',
  'prefills_alone',
)
_MIXED = np.iinfo(np.int64).min  # the version of pages of several


@dataclasses.dataclass(eq=False)
class _Pending:
  """An ask that has not been answered completely.

  Attributes:
    since: when it was made, or its last part was stored.
  """

  job: Job
  since: float
  cancel: Callable[[], None] = lambda: None


class DecodeBatcher(Batcher):
  """The work of the decode engine's thread."""

  def __init__(
    self,
    engine: Engine,
    variables: Any,
    version: int,
    config: SchedulerConfig,
    *,
    prefills: Prefills,
    how: HandoverConfig,
    wake: Callable[[], None],
  ):
    """See `Batcher`.

    Args:
      wake: called from any thread when something has arrived.
    """
    self._prefills, self._how, self._wake = prefills, how, wake
    self._pending: dict[int, _Pending] = {}  # by slot
    self._arrivals: collections.deque[tuple[_Pending, Part | HandoverError]]
    self._arrivals = collections.deque()  # appended to by other threads
    self._early: list[tuple[_Pending, Part]] = []  # arrived, of weights to come
    self._last_arrival = -np.inf
    # Without measurements, what is no whole page.
    local = how.local_tokens
    self.local_tokens = engine.config.page_tokens if local is None else local
    self._left = False  # whether a sequence has left its slot in this tick
    super().__init__(engine, variables, version, config)

  def warmup(self) -> None:
    super().warmup()
    layout = handover.layout(self.engine.cfg, self.engine.config, self._how.part_pages)
    zeros = [x and np.zeros(*x) for x in handover.shapes(layout, self._how.part_pages)]
    self._write([], 0, Pages(*zeros))
    if self._how.local_tokens is None:
      self.state, rates = break_even.measure(
        self.engine,
        self.variables,
        self.state,
        self.config.decode_steps,
        self._how.part_pages,
      )
      self.local_tokens = rates.local_tokens()
      logging.info('%s: up to %d tokens are prefilled here', rates, self.local_tokens)
    jax.block_until_ready(self.state)

  @property
  def busy(self) -> bool:
    """Whether a tick can do anything now."""
    if self._arrivals or any(not self._is_early(part) for _, part in self._early):
      return True
    if self.jobs and len(self._pending) == len(self.jobs):  # all wait for pages
      moving = self.tiers is not None and self.tiers.busy
      return bool(moving or (self._left and self.waiting))
    return super().busy

  @property
  def poll_s(self) -> float | None:
    """Seconds until an ask has waited too long."""
    if not self._pending:
      return None
    since = min(pending.since for pending in self._pending.values())
    return max(since + self._how.timeout_s - time.monotonic(), 0.0)

  def tick(self) -> None:
    self._left = False
    self._receive()
    self._expire()
    super().tick()

  def _take(self, job: Job, hit: int) -> None:
    super()._take(job, hit)
    table, slot = self.table, job.slot
    if table.target[slot] - table.held[slot] <= self.local_tokens:
      return
    pending = _Pending(job, time.monotonic())
    first_page = int(table.held[slot]) // table.page_tokens
    ask = Ask(job.tokens, first_page, self.version)
    try:
      if not self._prefills.available:
        raise HandoverError('there is no prefill engine')
      pending.cancel = self._prefills.ask(ask, lambda x: self._arrive(pending, x))
    except HandoverError:
      self.counts['prefills_alone'] += 1
    else:
      self._pending[slot] = pending

  def _arrive(self, pending: _Pending, part: Part | HandoverError) -> None:
    """Called from any thread."""
    self._arrivals.append((pending, part))
    self._wake()

  def _to_prefill(self) -> np.ndarray:
    slots = super()._to_prefill()
    return slots[[slot not in self._pending for slot in slots.tolist()]]

  def _asked(self, pending: _Pending) -> bool:
    return self._pending.get(pending.job.slot) is pending

  def _is_early(self, part: Part | HandoverError) -> bool:
    """Whether the pages are of weights that this engine does not have yet."""
    return isinstance(part, Part) and part.versions[1] > self.version

  def _is_late(self, part: Part | HandoverError) -> bool:
    """Whether some of the keys are of weights that may not be reused."""
    fresh = not self.config.reuse_stale_prefix
    return fresh and isinstance(part, Part) and part.versions[0] < self.version

  def _receive(self) -> None:
    """Takes what has arrived; early parts wait without delaying other asks."""
    arrived, self._early = self._early, []
    while self._arrivals:
      self._last_arrival = time.monotonic()
      arrived.append(self._arrivals.popleft())
    for pending, part in arrived:
      if not self._asked(pending):
        continue  # cancelled
      if self._is_early(part):
        self._early.append((pending, part))
      elif self._is_late(part):
        self._restart(pending.job)
      elif isinstance(part, NewerWeights):
        self._prefill_alone(pending, 'handover_newer', str(part))
      elif isinstance(part, HandoverError):
        self._prefill_alone(pending, 'handover_failures', str(part))
      elif reason := self._unfit(pending.job.slot, part):
        self._prefill_alone(pending, 'handover_failures', reason)
      else:
        self._store(pending.job.slot, part)
        pending.since = time.monotonic()

  def _unfit(self, slot: int, part: Part) -> str | None:
    """Why a part is not the next one of a slot's sequence; None if it is."""
    table, config = self.table, self.engine.config
    start, held = part.first_page * config.page_tokens, part.held
    if start != table.held[slot] or not start < held <= table.target[slot]:
      return f'pages of tokens {start} to {held} after {table.held[slot]}'
    if held % config.page_tokens and held != table.target[slot]:
      return f'an incomplete page after {held} tokens'
    pages = config.pages_of(held) - part.first_page
    if part.num_pages != pages or pages > self._how.part_pages:
      return f'{part.num_pages} pages of tokens {start} to {held}'
    tokens = part.pages.tokens.reshape(-1)[: held - start]
    if not np.array_equal(tokens, table.tokens[slot, start:held]):
      return 'pages of other tokens'
    return None

  def _store(self, slot: int, part: Part) -> None:
    table = self.table
    end = part.first_page + part.num_pages
    at = table.tables[slot, part.first_page : end]
    self._save_pages()
    self._write(at, table.group(slot), part.pages)
    self.counts['handover_tokens'] += part.held - int(table.held[slot])
    self.counts['handover_pages'] += part.num_pages
    self.counts['handover_bytes'] += part.nbytes
    table.held[slot] = part.held
    if any(version != table.version[slot] for version in part.versions):
      table.version[slot] = _MIXED
    self._share(slot)
    if part.held == table.target[slot]:
      del self._pending[slot]
      self._ready.append(slot)
      self.counts['handovers'] += 1

  def _write(self, at, group: int, pages: Pages) -> None:
    table = np.full(self._how.part_pages, UNUSED, np.int32)
    table[: len(at)] = at
    pages = handover.pad(pages, len(table))
    self.state = self.engine.write_pages(self.state, np.int32(group), table, pages)

  def _expire(self) -> None:
    """Gives up what has waited for too long, and an engine that sends nothing."""
    least = time.monotonic() - self._how.timeout_s
    expired = [p for p in self._pending.values() if p.since <= least]
    reason = f'no pages for {self._how.timeout_s:g} s'
    for pending in expired:
      self._prefill_alone(pending, 'handover_timeouts', reason)
    if expired and self._last_arrival <= least:
      self._prefills.give_up(reason)

  def _prefill_alone(self, pending: _Pending, counter: str, reason: str) -> None:
    """Leaves the rest of a sequence to this engine's prefill."""
    logging.log_every_n_seconds(
      logging.WARNING, 'the decode engine prefills itself: %s', 10, reason
    )
    del self._pending[pending.job.slot]
    pending.cancel()
    self.counts[counter] += 1
    self.counts['prefills_alone'] += 1

  def _leave(self, job: Job) -> None:
    self._left = True
    if (pending := self._pending.pop(job.slot, None)) is not None:
      pending.cancel()
    super()._leave(job)


class Disaggregated(Scheduler):
  """Serves requests on a decode engine and a prefill engine.

  `start`, `update_weights` and `stop` apply to both.
  """

  def __init__(
    self,
    engine: Engine,
    variables: Any,
    prefills: Prefills,
    version: int = 0,
    config: SchedulerConfig | None = None,
    how: HandoverConfig | None = None,
  ):
    """See `Scheduler`.

    Args:
      engine: decodes. In one process its devices must not be the prefill engine's, if
        either has several.
      prefills: a prefill engine with the same weights; not started.

    Raises:
      ValueError: the engines' sizes do not fit; names the field.
    """
    how = how or HandoverConfig()
    handover.check_moves_pages(engine)
    mine = handover.layout(engine.cfg, engine.config, how.part_pages)
    if prefills.layout is not None:
      handover.check_layouts(prefills.layout, mine)
    make = functools.partial(DecodeBatcher, prefills=prefills, how=how, wake=self.wake)
    super().__init__(engine, variables, version, config, make)
    self._prefills = prefills
    self._replacing = threading.Lock()

  def start(self, *, warmup: bool = True) -> Disaggregated:
    self._prefills.start(warmup=warmup)
    super().start(warmup=warmup)
    return self

  def stop(self) -> None:
    super().stop()
    self._prefills.stop()

  def update_weights(self, variables: Any, version: int) -> None:
    with self._replacing:
      super().update_weights(variables, version)
      self._prefills.update_weights(variables, version)

  def stats(self) -> dict[str, float]:
    """`Scheduler.stats`, with these totals and the prefill engine's statistics.

    handovers: sequences that were handed over completely, with their tokens, pages and
      bytes. prefills_alone: prefills here of sequences long enough to be handed over,
      because there was no prefill engine, it failed, it was silent, or it computes with
      weights that this engine lacks; handover_failures, handover_timeouts and
      handover_newer are the last three. local_tokens: the most missing tokens that this
      engine prefills itself. prefill_engine_*: `Prefills.stats`.
    """
    counts = self._batcher.counts
    others = self._prefills.stats().items()
    return (
      super().stats()
      | {key: counts[key] for key in TOTALS}
      | {'local_tokens': self._batcher.local_tokens}
      | {f'prefill_engine_{key}': value for key, value in others}
    )
