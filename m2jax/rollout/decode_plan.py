"""Decides which slots decode together: long sequences apart if that is cheaper.

A call reads the same number of cache positions for every row, as its longest row needs,
so that one long sequence makes all others in the call expensive.

Axes: n decoding slots.
"""

from __future__ import annotations

import numpy as np

# Cost of a row besides attention, in cache positions, and cost of a call, in rows
# without positions. Measured on two CPU cores; only the order of magnitude matters.
ROW_POSITIONS = 192
CALL_ROWS = 1


def choose(
  held: np.ndarray, rows: tuple[int, ...], contexts: tuple[int, ...]
) -> list[tuple[np.ndarray, int, int]]:
  """Splits the slots over calls of compiled shapes, at the least total cost.

  Args:
    held: [n] cache positions each slot reads; at most contexts[-1].
    rows, contexts: available sizes, ascending; n is at most rows[-1].

  Returns:
    Calls (indices into held, rows, context), each slot in one of them.
  """
  needed = np.searchsorted(contexts, held)  # index of the smallest sufficient context
  counts = np.bincount(needed, minlength=len(contexts))
  # best[high]: the cheapest split of the slots with needed < high, as its cost and its
  # calls (low, high, size), each for the slots with low <= needed < high.
  best: list[tuple[int, list[tuple[int, int, int]]]] = [(0, [])]
  for high in range(1, len(contexts) + 1):
    if not counts[high - 1]:
      best.append(best[-1])
      continue
    splits = []
    for low in range(high):
      size = next((r for r in rows if r >= counts[low:high].sum()), None)
      if size is not None:
        cost = (size + CALL_ROWS) * (ROW_POSITIONS + contexts[high - 1])
        splits.append((best[low][0] + cost, [*best[low][1], (low, high, size)]))
    best.append(min(splits))
  return [
    (np.flatnonzero((needed >= low) & (needed < high)), size, contexts[high - 1])
    for low, high, size in best[-1][1]
  ]
