"""Which family the next training task is of: the more it can teach, the likelier.

A group whose trajectories all end alike has zero advantage and teaches nothing, so
solved prompts are retired (ScaleRL: at a pass rate of 0.9; facts/algorithms.md §3.3).
Families are not retired for good here: each comes in proportion to its recent failures,
or to how often its groups have mixed results, but never below a floor, so that what was
learned stays in the batch.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Mapping

PREFERENCES = ('failures', 'mixed')


@dataclasses.dataclass(frozen=True)
class CurriculumConfig:
  """How recent success p makes a family more or less frequent.

  Attributes:
    floor: least factor on a family's frequency, in (0, 1]. 1 is no curriculum.
    memory: trajectories over which success is averaged, roughly.
    prefer: the factor where it is larger. 'failures': the failure rate 1 - p. 'mixed':
      the probability that a group of G has both successes and failures,
      1 - p^G - (1 - p)^G, as if they were independent, so that families that always
      fail become rare too; 1 for a family that was not tried yet.
  """

  floor: float = 1.0
  memory: float = 64.0
  prefer: str = 'failures'

  def __post_init__(self):
    if not 0 < self.floor <= 1:
      raise ValueError(f'CurriculumConfig.floor={self.floor}: must be in (0, 1]')
    if self.memory < 1:
      raise ValueError(f'CurriculumConfig.memory={self.memory}: must be at least 1')
    if self.prefer not in PREFERENCES:
      raise ValueError(
        f'CurriculumConfig.prefer={self.prefer!r}: must be one of {PREFERENCES}'
      )


class Curriculum:
  """Recent success by family, and draws by it; safe from any thread.

  A restart forgets the successes: what was submitted is in the pool, and a few batches
  measure them again.
  """

  def __init__(
    self, config: CurriculumConfig, weights: Mapping[str, float], group_size: int
  ):
    self._config, self._group_size = config, group_size
    self._weights = dict(weights)
    # from 0, so that a family has to prove itself
    self._success = dict.fromkeys(weights, 0.0)
    self._known = dict.fromkeys(weights, 0.0)  # what the averages' weights sum to
    self._lock = threading.Lock()

  def observe(self, family: str, success: float) -> None:
    """Takes the verdict on one trajectory."""
    with self._lock:
      for averages, value in ((self._success, success), (self._known, 1.0)):
        average = averages.get(family, 0.0)
        averages[family] = average + (value - average) / self._config.memory

  def success(self) -> dict[str, float]:
    """Recent success of each family."""
    with self._lock:
      return dict(self._success)

  def draw(self, key: str) -> str:
    """A family, by the present weights; equal keys draw alike."""
    names = sorted(self._weights)
    with self._lock:
      factors = [max(self._config.floor, self._factor(name)) for name in names]
    weights = [self._weights[f] * x for f, x in zip(names, factors, strict=True)]
    return random.Random(key).choices(names, weights)[0]

  def _factor(self, family: str) -> float:
    if self._config.prefer == 'failures':
      return 1.0 - self._success[family]
    if not self._known[family]:
      return 1.0
    p = min(1.0, self._success[family] / self._known[family])
    return 1.0 - p**self._group_size - (1.0 - p) ** self._group_size
