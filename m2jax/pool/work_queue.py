"""The queue of rollout groups: windowed FIFO and data pool, changed together.

`windowed_fifo` says what may be taken and knows nothing of a crash; `data_pool`
survives one and knows nothing of a window. Every change of an item's state goes through
here, to the database first and then, under the same lock, to the queue: no caller does
one without the other, and an item that ends twice (its group came home while its
deadline passed) ends once.

Every item has a deadline. Past it the item fails with that reason, which lets the
window move, and `on_expired` is called so that its group can be cancelled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from absl import logging

from m2jax import records
from m2jax.pool import data_pool, windowed_fifo


class Taken(NamedTuple):
  """An item that was taken, and how windowed FIFO treated it.

  Attributes:
    index: of the item.
    age_items: items taken between its submission and its taking, over restarts too.
    order_distance: items between it and the oldest one left when it was taken.
  """

  index: int
  age_items: int
  order_distance: int


class WorkQueue:
  """Work items from submission to their end; safe from any thread.

  Attributes:
    failed_in_a_row: items that failed since one completed last.
    last_failure: the reason of the newest failure; '' before any.
    next_index: index of the next item: the data position.
    drained: closed, with nothing live.
  """

  def __init__(
    self,
    pool: data_pool.DataPool,
    capacity: int,
    window: int | None | str = 'default',
    *,
    deadline_s: float | None = None,
    on_expired: Callable[[int], None] = lambda index: None,
  ):
    """Makes an empty queue; call `resume` before anything else.

    Args:
      pool: where the items are kept.
      capacity, window: N and W, see `windowed_fifo.WindowedFifo`.
      deadline_s: from submission, or reissue, to completion; None is no deadline.
      on_expired: called with the index of an item after it failed by its deadline, from
        a thread of this queue.
    """
    if deadline_s is not None and not deadline_s > 0:
      raise ValueError(f'WorkQueue: deadline_s={deadline_s}: must be positive, or None')
    self._pool = pool
    self._fifo = windowed_fifo.WindowedFifo(capacity, window)
    self._deadline_s, self._on_expired = deadline_s, on_expired
    self._lock = threading.Lock()  # held from a change of the pool to the queue's
    self._taken = 0  # items taken along the history of the present weights
    self._taken_before: dict[int, int] = {}  # of live items
    self.failed_in_a_row = 0
    self._due = threading.Condition()
    self._due_s: dict[int, float] = {}  # by index, soonest first
    self._stopping = False
    self._thread = None
    if deadline_s is not None:
      self._thread = threading.Thread(target=self._watch, name='deadlines', daemon=True)
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
  def last_failure(self) -> str:
    return self._fifo.failures[-1][1] if self._fifo.failures else ''

  @property
  def drained(self) -> bool:
    return self._fifo.drained

  def resume(self, ledger: data_pool.Ledger | None) -> list[records.WorkItem]:
    """Rolls the pool back to a checkpoint and takes over its items.

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
      self._fifo.restore(
        present.head,
        [item.index for item in retired],
        present.next_index,
        completed={item.index: None for item in completed},
        pending={item.index: item for item in again},
      )
      self._taken = self._pool.counts()['taken']
      live = [*completed, *again]
      self._taken_before = {item.index: item.taken_before for item in live}
    for item in again:
      self._begin(item.index)
    return again

  def submit(self, task: str, group_size: int) -> records.WorkItem:
    """Accepts one more group of `task`; it will be trained or end with a reason.

    Raises:
      Full: N items are live.
      RuntimeError: the queue is closed.
    """
    with self._lock:
      index = self._fifo.next_index
      if not self._fifo.wait_for_room(0):
        return self._fifo.submit()  # raises what is wrong
      item = records.WorkItem(index, task, group_size, taken_before=self._taken)
      self._pool.submit(item)
      self._fifo.submit(item)
      self._taken_before[index] = item.taken_before
    self._begin(index)
    return item

  def complete(self, index: int) -> bool:
    """Marks an item as ready to be taken; False if it had retired before.

    Raises:
      ValueError: trajectories of its group are missing in the pool.
    """
    with self._lock:
      if index not in self._fifo.pending():
        return False
      self._pool.complete(index)
      self._fifo.complete(index)
      self.failed_in_a_row = 0
    self._end(index)
    return True

  def fail(self, index: int, reason: str) -> bool:
    """Ends an item without a result; False if it had retired before."""
    with self._lock:
      if index not in self._fifo.pending():
        return False
      self._pool.fail(index, reason)
      self._fifo.fail(index, reason)
      del self._taken_before[index]
      self.failed_in_a_row += 1
    logging.warning('item %d failed: %s', index, reason)
    self._end(index)
    return True

  def take(self, n: int, step: int, timeout_s: float | None = None) -> list[Taken]:
    """Waits until n items may be taken, and takes them as part of learner step `step`.

    Returns:
      n items; none after `timeout_s`; fewer at the end of a closed queue.
    """
    if not self._fifo.wait_until_takeable(n, timeout_s):
      return []
    with self._lock:
      indices = [index for index, _ in self._fifo.wait_for_take(n, timeout_s=0)]
      self._pool.take(indices, step)
      # taken in order, so an item's head was itself or the oldest item still left
      head = self._fifo.head
      out = []
      for index in indices:
        age = self._taken - self._taken_before.pop(index)
        out.append(Taken(index, age, max(0, index - head)))
        self._taken += 1
      return out

  def close(self) -> None:
    """Ends the stream: no more submissions; live items may still be taken."""
    self._fifo.close()

  def state(self) -> windowed_fifo.WindowState:
    """See `WindowedFifo.state`."""
    return self._fifo.state()

  def states(self) -> tuple[int, list[str]]:
    """See `WindowedFifo.states`."""
    return self._fifo.states()

  def stop(self) -> None:
    """Ends the thread of the deadlines. Idempotent."""
    with self._due:
      self._stopping = True
      self._due.notify()
    if self._thread is not None:
      self._thread.join()

  # --- Deadlines ---

  def _begin(self, index: int) -> None:
    if self._deadline_s is not None:
      with self._due:
        self._due_s[index] = time.monotonic() + self._deadline_s
        self._due.notify()

  def _end(self, index: int) -> None:
    with self._due:
      self._due_s.pop(index, None)

  def _watch(self) -> None:
    while True:
      with self._due:
        soonest = next(iter(self._due_s.items()), None)
        if self._stopping:
          return
        wait_s = None if soonest is None else soonest[1] - time.monotonic()
        if wait_s is None or wait_s > 0:
          self._due.wait(wait_s)
          continue
        del self._due_s[soonest[0]]
      try:
        if self.fail(soonest[0], f'not complete after {self._deadline_s:g} s'):
          self._on_expired(soonest[0])
      except data_pool.PoolBroken:  # every other caller raises it too
        return
      except Exception:
        logging.exception('item %d: past its deadline', soonest[0])
