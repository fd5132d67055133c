"""Strict FIFO: items are taken in the order of their submission."""

from __future__ import annotations

import dataclasses

from m2jax.pool import windows


@dataclasses.dataclass(frozen=True)
class Config(windows.WindowConfig):
  """Only the head may be taken: a window of one item."""

  kind: str = 'strict'

  def end(self, queue: windows.Queue) -> int:
    return queue.head + 1

  def items(self, capacity: int) -> int:
    return 1
