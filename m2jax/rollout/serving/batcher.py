"""The work of the engine thread: place, prefill, decode, deliver. Starts no threads.

One `tick` places waiting requests in idle slots (first come, first served, except that
a request waits for a prefix that is being prefilled for another one), prefills within a
budget, decodes a few steps and delivers the finished requests. While the same sequences
continue decoding, each decode call is made before the tokens of the previous one are
read (`decode_calls.may_repeat`), and a tick does nothing else.

A request is placed when there are pages for its prompt. When pages run out while it
decodes, the sequence that started last is retracted: it waits in front of the queue,
keeps the tokens drawn so far with their log-probabilities, versions and expert ids, and
continues its random stream.

Axes: g groups of devices, P rows of a group in a call, N decode steps of a call.
"""

from __future__ import annotations

import collections
import itertools
import time
from typing import Any

import jax
import numpy as np
from absl import logging

from m2jax.rollout.api import EngineError, NewTokens
from m2jax.rollout.engine import speculative
from m2jax.rollout.engine.decode_state import RUNNING, STOP, make_slots
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving import constrained, decode_calls, plan
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.decode_calls import Call, DecodeCalls, Shape, lay, spread
from m2jax.rollout.serving.drafting import Drafting
from m2jax.rollout.serving.jobs import Job
from m2jax.rollout.serving.rate import Rate
from m2jax.rollout.serving.sequences import Sequences, State
from m2jax.rollout.serving.swap import Pauses
from m2jax.rollout.tiers import tiers
from m2jax.rollout.tiers.page_journal import PageJournal

TOTALS = (
  'prompt_tokens',
  'prefix_hit_tokens',
  'prefill_tokens',
  'prefill_padding_tokens',
  'prefill_positions',
  'sampled_tokens',
  'decode_calls',
  'ahead_calls',
  'retractions',
  'completions',
  'cancelled',
  'failed',
  'weight_updates',
  'busy_s',
)


