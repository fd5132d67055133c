"""Statistics for reports: intervals and moving averages.

Wilson's score interval: E. B. Wilson, "Probable Inference, the Law of Succession, and
Statistical Inference", JASA 22 (1927). Plain Python, for a handful of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def wilson(successes: float, n: int, z: float = 1.96) -> tuple[float, float]:
  """Wilson score interval of a proportion.

  The interval is every p with |p̂ − p| <= z·√(p(1 − p)/n): the values that a score test
  at z does not reject.

  Args:
    successes: successes among n; a sum of scores in [0, 1] may be fractional.
    n: trials; 0 gives (0, 1).
    z: normal quantile; 1.96 for 95 %.

  Returns:
    (low, high), both in [0, 1].

  Raises:
    ValueError: successes outside [0, n], or z < 0.
  """
  if n < 0 or not 0 <= successes <= n:
    raise ValueError(f'wilson: successes={successes} is not within [0, n={n}]')
  if z < 0:
    raise ValueError(f'wilson: z={z} is negative')
  if n == 0:
    return 0.0, 1.0
  p, z2 = successes / n, z * z
  centre = p + z2 / (2 * n)
  spread = z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
  low = (centre - spread) / (1 + z2 / n)
  high = (centre + spread) / (1 + z2 / n)
  # At p̂ = 0 and 1 one end is exact; rounding could move it outside [0, 1].
  low = 0.0 if successes == 0 else max(0.0, low)
  high = 1.0 if successes == n else min(1.0, high)
  return low, high


def moving_average(values: Iterable[float], window: int) -> list[float]:
  """Trailing mean of up to the last `window` values.

  Non-finite values are ignored; a window without finite values gives NaN.

  Raises:
    ValueError: window < 1.
  """
  if window < 1:
    raise ValueError(f'moving_average: window={window} must be at least 1')
  values = list(values)
  means = []
  for end in range(1, len(values) + 1):
    finite = [v for v in values[max(0, end - window) : end] if math.isfinite(v)]
    means.append(math.fsum(finite) / len(finite) if finite else math.nan)
  return means
