"""Values of a record as the page takes them: checked, finite, cut and printable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from m2jax.observe import stats

_LARGEST = 1e15  # of a number; beyond it a browser's integers are not exact


class BadLine(ValueError):
  """A line of the record is not as `evolve.record` describes it."""


class Scores(NamedTuple):
  """A mean of scores.

  Attributes:
    mean: None without scores. n: number of scores. low, high: Wilson's 95 % interval.
  """

  mean: float | None
  n: int
  low: float | None
  high: float | None


def scores(total: float, n: int) -> Scores:
  """The mean of n scores with a sum, and its interval."""
  if not n:
    return Scores(None, 0, None, None)
  return Scores(total / n, n, *stats.wilson(min(max(total, 0.0), n), n))


def number(value: Any) -> float | None:
  """A finite number; None for anything else."""
  known = isinstance(value, int | float) and not isinstance(value, bool)
  return value if known and abs(value) <= _LARGEST else None


def integer(value: Any, name: str) -> int:
  """An integer from 0. Raises BadLine."""
  if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
    raise BadLine(f'{name}: not an integer from 0')
  return value


def score(value: Any) -> float | None:
  """A score in [0, 1], or None of a failure. Raises BadLine."""
  if value is None:
    return None
  if (found := number(value)) is None or not 0 <= found <= 1:
    raise BadLine('a score is not in [0, 1]')
  return float(found)


def rows(value: Any, width: int, name: str) -> list[Sequence[Any]]:
  """A list of lists of `width` values. Raises BadLine."""
  if not isinstance(value, list) or not all(
    isinstance(row, list) and len(row) == width for row in value
  ):
    raise BadLine(f'{name}: not a list of {width} values each')
  return value


def split(value: Any) -> tuple[float, int]:
  """Sum and number of the scores of (spec, seed, score). Raises BadLine."""
  found = [score(row[2]) for row in rows(value, 3, 'scores')]
  known = [x for x in found if x is not None]
  return math.fsum(known), len(known)


def cost(line: Mapping[str, Any]) -> list[float]:
  """Tokens, seconds and episodes of a line; what is no number counts as 0."""
  found = [0.0, 0.0, 0.0]
  for part in (line.get('cost'), line.get('incumbent_cost')):
    if isinstance(part, Mapping):
      for i, name in enumerate(('tokens', 'seconds', 'episodes')):
        found[i] += max(number(part.get(name)) or 0.0, 0.0)
  return found