class Batcher:
  """The engine's requests, slots and device state; used by one thread.

  Attributes:
    variables, version: the weights in use; see `replace_weights`.
    state: the engine's DecodeState.
    waiting: requests without a slot, oldest first.
    jobs: requests by slot.
    counts: totals since the start, by the names in TOTALS.
    journal: changes of the cached pages.
    failures: failed ticks since the last successful decode call.
    pauses: pauses of decoding while weights are replaced.
  """

  def __init__(
    self, engine: Engine, variables: Any, version: int, config: SchedulerConfig
  ):
    config.check(engine.config)
    self.engine = engine
    self.config = config
    self._looks_ahead = config.look_ahead and not engine.waits_for_tokens
    self.drafting = Drafting(engine.config.draft_tokens, config.draft_tokens)
    self.variables = variables
    self.version = version
    self.waiting: collections.deque[Job] = collections.deque()
    self.counts = collections.Counter()
    self.failures = 0
    self.pauses = Pauses()
    self.journal = PageJournal()
    self._rate = Rate()
    self.tiers = tiers.create(engine, config)
    if self.tiers is not None:
      self.tiers.use(variables, version)
    self.reset()

  # Seconds after which `tick` has something to do, whatever else happens.
  poll_s: float | None = None

  def reset(self) -> None:
    """Empties the slots and creates a new device state; keeps the waiting requests."""
    self.state = self.engine.init_decode_state()
    self.journal.add('cleared')
    self.table = Sequences(self.engine.config, self.engine.groups, self.journal)
    self.jobs: dict[int, Job] = {}
    self._ready: list[int] = []  # slots prefilled, not yet admitted
    self._decode_calls = DecodeCalls(self.engine, self.drafting)
    self._call: Call | None = None  # made ahead
    if self.tiers is not None:
      self.tiers.attach(self.table)

  def warmup(self) -> None:
    """Compiles every shape."""
    self.state = self.engine.warmup(self.variables, self.state)
    if self.tiers is not None:
      self.state = self.tiers.warmup(self.state)

  def replace_weights(self, variables: Any, version: int) -> None:
    """Call it between two ticks; decoding sequences continue with their K/V."""
    self._land()
    self.variables, self.version = variables, version
    self.pauses.exchanged(decoding=bool(self.table.where(State.DECODE).size))
    if not self.config.reuse_stale_prefix:
      for cache in self.table.caches:
        cache.clear()
      self._restart_prefills()
    if self.tiers is not None:
      self.tiers.use(variables, version)
    self.counts['weight_updates'] += 1

  def _restart_prefills(self) -> None:
    """Half-computed prompts wait again: their first token would come from the new
    weights over keys of the old ones."""
    slots = self.table.where(State.PREFILL)
    slots = slots[self.table.held[slots] > 0]
    for slot in slots[np.argsort(-self.table.started[slots])].tolist():
      self._restart(self.jobs[slot])

  def _restart(self, job: Job) -> None:
    self._leave(job)
    self.waiting.appendleft(job)

  @property
  def busy(self) -> bool:
    moving = self.tiers is not None and self.tiers.busy
    return bool(self.waiting or self.jobs or moving)

  @property
  def tokens_per_s(self) -> float:
    """Sampled tokens over the last ten seconds."""
    return self._rate.per_s

  def cancel(self, job: Job) -> None:
    """Finishes a request with its tokens so far; no effect on a finished one."""
    if self.jobs.get(job.slot) is job:
      self._land()
    if self.jobs.get(job.slot) is job:
      self._end(job, 'cancelled')
    elif job in self.waiting:
      self.waiting.remove(job)
      self._deliver(job, 'cancelled', self._result(job, 'cancelled'))

  def tick(self) -> None:
    begin = time.monotonic()
    if self._call is not None:
      self._land(go_on=True)
    else:
      self._place_and_decode()
    self.counts['busy_s'] += time.monotonic() - begin
    if self.tiers is not None:
      self.tiers.settle(self.state, idle=not self.jobs)

  def _place_and_decode(self) -> None:
    budget = self.config.prefill_budget_tokens
    if self.tiers is not None:
      self.tiers.read_ahead(itertools.islice(self.waiting, len(self.table.state)))
    self._place()
    while budget > 0 and (used := self._prefill()):
      budget -= used
      self._place()  # requests that waited for a prefix that is now cached
    self._admit()
    self._decode()

  def _place(self) -> None:
    """Moves waiting requests to idle slots with pages for them."""
    table, held_back = self.table, []
    idle = int(np.sum(table.state == State.IDLE))
    # Requests held back still claim a slot: later requests do not overtake them.
    try:
      while self.waiting and len(held_back) < idle:
        job = self.waiting[0]
        placed = table.place(job.tokens, ahead=self._ahead(self.drafting.most))
        if placed == 'full':  # later requests do not overtake it
          break
        reading = self.tiers is not None and self.tiers.waits(job)
        self.waiting.popleft()
        if placed == 'soon' or reading:
          held_back.append(job)
          continue
        job.slot, hit = placed
        self._take(job, hit)
        idle -= 1
    finally:  # a failed call must not lose requests
      self.waiting.extendleft(reversed(held_back))

  def _take(self, job: Job, hit: int) -> None:
    table, slot, drawn = self.table, job.slot, len(job.logprobs)
    self.jobs[slot] = job
    table.take(slot, job.tokens, self.version)
    if self.tiers is not None:
      self.state, more = self.tiers.restore(self.state, job)
      self._share(slot)
      hit += more
    end = len(job.tokens)
    table.logprobs[slot, end - drawn : end] = job.logprobs
    table.versions[slot, end - drawn : end] = job.versions
    if not drawn:
      self.counts['prompt_tokens'] += len(job.prompt)
      self.counts['prefix_hit_tokens'] += hit
      job.cached_tokens = hit
    if table.held[slot] == table.target[slot]:
      self._ready.append(slot)

  def _prefill(self) -> int:
    """One prefill call; returns its padded tokens, 0 if there was nothing to do."""
    table, groups = self.table, self.engine.groups
    slots = self._to_prefill()
    if not slots.size:
      return 0
    slots = slots[np.argsort(table.started[slots])]
    remaining = table.target[slots] - table.held[slots]
    which, size, chunk = plan.prefill(
      remaining, table.group(slots), self.engine.config.prefill_shapes
    )
    slots, remaining = slots[which], remaining[which]
    starts, counts = table.held[slots].copy(), np.minimum(remaining, chunk)
    positions = starts[:, None] + np.arange(chunk)
    positions = np.minimum(positions, self.engine.config.context_tokens - 1)
    at, _ = lay(table.group(slots), groups, size)
    rows = lambda values: spread(values, at, groups * size)
    self._save_pages()
    self.state = self.engine.prefill_rows(
      self.variables,
      self.state,
      rows(table.tokens[slots[:, None], positions]),
      rows(starts),
      rows(counts),
      rows(self.table.page_tables(slots, int((starts + counts).max()))),
    )
    table.held[slots] = starts + counts
    self.counts['prefill_tokens'] += int(counts.sum())
    attended = counts * (2 * starts.astype(np.int64) + counts + 1) // 2
    self.counts['prefill_positions'] += int(attended.sum())
    self.counts['prefill_padding_tokens'] += groups * size * chunk - int(counts.sum())
    for slot in slots.tolist():
      self._share(slot)
    self._ready.extend(slots[counts == remaining].tolist())
    return groups * size * chunk

  def _save_pages(self) -> None:
    """Before a call that writes pages: those given up are copied out first."""
    if self.tiers is not None:
      self.tiers.read_pages(self.state)

  def _to_prefill(self) -> np.ndarray:
    """Slots with tokens that this engine is to prefill."""
    table = self.table
    return np.flatnonzero((table.state == State.PREFILL) & (table.held < table.target))

  def _share(self, slot: int) -> None:
    """Makes a sequence's pages known, if all are of weights that may be reused."""
    current = self.table.version[slot] == self.version
    if current or self.config.reuse_stale_prefix:
      self.table.share(slot)

  def _admit(self) -> None:
    """Sets the prefilled slots decoding."""
    ready, self._ready = self._ready, []
    if not ready:
      return
    config, ready = self.engine.config, np.array(ready)
    total = self.engine.groups * config.slots
    slots = make_slots(total, config)
    at, num_rows = lay(self.table.group(ready), self.engine.groups, config.slots)
    for row, slot in zip(at.tolist(), ready.tolist(), strict=True):
      self.jobs[slot].fill(slots, row, self.engine)
    rows = spread(ready % config.slots, at, total)
    self.state = self.engine.admit(self.state, rows, num_rows, slots)
    self.table.state[ready] = State.DECODE

  def _decode(self) -> None:
    """Decodes a few steps of every active slot, at the least cost."""
    table, config = self.table, self.engine.config
    slots = table.where(State.DECODE)
    if not slots.size:
      self.pauses.idle()
      return
    most = table.count_rows(slots).max()
    drafts = self.drafting.choose(next(r for r in config.decode_rows if r >= most))
    self._reserve(self._ahead(drafts))
    slots, masked = constrained.split(self.jobs, table.where(State.DECODE))
    if slots.size and not self._decode_slots(slots, drafts):
      return
    for _ in range(self.config.decode_steps if masked.size else 0):
      if not self._decode_masked():
        return

  def _decode_masked(self) -> bool:
    """A step of the slots with a grammar; False if there are none, or all failed."""
    _, slots = constrained.split(self.jobs, self.table.where(State.DECODE))
    jobs = [self.jobs[slot] for slot in slots.tolist()]
    masks, errors = constrained.masks(jobs, self.engine.cfg.vocab_size)
    for i, error in errors.items():
      self.fail(jobs[i], error)
    left = np.array([i not in errors for i in range(len(jobs))], bool)
    return bool(left.any()) and self._decode_slots(slots[left], 0, masks[left])

  def _decode_slots(
    self, slots: np.ndarray, drafts: int, masks: np.ndarray | None = None
  ) -> bool:
    """Decodes slots, at the least cost; False if all requests failed."""
    table, config = self.table, self.engine.config
    ahead = table.held[slots] + self._ahead(drafts)
    pages = -(-np.minimum(ahead, config.context_tokens) // config.page_tokens)
    for which, size, n in plan.decode(
      pages, table.group(slots), config.decode_rows, config.table_sizes
    ):
      steps = self.config.decode_steps if masks is None else 1
      shape = Shape(size, n, drafts, steps)
      allowed = None if masks is None else masks[which]
      if not self._decode_call(slots[which], shape, allowed):
        return False
    return True

  def _ahead(self, drafts: int) -> int:
    """Positions that a decode call can need after those of a sequence."""
    return speculative.positions(self.config.decode_steps, drafts)

  def _reserve(self, ahead: int) -> None:
    """Gives each decoding slot pages for the next steps; retracts others if needed."""
    table, context = self.table, self.engine.config.context_tokens
    slots = table.where(State.DECODE)
    for slot in slots[np.argsort(table.started[slots])].tolist():
      need = min(int(table.held[slot]) + ahead, context)
      while table.state[slot] == State.DECODE and not table.reserve(slot, need):
        self._retract(table.youngest(table.group(slot)))

  def _retract(self, slot: int) -> None:
    """Takes a sequence's pages; it is first in the queue, with its tokens so far."""
    job = self.jobs[slot]
    if self.table.state[slot] == State.DECODE:
      self._save(job)
      job.experts = self._experts(job, int(self.table.held[slot]))
    self._share(slot)
    self._leave(job)
    self.waiting.appendleft(job)
    self.counts['retractions'] += 1

  def _decode_call(
    self, slots: np.ndarray, shape: Shape, masks: np.ndarray | None
  ) -> bool:
    """One decode call and its effect on each request; False if all requests failed."""
    self.pauses.begin_decode()
    self._save_pages()
    self.state, call = self._decode_calls.start(
      self.variables, self.version, self.state, self.table, slots, shape, masks
    )
    return self._finish_and_follow(call)

  def _land(self, go_on: bool = False) -> None:
    """Ends the call that was made ahead, if there is one.

    Args:
      go_on: whether another may be made ahead.
    """
    call, self._call = self._call, None
    if call is not None:
      self._finish_and_follow(call, go_on)

  def _finish_and_follow(self, call: Call, go_on: bool = True) -> bool:
    """Takes a call's effect on each request, after making the next one, if that can be
    done ahead; False if all requests failed."""
    following = self._follow(call) if go_on else None
    if not self._finish(call):
      return False
    self._call = following if self.jobs else None
    return True

  def _follow(self, call: Call) -> Call | None:
    """The next call, made before `call` is read; None if that cannot be done."""
    if not self._looks_ahead or self.tiers is not None or self.drafting.most:
      return None
    if self.waiting or self._ready:
      return None
    if not decode_calls.may_repeat(call, self.table, self.jobs, self._ahead(0)):
      return None
    self.table.count_rows(call.slots)
    self.state, following = self._decode_calls.again(
      call, self.variables, self.state, self.table
    )
    self.counts['ahead_calls'] += 1
    return following

  def _finish(self, call: Call) -> bool:
    """Takes a call's effect on each request; False if all requests failed."""
    table = self.table
    sampled, finite = self._decode_calls.finish(call, table)
    self.pauses.end_decode()
    going = table.state[call.slots] == State.DECODE  # others ended meanwhile
    slots, finite = call.slots[going], finite[going]
    sampled = jax.tree.map(lambda x: x[going], sampled)
    before = table.held[slots] + 1
    table.append(slots, sampled.counts, sampled.tokens, sampled.logprobs, call.version)
    self._count_sampled(int(sampled.counts.sum()))
    if not finite.all():
      # NaN in the cache would spread: an attention weight of 0 times NaN is NaN.
      self.fail_running(
        EngineError(f'the weights of version {call.version} give non-finite logits')
      )
      self.reset()
      return False
    for row, slot in enumerate(slots.tolist()):
      job = self.jobs[slot]
      if count := job.request.sampling.top_logprobs:
        part = row, slice(sampled.counts[row]), slice(count)
        job.top.append((sampled.top_ids[part], sampled.top_logprobs[part]))
      if job.on_tokens is not None:
        self._stream(job, int(before[row]))
      if job.matcher is not None and sampled.finish_code[row] == RUNNING:
        if error := constrained.advance(job, sampled.tokens[row, 0]):
          self.fail(job, error)
    for row in np.flatnonzero(sampled.finish_code != RUNNING):
      job = self.jobs.get(int(slots[row]))
      if job is not None:
        self._end(job, 'stop' if sampled.finish_code[row] == STOP else 'length')
    return True

  def _count_sampled(self, tokens: int) -> None:
    self.failures = 0
    self.counts['decode_calls'] += 1
    self.counts['sampled_tokens'] += tokens
    self._rate.add(tokens)

  def _stream(self, job: Job, begin: int) -> None:
    new = job.slot, slice(begin, self.table.held[job.slot] + 1)
    ids, logprobs = self.table.tokens[new].tolist(), self.table.logprobs[new].copy()
    try:
      job.on_tokens(NewTokens(ids, logprobs, *(job.top[-1] if job.top else ())))
    except Exception as error:  # an error of one caller fails that request only
      logging.exception('on_tokens raised')
      self.fail(job, EngineError(f'on_tokens raised {error!r}'))

  def _end(self, job: Job, reason: str) -> None:
    """Finishes a request with its tokens so far; its full pages stay cached.

    The slot is free before the result is delivered.
    """
    self._save(job)
    result = self._result(job, reason)  # its expert ids are in the slot's pages
    self._share(job.slot)
    self._leave(job)
    self._deliver(job, reason, result)

  def _leave(self, job: Job) -> None:
    """Takes the slot from a request."""
    slot = job.slot
    del self.jobs[slot]
    if slot in self._ready:
      self._ready.remove(slot)
    self.table.leave(slot)
    job.slot = -1

  def _save(self, job: Job) -> None:
    """Copies what has been drawn from the slot's record to the request's."""
    table, slot = self.table, job.slot
    if table.state[slot] == State.DECODE:
      end, begin = int(table.held[slot]) + 1, len(job.prompt)
      job.tokens = table.tokens[slot, :end].copy()
      job.logprobs = table.logprobs[slot, begin:end].copy()
      job.versions = table.versions[slot, begin:end].copy()

  def _deliver(self, job: Job, reason: str, result: Any) -> None:
    self.counts['cancelled' if reason == 'cancelled' else 'completions'] += 1
    job.future.set_result(result)

  def _result(self, job: Job, reason: str) -> Any:
    return job.result(reason, self._experts(job, len(job.tokens)))

  def _experts(self, job: Job, tokens: int) -> np.ndarray | None:
    """GenerateResult.experts of the request's first tokens; None if not recorded."""
    engine, table = self.engine, self.table
    if not engine.config.record_experts:
      return None
    cfg = engine.cfg
    ids = np.full((tokens, cfg.num_layers, cfg.experts_per_token), -1, np.int16)
    held = int(table.held[job.slot]) if job.slot >= 0 else 0
    if held := min(held, tokens):
      slot = np.array([job.slot])
      pages = table.page_tables(slot, held)[0]
      group = np.int32(table.group(job.slot))
      ids[:held] = np.asarray(engine.expert_ids(self.state, group, pages))[:held]
    if job.experts is not None:  # of the K/V that the tokens were drawn with
      ids[: len(job.experts)] = job.experts
    return ids

  def fail(self, job: Job, error: EngineError) -> None:
    """Fails a request with an error; its own pages are not reused."""
    if self.jobs.get(job.slot) is job:
      self._leave(job)
    self.counts['failed'] += 1
    job.future.set_exception(error)

  def fail_running(self, error: EngineError) -> None:
    """Fails the requests that have slots."""
    for job in list(self.jobs.values()):
      self.fail(job, error)
