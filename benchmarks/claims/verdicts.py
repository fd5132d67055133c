"""Verdicts over seeds: paired differences, intervals, and the seeds that are needed.

The subject of a claim is compared by Student's t of the differences per seed, at level
0.05 / number of rivals (Bonferroni), since the verdict is about the rival that turned
out to be the strongest. With an interval of the difference and a margin
below which a difference does not matter:

  better      above 0
  worse       below 0
  equal       within ± margin
  undecided   none of these; more seeds would decide
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

LEVEL, POWER, MARGIN = 0.05, 0.8, 0.05
_MOST_SEEDS = 1000


@dataclasses.dataclass(frozen=True)
class Difference:
  """The mean difference to a rival over common seeds, and its interval.

  Attributes:
    rival: its name.
    mean, half: mean, and half of the interval; inf for fewer than two seeds.
    deviation: standard deviation over seeds.
    seeds: number of common seeds.
    level: the level of the interval's test.
  """

  rival: str
  mean: float
  half: float
  deviation: float
  seeds: int
  level: float

  @property
  def kind(self) -> str:
    """'better', 'worse', 'equal' or 'undecided'."""
    if self.mean - self.half > 0:
      return 'better'
    if self.mean + self.half < 0:
      return 'worse'
    if abs(self.mean) + self.half <= MARGIN:
      return 'equal'
    return 'undecided'


def difference(
  rival: str,
  ours: Mapping[int, float],
  theirs: Mapping[int, float],
  rivals: int = 1,
) -> Difference:
  """Compares scores by seed, as one of several comparisons.

  Args:
    rival: the name of the other arm.
    ours, theirs: scores by seed; seeds of only one are left out.
    rivals: number of comparisons that the interval is corrected for.

  Raises:
    ValueError: there is no common seed.
  """
  common = sorted(ours.keys() & theirs.keys())
  if not common:
    raise ValueError(f'no seed in common with {rival}')
  found = np.array([ours[s] - theirs[s] for s in common])
  level, n = LEVEL / rivals, len(common)
  deviation = float(np.std(found, ddof=1)) if n > 1 else math.inf
  half = math.inf
  if n > 1:
    half = float(stats.t.ppf(1 - level / 2, n - 1)) * deviation / math.sqrt(n)
  return Difference(rival, float(found.mean()), half, deviation, n, level)


def seeds_needed(effect: float, deviation: float, level: float = LEVEL) -> int | None:
  """Fewest seeds with which a paired t test shows an effect with probability POWER.

  Args:
    effect: the true mean difference.
    deviation: standard deviation of differences over seeds.
    level: the two-sided level of the test.

  Returns:
    None if it is more than a thousand.

  Example:
    >>> seeds_needed(0.5, 0.5)
    10
  """
  if deviation == 0:
    return 2
  for n in range(2, _MOST_SEEDS + 1):
    limit = stats.t.ppf(1 - level / 2, n - 1)
    shift = abs(effect) / deviation * math.sqrt(n)
    if stats.nct.sf(limit, n - 1, shift) >= POWER:
      return n
  return None


def strongest(
  ours: Mapping[int, float], rivals: Mapping[str, Mapping[int, float]]
) -> Difference | None:
  """The comparison with the rival of the highest mean; None without common seeds."""
  found = {k: v for k, v in rivals.items() if ours.keys() & v.keys()}
  if not found:
    return None
  best = max(found, key=lambda name: np.mean(list(found[name].values())))
  return difference(best, ours, found[best], len(rivals))


def sentence(subject: str, found: Difference) -> str:
  """The verdict in one sentence, computed from the difference alone."""
  size = f'{found.mean:+.3f} ± {found.half:.3f}, {found.seeds} seeds'
  if found.kind == 'better':
    return f'{subject} is better than {found.rival}, its strongest rival ({size}).'
  if found.kind == 'worse':
    return f'{subject} is worse than {found.rival}, its strongest rival ({size}).'
  if found.kind == 'equal':
    return (
      f'{subject} and {found.rival}, its strongest rival, are equal within {MARGIN} '
      f'({size}).'
    )
  if found.seeds < 2:
    return f'Undecided: {subject} and {found.rival} have {found.seeds} common seed.'
  effect = max(abs(found.mean), MARGIN)
  needed = seeds_needed(effect, found.deviation, found.level)
  about = f'about {needed}' if needed else f'more than {_MOST_SEEDS}'
  return (
    f'Undecided between {subject} and {found.rival}, its strongest rival ({size}): a '
    f'difference of {effect:.3f} would need {about} seeds.'
  )


def scores(
  runs: Sequence[Mapping], metric: str
) -> dict[str, dict[str, dict[int, float]]]:
  """Scores of runs by condition, arm and seed."""
  out: dict[str, dict[str, dict[int, float]]] = {}
  for run in runs:
    arms = out.setdefault(run['condition'], {})
    arms.setdefault(run['arm'], {})[run['seed']] = run[metric]
  return out
