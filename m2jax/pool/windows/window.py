"""Windowed FIFO: items within a window at the oldest one (facts/m2-and-forge.md §4.5).

Between the submission of an item and its taking at most N + W − 2 others are taken:
N − 1 older live ones, and W − 1 younger ones.
"""

from __future__ import annotations

import dataclasses

from m2jax.checks import require
from m2jax.pool import windows


@dataclasses.dataclass(frozen=True)
class Config(windows.WindowConfig):
  """The W items from the head on.

  Attributes:
    width: W; None is `default_window`.
  """

  kind: str = 'window'
  width: int | None = None

  def __post_init__(self):
    fits = self.width is None or (type(self.width) is int and self.width >= 1)
    require(self, fits, 'width', 'at least 1, or None: 0.3 N')

  def end(self, queue: windows.Queue) -> int:
    return queue.head + self.items(queue.capacity)

  def items(self, capacity: int) -> int:
    return windows.default_window(capacity) if self.width is None else self.width
