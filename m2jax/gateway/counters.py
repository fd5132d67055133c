"""Counters of the gateway, with names as in Prometheus."""

from __future__ import annotations

import collections


class Counters:
  """Counts by name and label. Written on the gateway's loop, read from any thread."""

  def __init__(self):
    self._counts: collections.Counter[str] = collections.Counter()

  def add(self, name: str, amount: int = 1, **label: str):
    """Adds to `name` or `name{label="value"}`."""
    for key, value in label.items():
      name = f'{name}{{{key}="{value}"}}'
    self._counts[name] += amount

  def as_dict(self) -> dict[str, int]:
    """A copy: `{'requests_total{status="200"}': 3, …}`."""
    return dict(self._counts)

  def exposition(self) -> str:
    """Prometheus' text format."""
    return ''.join(
      f'gateway_{name} {value}\n' for name, value in sorted(self.as_dict().items())
    )
