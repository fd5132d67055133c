"""The prefill side: computes the pages of prompts and hands them over; draws no token.

An engine of its own, on devices of its own, with its own prefix cache. Sequences are
placed, prefilled in chunks and shared as in `serving`. Instead of decoding, each
chunk's pages are read to the host while the next chunk is computed; the slot is free
when the last are being read.

Axes: n pages of a part.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import logging

from m2jax.observe import progress
from m2jax.rollout.api import EngineError
from m2jax.rollout.disaggregation import handover
from m2jax.rollout.disaggregation.handover import Ask, HandoverError, Part, Receive
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.engine.pages import UNUSED, Pages
from m2jax.rollout.serving.batcher import Batcher
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.serving.scheduler import Scheduler


@dataclasses.dataclass(eq=False)
class PrefillJob(Job):
  """An ask in progress.

  Attributes:
    read: pages of the sequence that have been read, or that the other side has.
    newest: policy version of the last chunk; `Sequences.version` is the oldest.
  """

  ask: Ask | None = None
  receive: Receive | None = None
  read: int = 0
  newest: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class _Read:
  """Pages on the way to the host: a Part whose arrays are on the device and padded."""

  job: PrefillJob
  part: Part
  num_pages: int
  last: bool


class PrefillBatcher(Batcher):
  """The work of a prefill engine's thread."""

  def __init__(self, engine, variables, version, config, *, part_pages: int):
    self._part_pages = part_pages
    super().__init__(engine, variables, version, config)

  def reset(self) -> None:
    super().reset()
    self._reads: list[_Read] = []

  def warmup(self) -> None:
    """Compiles what is called here: no decoding."""
    engine, config, g = self.engine, self.engine.config, self.engine.groups
    rows = lambda *shape: np.zeros((g * shape[0], *shape[1:]), np.int32)
    count = len(config.table_sizes) * len(config.prefill_shapes)
    report = progress.counted('compiling the engine', count)
    for n in config.table_sizes:
      for size, chunk in config.prefill_shapes:
        report()
        tokens, tables = rows(size, chunk), rows(size, n)
        self.state = engine.prefill_rows(
          self.variables, self.state, tokens, rows(size), rows(size), tables
        )
    nothing = np.full(self._part_pages, UNUSED, np.int32)
    jax.block_until_ready(engine.read_pages(self.state, np.int32(0), nothing))
    if self.tiers is not None:
      self.state = self.tiers.warmup(self.state)
    progress.report('')

  @property
  def busy(self) -> bool:
    ready = any(job.ask.version <= self.version for job in self.waiting)
    moving = self.tiers is not None and self.tiers.busy
    return bool(ready or self.jobs or self._reads or moving)

  def tick(self) -> None:
    begin = time.monotonic()
    if self.tiers is not None:
      self.tiers.read_ahead(list(self.waiting)[: len(self.table.state)])
    self._place()
    self._prefill()
    earlier, self._reads = self._reads, []
    self._hand_over(earlier)  # while the device computes
    self._ready.clear()
    for job in list(self.jobs.values()):
      self._read(job)
    if not self.jobs:
      self._hand_over(self._reads)
      self._reads = []
    self.counts['busy_s'] += time.monotonic() - begin
    if self.tiers is not None:
      self.tiers.settle(self.state, idle=not self.jobs)

  def _place(self) -> None:
    """Those that want newer weights wait for them."""
    early = [job for job in self.waiting if job.ask.version > self.version]
    if early:
      ready = [job for job in self.waiting if job.ask.version <= self.version]
      self.waiting = collections.deque(ready)
    try:
      super()._place()
    finally:
      self.waiting.extend(early)

  def _restart_prefills(self) -> None:
    """Does nothing: some of their pages have been handed over, with their versions."""

  def _take(self, job: PrefillJob, hit: int) -> None:
    super()._take(job, hit)
    job.newest = self.version

  def _prefill(self) -> int:
    before = self.table.held.copy()
    used = super()._prefill()
    for slot in np.flatnonzero(self.table.held != before).tolist():
      self.jobs[slot].newest = self.version
    return used

  def _read(self, job: PrefillJob) -> None:
    """Starts reading the pages that are complete; frees the slot after the last."""
    table, slot, page_tokens = self.table, job.slot, self.table.page_tokens
    held, target = int(table.held[slot]), int(table.target[slot])
    done = held == target
    complete = self.engine.config.pages_of(held) if done else held // page_tokens
    while job.read < complete:
      begin, end = job.read, min(job.read + self._part_pages, complete)
      at = np.full(self._part_pages, UNUSED, np.int32)
      at[: end - begin] = table.tables[slot, begin:end]
      pages = self.engine.read_pages(self.state, np.int32(table.group(slot)), at)
      versions = int(table.version[slot]), job.newest
      part = Part(begin, min(end * page_tokens, held), versions, pages)
      last = done and end == complete
      self._reads.append(_Read(job, part, end - begin, last))
      job.read = end
    if done:
      self._share(slot)
      self._leave(job)

  def _hand_over(self, reads: list[_Read]) -> None:
    for index, read in enumerate(reads):
      pages = Pages(*jax.device_get(tuple(read.part.pages)))
      pages = handover.first(pages, read.num_pages)
      if not handover.finite(pages):
        # They would spread: an attention weight of 0 times NaN is NaN.
        self._reads = reads[index:]
        version = read.part.versions[1]
        self.fail_running(
          EngineError(f'the weights of version {version} give non-finite keys, values')
        )
        self.reset()
        return
      job = read.job
      if job.future.done():
        continue  # cancelled
      self.failures = 0
      self.counts['handover_bytes'] += sum(x.nbytes for x in pages if x is not None)
      job.receive(dataclasses.replace(read.part, pages=pages))
      if read.last:
        self._deliver(job, 'done', 'done')

  def cancel(self, job: PrefillJob) -> None:
    super().cancel(job)
    if not job.future.done():  # its last pages are being read
      self._deliver(job, 'cancelled', 'cancelled')

  def _result(self, job: PrefillJob, reason: str) -> str:
    return reason

  def fail(self, job: PrefillJob, error: EngineError) -> None:
    if not job.future.done():
      super().fail(job, error)
      job.receive(HandoverError(str(error)))

  def fail_running(self, error: EngineError) -> None:
    super().fail_running(error)
    reads, self._reads = self._reads, []
    for read in reads:
      self.fail(read.job, error)


