"""Counters of the gateway as a plain dict, under Prometheus' naming rules."""

from __future__ import annotations

import collections


class Counters:
  """Counts by name and one label. Written on the gateway's loop, read from anywhere."""

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
