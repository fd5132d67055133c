"""Early stopping: whether a curve of evaluations has stopped improving."""

from __future__ import annotations

from collections.abc import Iterable


class Plateau:
  """Values of one metric in order of training; larger is better.

  Example:
    >>> curve = Plateau([0.2, 0.5, 0.5, 0.4])
    >>> curve.flat(patience=2), curve.flat(patience=3), curve.flat(patience=0)
    (True, False, False)
  """

  def __init__(self, values: Iterable[float] = ()):
    self.values = list(values)

  def add(self, value: float) -> None:
    self.values.append(float(value))

  def flat(self, patience: int) -> bool:
    """Whether none of the last `patience` values exceeds the best before them."""
    if not patience or len(self.values) <= patience:
      return False
    return max(self.values[-patience:]) <= max(self.values[:-patience])
