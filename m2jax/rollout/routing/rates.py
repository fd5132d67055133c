"""How fast an engine replica works, estimated from its own counters.

Between two snapshots of a replica's statistics its engine thread was busy for

  busy_s ≈ prefill_s · (prefill tokens, with padding)
           + position_s · (positions that they attend to)
           + call_s · (decode calls) + draw_s · (sampled tokens)

The four times are the non-negative least-squares fit over the intervals so far, the
latest with most weight, and a prior of little weight.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

_DECAY = 0.998  # of the evidence of an interval, when the next one is added
_PRIOR_WEIGHT = 0.01  # of the evidence of the largest interval


@dataclasses.dataclass(frozen=True)
class Rates:
  """Times of an engine's work.

  Attributes:
    prefill_s: time per prompt token that is not cached; position_s is added per
      position that it attends to, so a token deep in a prompt costs more than an early
      one.
    call_s: time of a decode call; draw_s is added per token that it samples.
  """

  prefill_s: float
  position_s: float
  call_s: float
  draw_s: float

  def decode_s(self, rows: float, steps: float) -> float:
    """Time of a decode call that samples `steps` tokens for `rows` sequences each."""
    return self.call_s + self.draw_s * rows * steps


class RateEstimator:
  """The rates of one replica.

  Attributes:
    rates: the estimate.
    measured: whether it is based on more than the prior.
  """

  def __init__(self, prior: Rates, *, least_s: float = 1.0):
    """Snapshots less than `least_s` of busy time apart are merged."""
    self.rates, self.measured = prior, False
    self._least_s = least_s
    self._last: np.ndarray | None = None
    # Sums over intervals, the latest with most weight: of work [4] times work and times
    # busy seconds. The prior is an interval of each kind of work alone.
    self._prior = np.array(dataclasses.astuple(prior))
    self._products, self._busy = np.zeros((4, 4)), np.zeros(4)
    self._squares = np.zeros(4)

  def observe(self, stats: Mapping[str, float]) -> None:
    """Takes a snapshot of `Scheduler.stats`; starts over if counters went back."""
    tokens = stats['prefill_tokens'] + stats['prefill_padding_tokens']
    reads = stats['prefill_positions']
    work = tokens, reads, stats['decode_calls'], stats['sampled_tokens']
    now = np.array([stats['busy_s'], *work], float)
    last = self._last
    if last is None or np.any(now < last):  # the first, or another engine's
      self._last = now
      return
    if now[0] - last[0] < self._least_s:
      return
    self._last = now
    busy, work = (now - last)[0], (now - last)[1:]
    self._products = _DECAY * self._products + np.outer(work, work)
    self._busy = _DECAY * self._busy + work * busy
    self._squares = np.maximum(self._squares, work**2)
    weight = _PRIOR_WEIGHT * np.maximum(self._squares, 1.0)
    found = _least_squares(
      self._products + np.diag(weight), self._busy + weight * self._prior
    )
    self.rates, self.measured = Rates(*found.tolist()), True


def mean(rates: Sequence[Rates]) -> Rates:
  """The mean rates of at least one replica."""
  return Rates(*np.mean([dataclasses.astuple(r) for r in rates], axis=0).tolist())


def _least_squares(products: np.ndarray, targets: np.ndarray) -> np.ndarray:
  """argmin xᵀ products x − 2 xᵀ targets over x ≥ 0, trying which entries are 0."""
  scale = np.sqrt(np.diag(products))
  products, targets = products / np.outer(scale, scale), targets / scale
  best, least = np.zeros(len(scale)), 0.0
  for count in range(len(scale), 0, -1):
    for free in itertools.combinations(range(len(scale)), count):
      free, x = list(free), np.zeros(len(scale))
      x[free] = np.linalg.solve(products[np.ix_(free, free)], targets[free])
      value = x @ products @ x - 2 * x @ targets
      if np.all(x >= 0) and value < least:
        best, least = x, value
    if count == len(scale) and least < 0:
      break  # the unconstrained optimum
  return best / scale
