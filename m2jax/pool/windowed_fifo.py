"""Windowed FIFO: out-of-order consumption, bounded by a window at the oldest item.

Forge's scheduler between rollouts and the learner (facts/m2-and-forge.md §4.5; DESIGN
§6 specifies what the report leaves open). Items enter in submission order and retire
when they are taken or fail. With capacity N, window W and head = the oldest item that
has not retired:

  submit   raises `Full` while N items are live (submitted and not retired);
  take     returns only completed items with index in [head, head + W − 1], lowest
           first; completed items beyond are forbidden. Retired items still occupy
           their window position, so the window moves only when the head retires.

W = 1 is strict FIFO. `window=None` is greedy: any completed item may be taken; W = N is
not greedy, since head + N stays blocked. Between the submission of an item and its
taking at most N + W − 2 others are taken: N − 1 older live ones, and W − 1 younger
ones. Other rules of what may be taken have the same form (`pool.windows`).

The queue is in memory only; the state that must survive a crash is in `data_pool`, from
which `work_queue` restores the queue (law 5).
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from m2jax.pool import windows


class Full(RuntimeError):
  """The capacity is used up: take or fail items before submitting more."""


class NotPending(ValueError):
  """The item has completed or retired, or was never submitted."""


@dataclasses.dataclass(frozen=True)
class WindowState:
  """The queue at one moment. Counts are items.

  Attributes:
    head: oldest index that has not retired; next_index if nothing is live.
    next_index: index of the next submission.
    capacity: N.
    window: W, the items from the head on that may be taken now; None if all.
    pending: submitted and still running.
    completed: finished and not taken.
    in_window: completed items inside the current window.
    remaining: window positions not occupied by retired items, the "Remaining Window
      Capacity" of the report's Fig. 5; None if greedy.
    taken, failed: items retired since the queue was created or restored.
  """

  head: int
  next_index: int
  capacity: int
  window: int | None
  pending: int
  completed: int
  in_window: int
  remaining: int | None
  taken: int
  failed: int


class WindowedFifo:
  """A thread-safe windowed FIFO queue, as defined in the module's docstring."""

  def __init__(
    self,
    capacity: int,
    window: windows.Window = 'default',
    per_update: int = 1,
  ):
    """Makes an empty queue.

    Args:
      capacity: N, the maximum number of live items; at least 1.
      window: W, at least 1; None is greedy; 'default' is
        `windows.default_window(capacity)`; or another rule (`windows.make`).
      per_update: items that an update takes, for rules that count updates.

    Raises:
      ValueError: capacity or window is out of range.
    """
    if capacity < 1:
      raise ValueError(f'WindowedFifo: capacity={capacity}: must be at least 1')
    self.capacity, self._per_update = capacity, per_update
    self._rule = windows.make(window)
    self._changed = threading.Condition()
    self._head = 0
    self._next_index = 0
    self._pending: dict[int, Any] = {}
    self._completed: dict[int, Any] = {}
    self._ready: list[int] = []  # heap of the completed indices
    self._retired: set[int] = set()  # retired indices above the head
    self._taken = 0
    self._born: dict[int, int] = {}  # by live index: `_taken` at its submission
    self._failed = 0
    self._closed = False
    self.failures: collections.deque[tuple[int, str]] = collections.deque(maxlen=256)

  def submit(self, item: Any = None) -> int:
    """Accepts `item` for rollout and returns its index.

    Raises:
      Full: N items are live.
      RuntimeError: the queue is closed.
    """
    with self._changed:
      if self._closed:
        raise RuntimeError('WindowedFifo: submit after close()')
      if self._live() >= self.capacity:
        raise Full(
          f'WindowedFifo: {self._live()} items are live, capacity is {self.capacity}; '
          f'the head is item {self._head}'
        )
      index = self._next_index
      self._next_index += 1
      self._pending[index] = item
      self._born[index] = self._taken
      return index

  def complete(self, index: int, result: Any = None) -> None:
    """Marks a pending item as finished, with the result that `take` returns for it.

    Raises:
      NotPending: the item is not pending, for example because it timed out.
    """
    with self._changed:
      self._check_pending(index)
      del self._pending[index]
      self._completed[index] = result
      heapq.heappush(self._ready, index)
      self._changed.notify_all()

  def fail(self, index: int, reason: str) -> None:
    """Retires a pending item without a result, so that the window can move past it.

    `failures` has the last 256 failures as (index, reason).

    Raises:
      NotPending: the item is not pending.
    """
    with self._changed:
      self._check_pending(index)
      del self._pending[index]
      self.failures.append((index, reason))
      self._failed += 1
      self._retire(index)
      self._changed.notify_all()

  def take(self, n: int = 1) -> list[tuple[int, Any]]:
    """Takes up to n allowed items, lowest index first; never blocks.

    Equivalent to n times take(1): each one may move the window for the next.

    Returns:
      (index, result) pairs in increasing order of index.
    """
    with self._changed:
      out: list[tuple[int, Any]] = []
      while len(out) < n and self._ready and self._allowed(self._ready[0]):
        index = heapq.heappop(self._ready)
        out.append((index, self._completed.pop(index)))
        self._taken += 1
        self._retire(index)
      if out:
        self._changed.notify_all()
      return out

  def wait_for_take(
    self, n: int, timeout_s: float | None = None
  ) -> list[tuple[int, Any]]:
    """Waits until n items may be taken, then takes them all at once.

    With a capacity of (S + 1) · n, rollouts continue meanwhile, about S steps
    off-policy; with n = N they stall until the learner has taken its items
    (facts/rl-systems.md §1). Nothing is taken before n items can be, so a caller that
    times out holds none.
    From a closed queue it takes the remaining items, possibly fewer than n, as soon as
    nothing is pending.

    Returns:
      n pairs; an empty list after `timeout_s`; fewer at the end of a closed queue.

    Raises:
      ValueError: n exceeds the capacity, so that n items can never be live at once.
    """
    with self._changed:
      return self.take(n) if self.wait_until_takeable(n, timeout_s) else []

  def wait_until_takeable(self, n: int, timeout_s: float | None = None) -> bool:
    """Waits like `wait_for_take` but takes nothing; False after `timeout_s`.

    Raises:
      ValueError: n exceeds the capacity.
    """
    if not 1 <= n <= self.capacity:
      raise ValueError(
        f'wait_for_take: n={n}: must be between 1 and the capacity {self.capacity}'
      )
    with self._changed:
      return self._changed.wait_for(
        lambda: self._takeable(n) == n or (self._closed and not self._pending),
        timeout_s,
      )

  def wait_for_room(self, timeout_s: float | None = None) -> bool:
    """Waits until an item can be submitted; False after `timeout_s` or if closed."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._closed or self._live() < self.capacity, timeout_s
      )
      return not self._closed and self._live() < self.capacity

  def close(self) -> None:
    """Ends the stream: no more submissions, but live items may still be taken."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()

  def restore(
    self,
    head: int,
    taken: Iterable[int],
    next_index: int,
    *,
    completed: Mapping[int, Any] | None = None,
    pending: Mapping[int, Any] | None = None,
    ages: Mapping[int, int] | None = None,
  ) -> None:
    """Sets an unused queue to a saved state (law 5; `WorkQueue.resume` calls it).

    Args:
      head: oldest index that has not retired.
      taken: retired indices (taken or failed) in (head, next_index); older ones are
        ignored.
      next_index: index of the next submission.
      completed: results of finished items that were not taken.
      pending: items that run again. Every other index in [head, next_index) is pending
        with the item None.
      ages: items taken since the submission of live ones; 0 where it is not given.

    Raises:
      RuntimeError: the queue has been used.
      ValueError: the sets overlap, are out of range or contradict `head`.
    """
    retired = {i for i in taken if i >= head}
    completed = dict(completed or {})
    items = dict(pending or {})
    rest = set(range(head, next_index)) - retired - completed.keys()
    listed = [*retired, *completed, *items]
    if len(set(listed)) != len(listed):
      raise ValueError('restore: taken, completed and pending overlap')
    if any(not head <= i < next_index for i in listed):
      raise ValueError(
        f'restore: an index is outside [head, next_index) = [{head}, {next_index})'
      )
    if head in retired or head < 0 or head > next_index:
      raise ValueError(
        f'restore: head={head} must be an item that has not retired, or next_index'
      )
    with self._changed:
      if self._next_index:
        raise RuntimeError('restore: only an unused queue can be restored')
      self._head, self._next_index, self._retired = head, next_index, retired
      self._pending = {i: items.get(i) for i in sorted(rest)}
      self._completed = completed
      self._ready = sorted(completed)
      ages = ages or {}
      self._born = {i: self._taken - ages.get(i, 0) for i in rest | completed.keys()}
      self._changed.notify_all()

  @property
  def window(self) -> int | None:
    """W: the items from the head on that may be taken now; None if all."""
    with self._changed:
      end = self._end(self._head, self._taken)
      return None if end is None else end - self._head

  @property
  def head(self) -> int:
    """Oldest index that has not retired; next_index if nothing is live."""
    with self._changed:
      return self._head

  @property
  def next_index(self) -> int:
    """Index of the next submission."""
    with self._changed:
      return self._next_index

  @property
  def drained(self) -> bool:
    """Whether the queue is closed and nothing is live."""
    with self._changed:
      return self._closed and not self._live()

  def pending(self) -> dict[int, Any]:
    """Items that still run, by index."""
    with self._changed:
      return dict(self._pending)

  def state(self) -> WindowState:
    """Counts for metrics and for the report's window plots."""
    with self._changed:
      in_window, window = sum(map(self._allowed, self._ready)), self.window
      remaining = None
      if window is not None:
        used = sum(i < self._head + window for i in self._retired)
        remaining = window - used
      return WindowState(
        head=self._head,
        next_index=self._next_index,
        capacity=self.capacity,
        window=window,
        pending=len(self._pending),
        completed=len(self._completed),
        in_window=in_window,
        remaining=remaining,
        taken=self._taken,
        failed=self._failed,
      )

  def states(self) -> tuple[int, list[str]]:
    """The head, and the state of each item from the head on, for views.

    A state is 'pending', 'completed' or 'retired' (taken or failed).
    """
    with self._changed:
      found = [
        'retired'
        if i in self._retired
        else 'completed'
        if i in self._completed
        else 'pending'
        for i in range(self._head, self._next_index)
      ]
      return self._head, found

  def _live(self) -> int:
    return len(self._pending) + len(self._completed)

  def _allowed(self, index: int) -> bool:
    end = self._end(self._head, self._taken)
    return end is None or index < end

  def _end(self, head: int, taken: int) -> int | None:
    """The first index that may not be taken, with this head after `taken` items."""
    age = taken - self._born.get(head, taken)
    queue = windows.Queue(head, self._next_index, self.capacity, age, self._per_update)
    end = self._rule.end(queue)
    if end is not None and end <= head:
      raise ValueError(
        f'{self._rule}: end {end} is not above the head {head}, which could never be '
        'taken'
      )
    return end

  def _takeable(self, limit: int) -> int:
    """Number of items that `take(limit)` would return."""
    head, retired, count = self._head, set(), 0
    for index in sorted(self._ready):
      end = self._end(head, self._taken + count)
      if count == limit or (end is not None and index >= end):
        break
      count += 1
      retired.add(index)
      while head in retired or head in self._retired:
        head += 1
    return count

  def _retire(self, index: int) -> None:
    self._retired.add(index)
    del self._born[index]
    while self._head in self._retired:
      self._retired.remove(self._head)
      self._head += 1

  def _check_pending(self, index: int) -> None:
    if index in self._pending:
      return
    if index in self._completed:
      state = 'has already completed'
    elif 0 <= index < self._next_index:
      state = 'has already been taken or failed'
    else:
      state = f'was never submitted (next index is {self._next_index})'
    raise NotPending(f'WindowedFifo: item {index} {state}')