class PrefillScheduler(Scheduler):
  """A prefill engine as a service, for decode engines of this process (`Prefills`)."""

  def __init__(
    self,
    engine: Engine,
    variables: Any,
    version: int = 0,
    config: SchedulerConfig | None = None,
    part_pages: int = handover.PART_PAGES,
  ):
    """See `Scheduler`; part_pages: of `HandoverConfig`."""
    config = config or SchedulerConfig(decode_steps=1, gather_s=0.0)
    if config.reuse_stale_prefix:
      raise ValueError(
        'SchedulerConfig.reuse_stale_prefix=True: must be False for a prefill engine, '
        'whose pages name the weights that computed them'
      )
    handover.check_moves_pages(engine)
    make = functools.partial(PrefillBatcher, part_pages=part_pages)
    super().__init__(engine, variables, version, config, make)
    self.layout = handover.layout(engine.cfg, engine.config, part_pages)

  @property
  def available(self) -> bool:
    return self.alive

  def submit(self, request, on_tokens=None):
    """A prefill engine draws no tokens."""
    raise NotImplementedError('a prefill engine serves `ask` only')

  def ask(self, ask: Ask, receive: Receive) -> Callable[[], None]:
    """See `Prefills`.

    Raises:
      ValueError: there is nothing to compute, or the sequence is too long.
      HandoverError: the engine has stopped.
    """
    n, page_tokens = len(ask.tokens), self._engine.config.page_tokens
    if n > self.context_tokens or not 0 <= ask.first_page * page_tokens < n - 1:
      raise ValueError(
        f'first_page={ask.first_page} of {n} tokens: must begin before the last token, '
        f'and the tokens be at most {self.context_tokens}'
      )
    job = PrefillJob(
      prompt=ask.tokens,
      request=None,
      seed=0,
      on_tokens=None,
      future=concurrent.futures.Future(),
      ask=ask,
      receive=receive,
      read=ask.first_page,
    )
    with self._wake:
      if self._dead is not None:
        raise HandoverError(f'the prefill engine is not running: {self._dead}')
      self._inbox.append(job)
      self._wake.notify()
    return lambda: self._cancel(job)

  def give_up(self, reason: str) -> None:
    logging.warning('the prefill engine of this process: %s', reason)
