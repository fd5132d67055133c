"""Makes new engine replicas in place of those that have stopped, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from absl import logging


class Restarts:
  """The replicas that are being made.

  Attributes:
    reasons: by number, why each stopped replica does not serve.
  """

  def __init__(self, make: Callable[[int], Any] | None, most: int, delay_s: float):
    """Makes nothing yet.

    Args:
      make: makes the replica of a number and puts it to use; None: none is made.
      most: consecutive attempts, the first after delay_s, each later one after twice
        the wait.
    """
    self.reasons: dict[int, str] = {}
    self._make, self._most, self._delay_s = make, most, delay_s
    self._lock = threading.Lock()
    self._threads: dict[int, threading.Thread] = {}
    self._stop = threading.Event()

  @property
  def pending(self) -> bool:
    """Whether a replica is being made."""
    with self._lock:
      return bool(self._threads)

  def begin(self, number: int, reason: str) -> None:
    """A replica has stopped."""
    with self._lock:
      self.reasons[number] = reason
      if self._make is None or not self._most or self._stop.is_set():
        return
      thread = threading.Thread(
        target=self._run, args=(number,), name=f'replica {number}', daemon=True
      )
      self._threads[number] = thread
    thread.start()

  def wait(self) -> None:
    """Waits until no replica is being made."""
    with self._lock:
      threads = list(self._threads.values())
    for thread in threads:
      thread.join()

  def stop(self) -> None:
    """Makes no other replica; waits for one that is being made."""
    self._stop.set()
    self.wait()

  def _run(self, number: int) -> None:
    delay = self._delay_s
    for _ in range(self._most):
      if self._stop.wait(delay):
        break
      delay *= 2
      try:
        self._make(number)
        with self._lock:
          if self._is_mine(number):
            self.reasons.pop(number, None)
        break
      except Exception as error:
        logging.exception('replica %d does not start', number)
        with self._lock:
          if not self._is_mine(number):
            return
          self.reasons[number] = f'it does not start: {error!r}'
    with self._lock:
      if self._is_mine(number):
        del self._threads[number]

  def _is_mine(self, number: int) -> bool:
    """Whether the replica that this thread makes was not lost again. Needs _lock."""
    return self._threads.get(number) is threading.current_thread()
