"""Which slots decode together: short sequences apart from long ones, where it pays.

A call reads as many cache positions of every row as its longest row needs, so one long
sequence makes all others of its call expensive.

Axes: n slots that decode.
"""

from __future__ import annotations

import numpy as np

# What a row costs beside its attention, in cache positions, and what a call does, in
# rows of no position: measured on two CPU cores; they only have to be of the right
# order.
ROW_POSITIONS = 192
CALL_ROWS = 1


def choose(
  held: np.ndarray, rows: tuple[int, ...], contexts: tuple[int, ...]
) -> list[tuple[np.ndarray, int, int]]:
  """Splits the slots over calls of compiled shapes so that they cost least in all.

  Args:
    held: [n] cache positions each slot reads; at most contexts[-1].
    rows, contexts: sizes that may be used, ascending; n is at most rows[-1].

  Returns:
    Calls (indices into held, rows, context), each slot in one of them.
  """
  needed = np.searchsorted(contexts, held)  # index of the least context that will do
  counts = np.bincount(needed, minlength=len(contexts))
  # Cheapest split of the slots that need the first contexts: cost, and its calls
  # (low, high, size), of those whose index is at least low and below high.
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
