"""Rollout groups of RL: started while the queue has room, recorded as they end.

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

from absl import logging

from m2jax import tasks
from m2jax.forge.config import ForgeConfig
from m2jax.forge.curriculum import Curriculum
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles import Rollouts
from m2jax.pool import data_pool, work_queue
from m2jax.records import Trajectory, WorkItem

_POLL_S = 1.0  # between checks of queue, budget and engine while the learner waits
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between submissions after failures
_PROBES = 32  # consecutive failures beyond the capacity, by default


class RolloutGroups:
  """Keeps the work queue full with running groups, and takes the completed ones.

  Attributes:
    queue: the work items.
    curriculum: draws the family of each new item.
    reissued: attempts that other processes have lost (`leased_groups`).
  """

  reissued = 0

  def __init__(self, config: ForgeConfig, roles: Rollouts, view=None):
    self._rl, self._seed = config.rl, config.seed
    self._roles, self._view = roles, view
    self._tasks = dataclasses.replace(
      config.tasks, partial_credit=self._rl.partial_credit
    )
    self.curriculum = Curriculum(self._rl.curriculum, tasks.families(config.tasks))
    self.queue = work_queue.WorkQueue(
      roles.pool,
      self._rl.capacity,
      self._rl.window,
      deadline_s=self._rl.item_deadline_s,
      on_expired=self._cancel,
    )
    self._lock = threading.Lock()
    self._ended = 0  # episodes since the last `pop_ended`
    self._broken: Exception | None = None  # why no group can be recorded any more
    self._next_submit_s = 0.0  # earliest time of the next submission after a failure
    self._futures: dict[int, concurrent.futures.Future] = {}  # running groups by item
    # Retiring an item waits for a commit, which must not block the agents' event loop.
    self._retiring = concurrent.futures.ThreadPoolExecutor(1, 'retire-items')

  def close(self) -> None:
    """Cancels the groups that still run; a restart reissues them."""
    self.queue.stop()
    for index in self.running():
      self._cancel(index)
    self._retiring.shutdown(cancel_futures=True)

  def running(self) -> set[int]:
    """Indices of the items whose episodes still run."""
    return set(self._futures)

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
      if not self._may_start():
        return
      weights = tasks.families(self._tasks, index)
      family = self.curriculum.draw(f'{self._seed}/{index}', weights)
      spec = tasks.spec(self._tasks, 'train', index, seed=self._seed, family=family)
      self.start(self.queue.submit(spec, rl.group_size))

  def _may_start(self) -> bool:
    """Whether a group may start; after failures one at a time, after a pause."""
    failed, now_s = self.queue.failed_in_a_row, time.monotonic()
    if failed and now_s < self._next_submit_s:
      return False
    pause_s = min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2.0 ** min(failed - 1, 10))
    self._next_submit_s = now_s + pause_s
    return True

  def start(self, item: WorkItem) -> None:
    """Starts the episodes of an item that the queue holds as pending."""
    future = self._roles.runner.group(
      item.task,
      item.group_size,
      item=item.index,
      prefix=item.session_prefix,
      on_end=self._on_episode,
    )
    self._futures[item.index] = future
    future.add_done_callback(functools.partial(self._on_group, item))

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
    """Raises if waiting for the items of `step` is in vain."""
    if self._broken is not None:
      raise self._broken
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

  # --- Ends of episodes and groups ---

  def _cancel(self, index: int) -> None:
    if (future := self._futures.get(index)) is not None:
      future.cancel()

  def _on_episode(self, trajectory: Trajectory) -> None:
    self._roles.pool.add_trajectory(trajectory)
    self._observe(trajectory)

  def _observe(self, trajectory: Trajectory) -> None:
    """Counts an episode that has ended, and shows it."""
    if trajectory.end_reason != 'infrastructure':
      self.curriculum.observe(trajectory.family, trajectory.success)
    with self._lock:
      self._ended += 1
    if self._view is not None and trajectory.rank == 0:
      self._view.set_snippet(trajectory.messages)

  def _on_group(self, item: WorkItem, future: concurrent.futures.Future) -> None:
    self._futures.pop(item.index, None)
    if not future.cancelled():
      self._retiring.submit(self._retire, item, future)

  def _retire(self, item: WorkItem, future: concurrent.futures.Future) -> None:
    """Completes the item of a group whose trajectories are in the pool, or fails it.

    An error in one group fails that group alone; a pool that cannot be written ends the
    run, from the learner's thread.
    """
    try:
      try:
        trajectories = future.result()
        if any(t.end_reason != 'infrastructure' for t in trajectories):
          self.queue.complete(item.index)
          return
        reason = trajectories[0].error or 'infrastructure'
      except data_pool.PoolBroken:
        raise
      except Exception as error:
        logging.exception('item %d', item.index)
        reason = repr(error)
      self.queue.fail(item.index, reason)
    except Exception as error:
      logging.exception('item %d could not be retired', item.index)
      self._broken = error
