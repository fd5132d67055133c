"""Greedy: items are taken in the order of their completion."""

from __future__ import annotations

import dataclasses

from m2jax.pool import windows


@dataclasses.dataclass(frozen=True)
class Config(windows.WindowConfig):
  """Every completed item may be taken, so that the age of an item has no bound."""

  kind: str = 'greedy'

  def end(self, queue: windows.Queue) -> None:
    return None
