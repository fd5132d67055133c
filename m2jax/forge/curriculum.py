"""Which family the next training task is of: solved ones come seldom.

A group whose trajectories all succeed has zero advantage and teaches nothing, so
solved prompts are retired (ScaleRL: at a pass rate of 0.9; facts/algorithms.md §3.3).
Families are not retired for good here: they come with a lower frequency while their
recent success is high, so that what was learned stays in the batch.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """When a family counts as solved, and what follows.

  Attributes:
    solved_above: recent success from which on a family is solved.
    solved_weight: factor on a solved family's frequency, in (0, 1]; 1 is no curriculum.
    memory: trajectories over which success is averaged, roughly.
  """

  solved_above: float = 0.9
  solved_weight: float = 1.0
  memory: float = 64.0

  def __post_init__(self):
    if not 0 < self.solved_weight <= 1:
      raise ValueError(
        f'CurriculumConfig.solved_weight={self.solved_weight}: must be in (0, 1]'
      )
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
    self._success: dict[str, float] = {}
    self._lock = threading.Lock()

  def observe(self, family: str, success: float) -> None:
    """Takes the verdict on one trajectory."""
    with self._lock:
      # from 0, so that a family has to prove itself
      average = self._success.get(family, 0.0)
      self._success[family] = average + (success - average) / self._config.memory

  def solved(self) -> list[str]:
    """The families that count as solved."""
    with self._lock:
      above = self._config.solved_above
      return sorted(f for f, average in self._success.items() if average >= above)

  def draw(self, key: str) -> str:
    """A family, by the present weights; equal keys draw alike."""
    solved = set(self.solved())
    names = sorted(self._weights)
    weights = [
      self._weights[f] * (self._config.solved_weight if f in solved else 1.0)
      for f in names
    ]
    return random.Random(key).choices(names, weights)[0]
