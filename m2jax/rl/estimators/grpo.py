"""GRPO's surrogate (arXiv:2402.03300); `ppo_clip` has the formula."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from m2jax.rl import ppo_clip


@dataclasses.dataclass(frozen=True)
class Config(ppo_clip.Config):
  """GRPO: one ε, averages over trajectories, advantages by the group's deviation."""

  normalise: ClassVar[str] = 'group'

  kind: str = 'grpo'
  normaliser: str = 'trajectory'
