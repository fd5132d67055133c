"""Adam, with MiniMax's β and ε (facts/algorithms.md §3.3)."""

from __future__ import annotations

import dataclasses

import optax

from m2jax.checks import require
from m2jax.optim.rule import UpdateRule


@dataclasses.dataclass(frozen=True)
class AdamConfig(UpdateRule):
  """Adam; AdamW with `OptimizerConfig.weight_decay`.

  Attributes:
    b1, b2: decay of the two moments.
    eps: 1e-15, since most gradients of RL are below 1e-14.
  """

  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-15

  def __post_init__(self):
    super().__post_init__()
    for field in ('b1', 'b2'):
      require(self, 0 <= getattr(self, field) < 1, field, 'in [0, 1)')
    require(self, self.eps > 0, 'eps', 'positive')

  def direction(self) -> optax.GradientTransformation:
    return optax.scale_by_adam(self.b1, self.b2, self.eps)
