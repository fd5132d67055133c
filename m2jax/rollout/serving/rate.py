"""A rate over the last seconds."""

from __future__ import annotations

import collections
import time

WINDOW_S = 10.0


class Rate:
  """Amount added per second, over the last ten seconds."""

  def __init__(self):
    self._total = 0
    self._marks = collections.deque([(time.monotonic(), 0)])

  def add(self, count: int) -> None:
    now = time.monotonic()
    self._total += count
    self._marks.append((now, self._total))
    while len(self._marks) > 2 and self._marks[0][0] < now - WINDOW_S:
      self._marks.popleft()

  @property
  def per_s(self) -> float:
    then, before = self._marks[0]
    return (self._total - before) / max(time.monotonic() - then, 1e-9)
