"""DAPO's surrogate (arXiv:2503.14476); `ppo_clip` has the formula."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from m2jax.rl import ppo_clip


@dataclasses.dataclass(frozen=True)
class Config(ppo_clip.Config):
  """DAPO: a higher upper bound, averages over tokens, and GRPO's advantages."""

  normalise: ClassVar[str] = 'group'

  kind: str = 'dapo'
  normaliser: str = 'token'
  clip_high: float = 0.28
