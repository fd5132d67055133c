"""Greedy order with a limit of the age, which discards nothing (docs/scheduling.md)."""

from __future__ import annotations

import dataclasses

from m2jax.checks import require
from m2jax.pool import windows


@dataclasses.dataclass(frozen=True)
class Config(windows.WindowConfig):
  """The rule.

  Attributes:
    updates: largest age of an item that is trained, in updates of P items; at least
      N / P, since N − 1 live items may precede another.
  """

  kind: str = 'benchmarks.claims.aged'
  updates: int = 8

  def __post_init__(self):
    require(self, self.updates >= 1, 'updates', 'at least 1')

  def end(self, queue: windows.Queue) -> int | None:
    if queue.age + queue.capacity > self.updates * queue.per_update:
      return queue.head + 1
    return None
