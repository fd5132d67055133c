"""Statistics of observe: intervals against their definition, averages against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.observe import stats


def _score_interval(successes: int, n: int, z: float) -> tuple[float, float]:
  """The interval by its definition, without Wilson's formula.

  A score test at z keeps p when |p̂ − p| <= z·√(p(1 − p)/n). Its two ends are found by
  bisection between p̂, which is kept, and 0 and 1.
  """
  share = successes / n

  def kept(p: float) -> bool:
    return abs(share - p) <= z * math.sqrt(p * (1 - p) / n) + 1e-15

  ends = []
  for outside in (0.0, 1.0):
    inside = share
    if kept(outside):
      inside = outside
    for _ in range(200):
      middle = (inside + outside) / 2
      inside, outside = (middle, outside) if kept(middle) else (inside, middle)
    ends.append(inside)
  return ends[0], ends[1]


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_wilson_is_the_score_test_inverted(data):
  """The headline's intervals must be Wilson's: compared with the definition."""
  n = data.draw(st.integers(1, 2000))
  successes = data.draw(st.integers(0, n))
  z = data.draw(st.sampled_from([1.0, 1.96, 2.576]))
  np.testing.assert_allclose(
    stats.wilson(successes, n, z), _score_interval(successes, n, z), atol=1e-9
  )


def test_wilson_covers_95_percent():
  """What '95 %' promises a reader: exact binomial coverage, averaged over p."""
  n, coverage = 100, []
  intervals = [stats.wilson(k, n) for k in range(n + 1)]
  for p in np.linspace(0.02, 0.98, 97):
    pmf = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    coverage.append(
      sum(m for m, (low, high) in zip(pmf, intervals, strict=True) if low <= p <= high)
    )
  assert 0.945 <= np.mean(coverage) <= 0.96


def test_wilson_without_trials_knows_nothing_and_bad_counts_raise():
  """Edges a run meets: nothing evaluated yet, and counts that cannot be."""
  assert stats.wilson(0, 0) == (0.0, 1.0)
  assert stats.wilson(0, 20)[0] == 0.0
  assert stats.wilson(20, 20)[1] == 1.0
  for successes, n in ((3, 2), (-1, 2), (1, -1)):
    with pytest.raises(ValueError, match='successes'):
      stats.wilson(successes, n)


@settings(deadline=None, max_examples=100)
@given(
  st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), max_size=30), st.integers(1, 12)
)
def test_moving_average_is_the_mean_of_the_last_finite_values(values, window):
  """The curve people judge a run by, NaN losses among its points."""
  found = stats.moving_average(values, window)
  assert len(found) == len(values)
  for i, mean in enumerate(found):
    part = np.asarray(values[max(0, i - window + 1) : i + 1])
    part = part[np.isfinite(part)]
    expected = part.mean() if part.size else math.nan
    np.testing.assert_allclose(mean, expected, rtol=1e-9, atol=1e-6)
