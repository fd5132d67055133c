"""Robust comparisons of a series with its own past.

Medians and quantiles, so that a few outliers neither raise nor hide an alarm. Inputs
are finite float64 values [n]; results are indices into them. A long series is compared
at every k-th place, which bounds the time (`_PLACES`).
"""

from __future__ import annotations

import numpy as np

_PLACES = 50_000  # windows of a series that are compared
_BLOCK = 8192  # windows in memory at once
MAD_TO_SIGMA = 1.4826  # of a normal distribution


def moving_quantile(
  x: np.ndarray, window: int, q: float, starts: np.ndarray
) -> np.ndarray:
  """Quantile q of x[i : i + window] for each i in `starts`."""
  out = np.empty(len(starts))
  if not len(starts):
    return out
  windows = np.lib.stride_tricks.sliding_window_view(x, window)
  k = round(q * (window - 1))
  for first in range(0, len(starts), _BLOCK):
    part = windows[starts[first : first + _BLOCK]]
    out[first : first + _BLOCK] = np.partition(part, k, axis=1)[:, k]
  return out


def places(first: int, last: int) -> np.ndarray:
  """Indices first … last, at most `_PLACES` of them, evenly spaced."""
  return np.arange(first, last + 1, max(1, (last + 1 - first) // _PLACES))


def runs(at: np.ndarray, gap: int) -> list[tuple[int, int]]:
  """(first, last) of each run of indices whose neighbours are at most `gap` apart."""
  if not len(at):
    return []
  cuts = np.flatnonzero(np.diff(at) > gap)
  firsts, lasts = np.r_[0, cuts + 1], np.r_[cuts, len(at) - 1]
  return [(int(at[a]), int(at[b])) for a, b in zip(firsts, lasts, strict=True)]


def shifts(
  x: np.ndarray,
  *,
  before: int,
  after: int,
  factor: float,
  floor: float = 0.0,
  down: bool = False,
) -> list[tuple[int, int, float]]:
  """Level shifts: the median of `after` values beyond what `before` values ranged over.

  Upward, the bound is factor × their 0.9 quantile, at least `floor`; downward their 0.1
  quantile / factor.

  Returns:
    (first index beyond the bound, last one, bound) of each; it lasts until the level
    is back within the bound.
  """
  if len(x) < before + after:
    return []
  starts = places(before, len(x) - after)
  level = moving_quantile(x, after, 0.5, starts)
  past = moving_quantile(x, before, 0.1 if down else 0.9, starts - before)
  if down:
    bound = past / factor
    beyond = level < bound
  else:
    bound = np.maximum(past * factor, floor)
    beyond = level > bound
  found: list[tuple[int, int, float]] = []
  step = int(starts[1] - starts[0]) if len(starts) > 1 else 1
  for first, last in runs(starts[beyond], gap=after + step):
    if found and first <= found[-1][1]:
      continue
    i, j = np.searchsorted(starts, (first, last))
    limit = float(bound[i])
    # The past of later values has the new level too: it lasts until they come back.
    back = np.flatnonzero(level[j:] >= limit if down else level[j:] <= limit)
    end = int(starts[j + back[0]]) + after - 1 if len(back) else len(x)
    outside = x[first:end] < limit if down else x[first:end] > limit
    at = first + np.flatnonzero(outside)
    found.append((int(at[0]), int(at[-1]), limit))
  return found


def spikes(
  x: np.ndarray, *, before: int, z: float, floor: float
) -> list[tuple[int, int, float]]:
  """Upward spikes: values more than z robust deviations above the preceding median.

  A deviation is MAD × 1.4826 of the `before` values, at least `floor` × their median.
  One value alone is not a spike, since the noise of a loss has heavy tails: one of the
  three values after it must exceed z / 3 deviations.

  Returns:
    (first index, last one, bound) of each.
  """
  if len(x) < before + 2:
    return []
  starts = places(before, len(x) - 2)
  median = moving_quantile(x, before, 0.5, starts - before)
  high = moving_quantile(x, before, 0.75, starts - before)
  low = moving_quantile(x, before, 0.25, starts - before)
  # Half of the interquartile range is the MAD of a symmetric distribution.
  sigma = np.maximum(MAD_TO_SIGMA * (high - low) / 2, floor * np.abs(median))
  step = int(starts[1] - starts[0]) if len(starts) > 1 else 1
  of = np.minimum((np.arange(before, len(x)) - before) // step, len(starts) - 1)
  excess = (x[before:] - median[of]) / np.maximum(sigma[of], 1e-30)
  padded = np.r_[excess, np.full(3, -np.inf)]
  follows = np.max([padded[i : len(padded) - 3 + i] for i in (1, 2, 3)], axis=0)
  at = before + np.flatnonzero((excess > z) & (follows > z / 3))
  found = []
  for first, last in runs(at, gap=before):
    i = of[first - before]
    found.append((first, last, float(median[i] + z * sigma[i])))
  return found


def sustained(x: np.ndarray, window: int, bound: float) -> list[tuple[int, int]]:
  """(first, last) index of each part where the median of `window` values exceeds it."""
  if len(x) < window:
    return []
  starts = places(0, len(x) - window)
  beyond = starts[moving_quantile(x, window, 0.5, starts) > bound]
  step = int(starts[1] - starts[0]) if len(starts) > 1 else 1
  found = []
  for first, last in runs(beyond, gap=window + step):
    end = last + window
    at = first + np.flatnonzero(x[first:end] > bound)
    found.append((int(at[0]), int(at[-1])))
  return found


def fall(x: np.ndarray, most: int, least: int) -> tuple[int, float, float, float]:
  """The place where the mean of a noisy series falls most clearly.

  Welch's t of up to `most` values before each place and after it, at least `least`.

  Returns:
    (index of the first value after it, mean before, mean after, t); t is 0 if the
    series is too short, and the standard deviations are at least 0.05.
  """
  at = places(least, len(x) - least)
  if not len(at):
    return 0, 0.0, 0.0, 0.0
  total, squares = (np.r_[0.0, np.cumsum(y)] for y in (x, x * x))

  def moments(first, end):
    mean = (total[end] - total[first]) / (end - first)
    variance = (squares[end] - squares[first]) / (end - first) - mean**2
    return mean, np.maximum(variance, 0.05**2) / (end - first)

  before, error_before = moments(np.maximum(at - most, 0), at)
  after, error_after = moments(at, np.minimum(at + most, len(x)))
  t = (before - after) / np.sqrt(error_before + error_after)
  i = np.argmax(t)
  return int(at[i]), float(before[i]), float(after[i]), float(t[i])


def trend(x: np.ndarray, blocks: int = 8) -> float:
  """Goodman and Kruskal's γ of the medians of `blocks` equal parts and their order:
  −1 falls, 1 rises. Ties do not count: what has fallen to 0 stays there."""
  parts = np.array([np.median(part) for part in np.array_split(x, blocks)])
  signs = np.sign(parts[None, :] - parts[:, None])
  pairs = np.triu(signs, 1)
  return float(pairs.sum() / max(np.abs(pairs).sum(), 1))
