"""Which family the next training task is of: one whose groups are likely mixed.

A group whose trajectories all succeed, or all fail, has zero advantage and teaches
nothing (DAPO's dynamic sampling and ScaleRL's retired prompts, facts/algorithms.md
§3.3). With success rate p, a group of G is mixed with probability 1 − p^G − (1 − p)^G:
each family comes in proportion to it, but never below a floor, so that what was learned
stays in the batch and what cannot be done yet is tried now and then.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """How success makes a family more or less frequent.

  Attributes:
    floor: least factor on a family's frequency, in (0, 1]; the factor is the chance of
      a mixed group where that is larger. 1 is no curriculum.
    memory: trajectories over which success is averaged, roughly.
  """

  floor: float = 1.0
  memory: float = 64.0

  def __post_init__(self):
    if not 0 < self.floor <= 1:
      raise ValueError(f'CurriculumConfig.floor={self.floor}: must be in (0, 1]')
    if self.memory < 1:
      raise ValueError(f'CurriculumConfig.memory={self.memory}: must be at least 1')


class Curriculum:
  """Recent success by family, and draws by it; safe from any thread.

  A restart forgets the successes: what was submitted is in the pool, and a few batches
  measure them again.
  """

  def __init__(
    self, config: CurriculumConfig, weights: Mapping[str, float], group_size: int
  ):
    self._config = config
    self._weights = dict(weights)
    self._group_size = group_size
    # every family is worth a try until it was measured
    self._success = dict.fromkeys(weights, 0.5)
    self._lock = threading.Lock()

  def observe(self, family: str, success: float) -> None:
    """Takes the verdict on one trajectory."""
    with self._lock:
      average = self._success.get(family, 0.5)
      self._success[family] = average + (success - average) / self._config.memory

  def success(self) -> dict[str, float]:
    """Recent success of each family."""
    with self._lock:
      return dict(self._success)

  def draw(self, key: str) -> str:
    """A family, by the present weights; equal keys draw alike."""
    success, floor = self.success(), self._config.floor
    names = sorted(self._weights)
    weights = [
      self._weights[f] * max(floor, mixed(success[f], self._group_size)) for f in names
    ]
    return random.Random(key).choices(names, weights)[0]


def mixed(success: float, group_size: int) -> float:
  """Probability that a group has both successes and failures.

  Example:
    >>> mixed(0.5, 2), mixed(1.0, 8)
    (0.5, 0.0)
  """
  return 1.0 - success**group_size - (1.0 - success) ** group_size
