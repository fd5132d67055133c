"""The queue of rollout groups: windowed FIFO and data pool, changed together.

`windowed_fifo` decides what may be taken and is in memory only; `data_pool` survives a
crash and has no window. Every change of an item's state goes through this module, to
the database first and then, under the same lock, to the queue: no caller can change one
without the other, and an item retires only once, even if its group ends just as its
deadline passes.

Every item has a deadline. After it the item fails with that reason, so that the window
can move, and `on_expired` is called to cancel its group.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from absl import logging

from m2jax import records
from m2jax.pool import data_pool, windowed_fifo, windows


class Taken(NamedTuple):
  """An item that was taken, and how windowed FIFO treated it.

  Attributes:
    index: index of the item.
    age_items: number of items taken between its submission and its taking, across
      restarts.
    order_distance: number of items between it and the oldest one left when it was
      taken.
  """

  index: int
  age_items: int
  order_distance: int


class WorkQueue:
  """Work items from submission to retirement. Thread-safe.

  Attributes:
    failed_in_a_row: number of failed attempts at items since the last completion.
    last_failure: the reason of the last one; '' before the first.
    next_index: index of the next item: the data position.
    drained: whether the queue is closed and nothing is live.
  """

  def __init__(
    self,
    pool: data_pool.DataPool,
    capacity: int,
    window: windows.Window = 'default',
    per_update: int = 1,
    *,
    deadline_s: float | None = None,
    on_expired: Callable[[int], None] = lambda index: None,
  ):
    """Makes an empty queue; call `resume` before anything else.

    Args:
      pool: stores the items.
      capacity, window, per_update: N, W and P, see `windowed_fifo.WindowedFifo`.
      deadline_s: seconds from submission, or reissue, to completion; None is no limit.
      on_expired: called with the index of an item after its deadline failed it, from a
        thread of this queue.
    """
    if deadline_s is not None and not deadline_s > 0:
      raise ValueError(f'WorkQueue: deadline_s={deadline_s}: must be positive, or None')
    self._pool = pool
    self._fifo = windowed_fifo.WindowedFifo(capacity, window, per_update)
    self._deadline_s, self._on_expired = deadline_s, on_expired
    self._lock = threading.Lock()  # held while pool and queue are changed together
    self._taken = 0  # items taken in the history of the current weights
    self._taken_before: dict[int, int] = {}  # by index of live items
    self.failed_in_a_row, self.last_failure = 0, ''
    self._due = threading.Condition()
    self._due_s: dict[int, float] = {}  # deadlines by index, earliest first
    self._stopping = False
    self._thread = None
    if deadline_s is not None:
      self._thread = threading.Thread(
        target=self._watch_deadlines, name='deadlines', daemon=True
      )
      self._thread.start()

  @property
  def capacity(self) -> int:
    return self._fifo.capacity

  @property
  def window(self) -> int | None:
    return self._fifo.window

  @property
  def next_index(self) -> int:
    return self._fifo.next_index

  @property
  def drained(self) -> bool:
    return self._fifo.drained

  def resume(self, ledger: data_pool.Ledger | None) -> list[records.WorkItem]:
    """Rolls the pool back to a checkpoint and restores the queue from it.

    Returns:
      The items to run again, in order of index.

    Raises:
      LedgerMismatch: see `DataPool.rollback`.
    """
    with self._lock:
      again = self._pool.rollback(ledger)
      present = self._pool.ledger()
      completed = self._pool.items('completed', first=present.head)
      retired = self._pool.items('taken', 'failed', first=present.head)
      self._taken = self._pool.counts()['taken']
      live = [*completed, *again]
      self._taken_before = {item.index: item.taken_before for item in live}
      self._fifo.restore(
        present.head,
        [item.index for item in retired],
        present.next_index,
        completed={item.index: None for item in completed},
        pending={item.index: item for item in again},
        ages={i: self._taken - before for i, before in self._taken_before.items()},
      )
    for item in again:
      self._start_deadline(item.index)
    return again

  def submit(self, task: str, group_size: int) -> records.WorkItem:
    """Accepts a group of `task`, which will then be trained or fail with a reason.

    Raises:
      Full: N items are live.
      RuntimeError: the queue is closed.
    """
    with self._lock:
      index = self._fifo.next_index
      if not self._fifo.wait_for_room(0):
        return self._fifo.submit()  # raises Full or RuntimeError
      item = records.WorkItem(index, task, group_size, taken_before=self._taken)
      self._pool.submit(item)
      self._fifo.submit(item)
      self._taken_before[index] = item.taken_before
    self._start_deadline(index)
    return item

  def complete(self, index: int) -> bool:
    """Marks an item as completed; False if it is not pending.

    Raises:
      ValueError: the pool lacks trajectories of its group.
    """
    with self._lock:
      if index not in self._fifo.pending():
        return False
      self._pool.complete(index)
      self._fifo.complete(index)
      self.failed_in_a_row = 0
    self._end_deadline(index)
    return True

  def fail(self, index: int, reason: str) -> bool:
    """Fails an item; False if it is not pending."""
    with self._lock:
      if index not in self._fifo.pending():
        return False
      self._pool.fail(index, reason)
      self._fifo.fail(index, reason)
      del self._taken_before[index]
    self.count_failure(reason)
    logging.warning('item %d failed: %s', index, reason)
    self._end_deadline(index)
    return True

  def count_failure(self, reason: str) -> None:
    """Counts a failed attempt, of an item that failed or is to be reissued."""
    with self._lock:
      self.failed_in_a_row += 1
      self.last_failure = reason

  def reissue(self, index: int) -> bool:
    """Starts another attempt at an item that a lost process ran; False if not pending.

    Its deadline stays.
    """
    with self._lock:
      if index not in self._fifo.pending():
        return False
      self._pool.reissue(index)
    return True

  def take(self, n: int, step: int, timeout_s: float | None = None) -> list[Taken]:
    """Waits until n items may be taken, and takes them for learner step `step`.

    Returns:
      n items; none after `timeout_s`; fewer at the end of a closed queue.
    """
    if not self._fifo.wait_until_takeable(n, timeout_s):
      return []
    with self._lock:
      indices = [index for index, _ in self._fifo.wait_for_take(n, timeout_s=0)]
      self._pool.take(indices, step)
      # Taken in order, so the head at that time was the item or the oldest one left.
      head = self._fifo.head
      out = []
      for index in indices:
        age = self._taken - self._taken_before.pop(index)
        out.append(Taken(index, age, max(0, index - head)))
        self._taken += 1
      return out

  def close(self) -> None:
    """Ends the stream: no more submissions, but live items may still be taken."""
    self._fifo.close()

  def state(self) -> windowed_fifo.WindowState:
    """See `WindowedFifo.state`."""
    return self._fifo.state()

  def states(self) -> tuple[int, list[str]]:
    """See `WindowedFifo.states`."""
    return self._fifo.states()

  def stop(self) -> None:
    """Stops the deadline thread. Idempotent."""
    with self._due:
      self._stopping = True
      self._due.notify()
    if self._thread is not None:
      self._thread.join()

  # --- Deadlines ---

  def _start_deadline(self, index: int) -> None:
    if self._deadline_s is not None:
      with self._due:
        self._due_s[index] = time.monotonic() + self._deadline_s
        self._due.notify()

  def _end_deadline(self, index: int) -> None:
    with self._due:
      self._due_s.pop(index, None)

  def _watch_deadlines(self) -> None:
    while True:
      with self._due:
        earliest = next(iter(self._due_s.items()), None)
        if self._stopping:
          return
        wait_s = None if earliest is None else earliest[1] - time.monotonic()
        if wait_s is None or wait_s > 0:
          self._due.wait(wait_s)
          continue
        del self._due_s[earliest[0]]
      try:
        if self.fail(earliest[0], f'not complete after {self._deadline_s:g} s'):
          self._on_expired(earliest[0])
      except data_pool.PoolBroken:  # raised to every other caller too
        return
      except Exception:
        logging.exception('item %d could not be failed at its deadline', earliest[0])
