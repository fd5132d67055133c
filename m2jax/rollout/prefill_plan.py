"""Decides which prompts the next prefill call serves, and in which compiled shape."""

from __future__ import annotations

import numpy as np

# Fixed cost of a call, in tokens of prefill work. Measured on two CPU cores; only the
# order of magnitude matters.
CALL_TOKENS = 48


def choose(
  remaining: np.ndarray, shapes: tuple[tuple[int, int], ...]
) -> tuple[np.ndarray, int, int]:
  """Picks the shape with the most useful tokens per cost; always serves the oldest.

  Args:
    remaining: [n] tokens each prompt still needs, oldest first; all positive.
    shapes: available (rows, chunk tokens).

  Returns:
    (which prompts, rows, chunk): at most `rows` indices into remaining.
  """

  def served(shape):
    rows, chunk = shape
    useful = np.minimum(remaining, chunk)
    others = 1 + np.argsort(-useful[1:], kind='stable')[: rows - 1]
    return np.concatenate([[0], others]), int(useful[0] + useful[others].sum())

  def rate(shape):
    return served(shape)[1] / (CALL_TOKENS + shape[0] * shape[1])

  best = max(shapes, key=rate)
  return served(best)[0], *best
