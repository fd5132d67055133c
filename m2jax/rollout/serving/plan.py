"""Decides which prompts or slots a call serves, and in which compiled shape.

A decode call reads the same number of pages for every row, as its longest row needs, so
one long sequence makes all others in the call expensive: long sequences are decoded
separately if that is cheaper.

Axes: n prompts or decoding slots, in g groups of devices with rows of their own.
"""

from __future__ import annotations

import numpy as np

# Measured on two CPU cores; only the order of magnitude matters.
# Of prefill: the fixed cost of a call, in tokens.
CALL_TOKENS = 48
# Of decoding: the cost of a row besides attention, in pages, and of a call, in rows
# without pages.
ROW_PAGES = 12
CALL_ROWS = 1


def prefill(
  remaining: np.ndarray, group: np.ndarray, shapes: tuple[tuple[int, int], ...]
) -> tuple[np.ndarray, int, int]:
  """The prompts of the next call: the shape with the most useful tokens per cost.

  Always serves the oldest.

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


def decode(
  pages: np.ndarray,
  group: np.ndarray,
  rows: tuple[int, ...],
  sizes: tuple[int, ...],
) -> list[tuple[np.ndarray, int, int]]:
  """Splits the slots over calls of compiled shapes, at the least total cost.

  Args:
    pages: [n] pages that each slot needs; at most sizes[-1].
    group: [n] of each slot; at most rows[-1] of each.
    rows, sizes: available rows of a group and pages of a table, ascending.

  Returns:
    Calls (indices into pages, rows, table size), each slot in one of them.
  """
  needed = np.searchsorted(sizes, pages)  # index of the smallest sufficient size
  counts = np.zeros((group.max() + 1, len(sizes)), np.int64)
  np.add.at(counts, (group, needed), 1)
  # best[high]: the cheapest split of the slots with needed < high, as its cost and its
  # calls (low, high, rows), each for the slots with low <= needed < high.
  best: list[tuple[int, list[tuple[int, int, int]]]] = [(0, [])]
  for high in range(1, len(sizes) + 1):
    if not counts[:, high - 1].any():
      best.append(best[-1])
      continue
    splits = []
    for low in range(high):
      most = counts[:, low:high].sum(axis=1).max()
      size = next((r for r in rows if r >= most), None)
      if size is not None:
        cost = (size + CALL_ROWS) * (ROW_PAGES + sizes[high - 1])
        splits.append((best[low][0] + cost, [*best[low][1], (low, high, size)]))
    best.append(min(splits))
  return [
    (np.flatnonzero((needed >= low) & (needed < high)), size, sizes[high - 1])
    for low, high, size in best[-1][1]
  ]
