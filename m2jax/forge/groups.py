"""Rollout groups of RL: kept running while the queue has room, retired as they end.

1. `Groups.fill` submits an item, of a family that the curriculum draws.
2. `Attempts` runs it: agents in this process (`_Here`), or in others, which claim items
   under leases of the pool (`_Leased`).
3. An attempt ends with a report (`pool.leases`). COMPLETE completes the item and FAILED
   fails it; an attempt that is lost or says AGAIN is followed by another one.
4. `Groups.take` takes completed items, as the queue's window allows.

A failed group is replaced, but only one at a time and after a pause, until one
completes: an outage of a few seconds costs the groups that were running, and a
permanent one stops the run with its cause.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Protocol

from absl import logging

from m2jax import tasks
from m2jax.forge.config import ForgeConfig
from m2jax.forge.curriculum import Curriculum
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles.in_process import Rollouts
from m2jax.pool import data_pool, leases, work_queue
from m2jax.records import Trajectory, WorkItem

_POLL_S = 1.0  # between checks of queue, budget and engine while the learner waits
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between submissions after failures
_AGAIN_PAUSE_S = 0.2  # before an item is first run again elsewhere
_PROBES = 32  # consecutive failures beyond the capacity, by default


class Attempts(Protocol):
  """Runs attempts at items, and reports their ends to `Groups`, from any thread."""

  def start(self, item: WorkItem) -> None:
    """Starts an attempt at an item that the queue holds as pending."""

  def cancel(self, index: int) -> None:
    """Ends the attempt at an item that has failed, if one runs."""

  def close(self) -> None:
    """Starts and reports nothing any more."""


class Groups:
  """Keeps the work queue full with running groups, and takes the completed ones.

  Attributes:
    queue: the work items.
    curriculum: draws the family of each new item.
    reissued: number of attempts that were followed by another one.
    broken: why no group can be recorded any more; None while they can.
  """

  def __init__(self, config: ForgeConfig, roles: Rollouts, view=None):
    self._rl, self._seed = config.rl, config.seed
    self._roles, self._view = roles, view
    self._tasks = dataclasses.replace(
      config.tasks, partial_credit=self._rl.partial_credit
    )
    self.curriculum = Curriculum(self._rl.curriculum, tasks.families(config.tasks))
    self.reissued, self.broken = 0, None
    make = _Leased if roles.leased else _Here
    self._attempts: Attempts = make(self, config, roles)
    self.queue = work_queue.WorkQueue(
      roles.pool,
      self._rl.capacity,
      self._rl.window,
      self._rl.groups_per_step,
      deadline_s=self._rl.item_deadline_s,
      on_expired=self._attempts.cancel,
    )
    self.start = self._attempts.start
    self._lock = threading.Lock()
    self._ended = 0  # episodes since the last `pop_ended`
    self._next_submit_s = 0.0  # earliest time of the next submission after a failure

  def close(self) -> None:
    """Ends what runs here; a restart reissues it, or finds what others report."""
    self.queue.stop()
    self._attempts.close()

  def pop_ended(self) -> int:
    """Number of episodes that ended since the last call."""
    with self._lock:
      ended, self._ended = self._ended, 0
    return ended

  def fill(self) -> None:
    """Submits items until the queue is full, or closes it after the last one."""
    rl = self._rl
    while True:
      state = self.queue.state()
      index = state.next_index
      if rl.max_items and index >= rl.max_items:
        self.queue.close()
        return
      if state.pending + state.completed >= rl.capacity:
        return
      if not self.may_start():
        return
      weights = tasks.families(self._tasks, index)
      family = self.curriculum.draw(f'{self._seed}/{index}', weights)
      spec = tasks.spec(self._tasks, 'train', index, seed=self._seed, family=family)
      self.start(self.queue.submit(spec, rl.group_size))

  def may_start(self) -> bool:
    """Whether a group may start; after failures one at a time, after a pause."""
    failed, now_s = self.queue.failed_in_a_row, time.monotonic()
    if failed and now_s < self._next_submit_s:
      return False
    self._next_submit_s = now_s + _pause_s(_SHORTEST_PAUSE_S, failed - 1)
    return True

  def take(
    self, n: int, step: int, out_of_time: Callable[[], bool]
  ) -> list[work_queue.Taken]:
    """Takes n items for learner step `step`, keeping the queue full while it waits.

    Returns:
      n items; fewer at the end of a finite queue; none once `out_of_time()`.

    Raises:
      RolloutsFailed: the engine stopped, or `max_failed_groups` items failed in a row.
      PoolBroken: the database cannot be written.
    """
    while not out_of_time():
      self.fill()
      if found := self.queue.take(n, step, timeout_s=self._poll_s()):
        return found
      if self.queue.drained:
        break
      self._check(step)
    return []

  def _poll_s(self) -> float:
    """Seconds until the queue has to be checked again."""
    pause_s = self._next_submit_s - time.monotonic()
    return min(_POLL_S, pause_s) if pause_s > 0 else _POLL_S

  def _check(self, step: int) -> None:
    """Raises if the items of `step` can no longer complete."""
    if self.broken is not None:
      raise self.broken
    failed, reason = self.queue.failed_in_a_row, self.queue.last_failure
    if not self._roles.scheduler.alive:
      raise RolloutsFailed(
        f'the rollout engine has stopped; see the log. The last failure of a rollout '
        f'group: {reason or "none"}'
      )
    limit = self._rl.max_failed_groups or self._rl.capacity + _PROBES
    if failed >= limit:
      raise RolloutsFailed(
        f'{failed} rollout groups failed in a row (rl.max_failed_groups is {limit}); '
        f'the last failure: {reason}. Fix the cause and start the run again: it '
        f'resumes at step {step - 1}'
      )

  # --- Ends of episodes and attempts, from `Attempts` ---

  def observe(self, trajectory: Trajectory) -> None:
    """Counts an episode that has ended, and shows it."""
    if trajectory.end_reason != 'infrastructure':
      self.curriculum.observe(trajectory.family, trajectory.success)
    with self._lock:
      self._ended += 1
    if self._view is not None and trajectory.rank == 0:
      self._view.set_snippet(trajectory.messages)

  def retire(self, index: int, report: str) -> None:
    """Completes or fails an item by the report of its attempt, if it is pending.

    Raises:
      ValueError: COMPLETE, but the pool lacks trajectories of the group.
      PoolBroken: the database cannot be written.
    """
    if report == leases.COMPLETE:
      self.queue.complete(index)
    else:
      self.queue.fail(index, report.removeprefix(leases.FAILED))

  def reissue(self, index: int, reason: str) -> None:
    """Follows an attempt by another one, if the item is pending."""
    if self.queue.reissue(index):
      logging.warning('item %d, again: %s', index, reason)
      self.reissued += 1


def _pause_s(first_s: float, doublings: int) -> float:
  return min(_LONGEST_PAUSE_S, first_s * 2.0 ** min(doublings, 10))


class _Here:
  """Attempts by the agents of this process; one that fails ends its item."""

  def __init__(self, groups: Groups, config: ForgeConfig, roles: Rollouts):
    self._groups, self._runner, self._pool = groups, roles.runner, roles.pool
    self.futures: dict[int, concurrent.futures.Future] = {}  # running groups by item
    # Retiring an item waits for a commit, which must not block the agents' event loop.
    self._retiring = concurrent.futures.ThreadPoolExecutor(1, 'retire-items')

  def start(self, item: WorkItem) -> None:
    future = self._runner.group(
      item.task,
      item.group_size,
      item=item.index,
      prefix=item.session_prefix,
      on_end=self._on_episode,
    )
    self.futures[item.index] = future
    future.add_done_callback(functools.partial(self._on_group, item.index))

  def cancel(self, index: int) -> None:
    if (future := self.futures.get(index)) is not None:
      future.cancel()

  def close(self) -> None:
    for index in list(self.futures):
      self.cancel(index)
    self._retiring.shutdown(cancel_futures=True)

  def _on_episode(self, trajectory: Trajectory) -> None:
    self._pool.add_trajectory(trajectory)
    self._groups.observe(trajectory)

  def _on_group(self, index: int, future: concurrent.futures.Future) -> None:
    self.futures.pop(index, None)
    if not future.cancelled():
      self._retiring.submit(self._retire, index, future)

  def _retire(self, index: int, future: concurrent.futures.Future) -> None:
    """Completes the item of a group whose trajectories are in the pool, or fails it.

    An error in one group fails that group alone; a pool that cannot be written ends the
    run, from the learner's thread.
    """
    try:
      try:
        report = leases.outcome(future.result())
        self._groups.retire(index, report.replace(leases.AGAIN, leases.FAILED, 1))
      except data_pool.PoolBroken:
        raise
      except Exception as error:
        logging.exception('item %d', index)
        self._groups.retire(index, leases.FAILED + repr(error))
    except Exception as error:
      logging.exception('item %d could not be retired', index)
      self._groups.broken = error


class _Leased:
  """Attempts by agents in other processes, which claim pending items from the pool.

  A thread looks at the leases. An item whose agents failed for a reason of the
  infrastructure, or gave no sign of life for `lease_s`, goes to the next who claims it,
  until its deadline. The former are repeated one at a time, as in this process, and too
  many in a row end the run.
  """

  def __init__(self, groups: Groups, config: ForgeConfig, roles: Rollouts):
    self._groups, self._pool = groups, roles.pool
    self._lease_s, self._look_s = config.roles.lease_s, config.roles.poll_s
    self._seen: dict[int, tuple[leases.Lease, float]] = {}  # and since when, by index
    self._failures: dict[int, int] = {}  # reports of AGAIN, by index
    self._stopping = threading.Event()
    self._thread = threading.Thread(target=self._watch, name='leases', daemon=True)

  def start(self, item: WorkItem) -> None:
    """Starts nothing: the item is pending in the pool, where agents claim it."""
    if self._thread.ident is None:
      self._thread.start()

  def cancel(self, index: int) -> None:
    """Nothing to do: its lease has become invalid, which its agents notice."""

  def close(self) -> None:
    """Leaves the groups to their agents, whose reports a restart finds."""
    self._stopping.set()
    if self._thread.ident is not None:
      self._thread.join()

  def _watch(self) -> None:
    try:
      while not self._stopping.wait(self._look_s):
        self._look()
    except Exception as error:
      logging.exception('the leases cannot be watched')
      self._groups.broken = error

  def _look(self) -> None:
    found, now_s = self._pool.open_leases(), time.monotonic()
    seen = {}
    for lease in found:
      before, since_s = self._seen.get(lease.index, (None, now_s))
      if lease != before:
        since_s = now_s
      seen[lease.index] = lease, since_s
      if lease.report is not None:
        self._on_report(lease, now_s - since_s, new=lease != before)
      elif now_s - since_s > self._lease_s:
        self._again(lease, f'no sign of life for {self._lease_s:g} s')
    self._seen = seen

  def _on_report(self, lease: leases.Lease, age_s: float, new: bool) -> None:
    index, report = lease.index, lease.report
    if report.startswith(leases.STOPPED):
      self._again(lease, report.removeprefix(leases.AGAIN))
    elif report.startswith(leases.AGAIN):
      reason = report.removeprefix(leases.AGAIN)
      if new:
        self._groups.queue.count_failure(reason)
      failures = self._failures.get(index, 0)
      if age_s >= _pause_s(_AGAIN_PAUSE_S, failures) and self._groups.may_start():
        self._failures[index] = failures + 1
        self._again(lease, reason)
    else:
      if report == leases.COMPLETE:
        # As in a group run here: who takes the item finds its episodes counted.
        for trajectory, _ in self._pool.group(index):
          self._groups.observe(trajectory)
      try:
        self._groups.retire(index, report)
      except ValueError as error:
        self._again(lease, str(error))
        return
      self._failures.pop(index, None)

  def _again(self, lease: leases.Lease, reason: str) -> None:
    holder = lease.lease.partition('/')[0]
    self._groups.reissue(lease.index, f'{holder}: {reason}')
