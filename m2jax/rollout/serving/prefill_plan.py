"""Decides which prompts the next prefill call serves, and in which compiled shape.

Axes: n prompts, in g groups of devices with rows of their own.
"""

from __future__ import annotations

import numpy as np

# Fixed cost of a call, in tokens of prefill work. Measured on two CPU cores; only the
# order of magnitude matters.
CALL_TOKENS = 48


def choose(
  remaining: np.ndarray, group: np.ndarray, shapes: tuple[tuple[int, int], ...]
) -> tuple[np.ndarray, int, int]:
  """Picks the shape with the most useful tokens per cost; always serves the oldest.

  Args:
    remaining: [n] tokens each prompt still needs, oldest first; all positive.
    group: [n] of each prompt.
    shapes: available (rows of a group, chunk tokens).

  Returns:
    (which prompts, rows, chunk): at most `rows` indices of each group.
  """

  def served(shape):
    rows, chunk = shape
    useful = np.minimum(remaining, chunk)
    which = []
    for g in np.unique(group):
      mine = np.flatnonzero(group == g)
      others = mine[1:][np.argsort(-useful[mine[1:]], kind='stable')[: rows - 1]]
      which += [mine[0], *others]
    return np.array(which), int(useful[which].sum())

  def rate(shape):
    return served(shape)[1] / (CALL_TOKENS + shape[0] * shape[1])

  best = max(shapes, key=rate)
  return served(best)[0], *best
