"""Which family the next training task is of: one whose verdicts differ.

A group whose trajectories have equal verdicts has zero advantage and teaches nothing
(DAPO's dynamic sampling and ScaleRL's retired prompts, facts/algorithms.md §3.3). Each
family comes in proportion to the standard deviation of its recent verdicts, but never
below a floor, so that what was learned stays in the batch and what cannot be done yet
is tried now and then.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Mapping

from m2jax.checks import require


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """How verdicts make a family more or less frequent.

  Attributes:
    floor: least factor on a family's frequency, in (0, 1]; the factor is twice the
      standard deviation of the verdicts where that is larger: 1 at a success rate of
      1/2. A floor of 1 is no curriculum.
    memory: trajectories over which verdicts are averaged, roughly.
  """

  floor: float = 1.0
  memory: float = 64.0

  def __post_init__(self):
    require(self, 0 < self.floor <= 1, 'floor', 'in (0, 1]')
    require(self, self.memory >= 1, 'memory', 'at least 1')


@dataclasses.dataclass
class _Average:
  """Of recent successes, verdicts and their squares; as if half had succeeded."""

  success: float = 0.5
  verdict: float = 0.5
  square: float = 0.5

  def observe(self, verdict: float, share: float) -> None:
    self.success += share * ((verdict >= 1) - self.success)
    self.verdict += share * (verdict - self.verdict)
    self.square += share * (verdict**2 - self.square)

  def deviation(self) -> float:
    return max(0.0, self.square - self.verdict**2) ** 0.5


class Curriculum:
  """Recent verdicts by family, and draws by them; safe from any thread.

  A restart forgets the verdicts: what was submitted is in the pool, and a few batches
  measure them again.
  """

  def __init__(self, config: CurriculumConfig, weights: Mapping[str, float]):
    self._config = config
    self._weights = dict(weights)
    # every family is worth a try until it was measured
    self._recent = {family: _Average() for family in weights}
    self._lock = threading.Lock()

  def observe(self, family: str, verdict: float) -> None:
    """Takes the verdict on one trajectory, in [0, 1]."""
    with self._lock:
      average = self._recent.setdefault(family, _Average())
      average.observe(verdict, 1 / self._config.memory)

  def success(self) -> dict[str, float]:
    """Recent share of verdicts of 1, by family."""
    with self._lock:
      return {family: average.success for family, average in self._recent.items()}

  def draw(self, key: str) -> str:
    """A family, by the present weights; equal keys draw alike."""
    names = sorted(self._weights)
    with self._lock:
      factors = [2 * self._recent[name].deviation() for name in names]
    weights = [
      self._weights[name] * max(self._config.floor, factor)
      for name, factor in zip(names, factors, strict=True)
    ]
    return random.Random(key).choices(names, weights)[0]
