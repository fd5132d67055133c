"""Which family the next training task is of: the more often it fails, the likelier.

A group whose trajectories all succeed has zero advantage and teaches nothing, so
solved prompts are retired (ScaleRL: at a pass rate of 0.9; facts/algorithms.md §3.3).
Families are not retired for good here: each comes in proportion to its recent failures,
but never below a floor, so that what was learned stays in the batch.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """How failures make a family more frequent.

  Attributes:
    floor: least factor on a family's frequency, in (0, 1]; the factor is its recent
      failure rate where that is larger. 1 is no curriculum.
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

  def __init__(self, config: CurriculumConfig, weights: Mapping[str, float]):
    self._config = config
    self._weights = dict(weights)
    # from 0, so that a family has to prove itself
    self._success = dict.fromkeys(weights, 0.0)
    self._lock = threading.Lock()

  def observe(self, family: str, success: float) -> None:
    """Takes the verdict on one trajectory."""
    with self._lock:
      average = self._success.get(family, 0.0)
      self._success[family] = average + (success - average) / self._config.memory

  def success(self) -> dict[str, float]:
    """Recent success of each family."""
    with self._lock:
      return dict(self._success)

  def draw(self, key: str) -> str:
    """A family, by the present weights; equal keys draw alike."""
    success, floor = self.success(), self._config.floor
    names = sorted(self._weights)
    weights = [self._weights[f] * max(floor, 1.0 - success[f]) for f in names]
    return random.Random(key).choices(names, weights)[0]
