"""How fast an engine replica works, estimated from its own counters.

Between two snapshots of a replica's statistics its engine thread was busy for

  busy_s ≈ prefill_s · (prefill tokens) + call_s · (decode calls) + draw_s · (sampled
  tokens)

The three times are the non-negative least-squares fit over the last intervals, and a
prior of little weight, so that they follow a change of load or of hardware.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np

COUNTERS = ('prefill_tokens', 'decode_calls', 'sampled_tokens')
_INTERVALS = 64
_PRIOR_WEIGHT = 0.05  # of the evidence of an interval


@dataclasses.dataclass(frozen=True)
class Rates:
  """Times of an engine's work.

  Attributes:
    prefill_s: of a prompt token that is not cached.
    call_s: of a decode call, and draw_s of each token that it samples.
  """

  prefill_s: float
  call_s: float
  draw_s: float

  def decode_s(self, rows: float, steps: float) -> float:
    """Of a decode call that samples `steps` tokens for each of `rows` sequences."""
    return self.call_s + self.draw_s * rows * steps


class RateEstimator:
  """The rates of one replica.

  Attributes:
    rates: the estimate.
  """

  def __init__(self, prior: Rates, *, least_s: float = 0.2):
    """Snapshots less than `least_s` of busy time apart are taken together."""
    self.rates = prior
    self._prior = prior
    self._least_s = least_s
    self._rows: collections.deque[np.ndarray] = collections.deque(maxlen=_INTERVALS)
    self._last: np.ndarray | None = None

  def observe(self, stats: Mapping[str, float]) -> None:
    """Takes a snapshot of `Scheduler.stats`; one that went back begins anew."""
    now = np.array([stats['busy_s'], *(stats[key] for key in COUNTERS)], float)
    last = self._last
    if last is None or np.any(now < last):  # the first, or another engine's
      self._last = now
      return
    if now[0] - last[0] < self._least_s:
      return
    self._last = now
    self._rows.append(now - last)
    rows = np.stack(self._rows)
    busy, work = rows[:, 0], rows[:, 1:]
    # The prior is an interval of each kind of work alone, of the mean amount.
    scale = np.maximum(work.mean(axis=0), 1.0)
    prior = np.array(dataclasses.astuple(self._prior))
    weight = np.sqrt(_PRIOR_WEIGHT)
    found = _least_squares(
      np.concatenate([work, np.diag(scale * weight)]),
      np.concatenate([busy, scale * prior * weight]),
    )
    self.rates = Rates(*found.tolist())


def _least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """argmin ‖a x − b‖ over x ≥ 0, by trying which entries are 0; a [n, 3], b [n]."""
  scale = np.linalg.norm(a, axis=0)
  a = a / scale
  best, least = np.zeros(a.shape[1]), np.inf
  for count in range(a.shape[1], -1, -1):
    for free in itertools.combinations(range(a.shape[1]), count):
      x = np.zeros(a.shape[1])
      if free:
        x[list(free)] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
      error = np.linalg.norm(a @ x - b)
      if np.all(x >= 0) and error < least:
        best, least = x, error
    if count == a.shape[1] and least < np.inf:
      break  # the unconstrained optimum
  return best / scale
