"""New weights for a running engine: placed while it decodes, then swapped at once.

On one device any thread may place them, since programs of one device do not wait for
each other: the caller of `update_weights` does, and the engine's thread only swaps two
references. Programs over several devices must be started by one thread: the engine's
thread places some arrays before each of its ticks, so decoding continues in between.
Until the swap the device has both versions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


class Swap:
  """Weights on their way into the engine; used by its thread.

  Attributes:
    version: version of the weights.
  """

  def __init__(self, parts: Iterator[Any], version: int):
    """Places nothing yet.

    Args:
      parts: gives None after each part, and at last the weights.
      version: version of the weights.
    """
    self._parts, self.version = parts, version

  def advance(self, *, to_the_end: bool) -> Any | None:
    """Places the next part, or all; the weights once they are complete."""
    for weights in self._parts:
      if weights is not None:
        return weights
      if not to_the_end:
        return None
    raise RuntimeError('the parts of the weights ended without the weights')


class Pauses:
  """Seconds between the last decode call before an exchange and the first after it.

  Only where sequences were decoding at the exchange: others did not wait.

  Attributes:
    last_s, longest_s: 0 before the first one.
  """

  def __init__(self):
    self.last_s = self.longest_s = 0.0
    self._ended_s: float | None = None  # the last decode call
    self._since_s: float | None = None  # the same, if the weights changed since

  def begin_decode(self) -> None:
    if self._since_s is not None:
      self.last_s = time.monotonic() - self._since_s
      self.longest_s = max(self.longest_s, self.last_s)
      self._since_s = None

  def end_decode(self) -> None:
    self._ended_s = time.monotonic()

  def exchanged(self, *, decoding: bool) -> None:
    if decoding and self._since_s is None:
      self._since_s = self._ended_s

  def idle(self) -> None:
    """No sequence waits for the next decode call any more."""
    self._since_s = None

  def stats(self) -> dict[str, float]:
    return {'update_pause_s': self.last_s, 'update_pause_longest_s': self.longest_s}
