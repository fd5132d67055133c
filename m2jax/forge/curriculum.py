"""Samples the family of each training task, by how much its recent verdicts vary.

A group whose trajectories have equal verdicts has zero advantage and no gradient
(DAPO's dynamic sampling and ScaleRL's retired prompts, facts/algorithms.md §3.3). Each
family is sampled in proportion to the standard deviation of its recent verdicts, with a
floor, so that solved families stay in the batch and unsolved ones are still tried.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Mapping

from m2jax.checks import require


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """How verdicts change the frequency of a family.

  Attributes:
    floor: minimum factor on a family's frequency, in (0, 1]. The factor is twice the
      standard deviation of its verdicts: 1 at a success rate of 1/2. A floor of 1
      disables the curriculum.
    memory: approximate number of trajectories over which verdicts are averaged.
  """

  floor: float = 1.0
  memory: float = 64.0

  def __post_init__(self):
    require(self, 0 < self.floor <= 1, 'floor', 'in (0, 1]')
    require(self, self.memory >= 1, 'memory', 'at least 1')


@dataclasses.dataclass
class _Average:
  """Moving averages of successes, verdicts and squared verdicts, from 1/2."""

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
  """Samples families by their recent verdicts. Thread-safe.

  A restart resets the averages, which a few batches estimate again; items submitted
  before it are in the pool.
  """

  def __init__(self, config: CurriculumConfig, weights: Mapping[str, float]):
    self._config = config
    self._weights = dict(weights)
    self._recent = {family: _Average() for family in weights}
    self._lock = threading.Lock()

  def observe(self, family: str, verdict: float) -> None:
    """Adds the verdict on one trajectory, in [0, 1]."""
    with self._lock:
      average = self._recent.setdefault(family, _Average())
      average.observe(verdict, 1 / self._config.memory)

  def success(self) -> dict[str, float]:
    """Recent fraction of trajectories with verdict 1, by family."""
    with self._lock:
      return {family: average.success for family, average in self._recent.items()}

  def draw(self, key: str, weights: Mapping[str, float] | None = None) -> str:
    """Samples a family by the current weights; a function of them and `key` alone.

    Args:
      key: seed of the draw.
      weights: frequencies of the families in this stage; None: those of the start.
    """
    base = self._weights if weights is None else weights
    names = sorted(base)
    with self._lock:
      factors = [2 * self._recent[name].deviation() for name in names]
    weights = [
      base[name] * max(self._config.floor, factor)
      for name, factor in zip(names, factors, strict=True)
    ]
    return random.Random(key).choices(names, weights)[0]
