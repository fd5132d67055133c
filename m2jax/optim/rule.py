"""The interface of an optimizer: its settings, and how they become an update.

Adding one: docs/add_an_optimizer.md.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import optax

from m2jax.checks import require
from m2jax.params import Kind


@dataclasses.dataclass(frozen=True)
class UpdateRule:
  """Base of the settings of an optimizer; a subclass adds its fields and `direction`.

  Attributes:
    KINDS: kinds of parameters that it can update.
    learning_rate: base rate, multiplied by the schedule.
  """

  KINDS: ClassVar[tuple[Kind, ...]] = tuple(Kind)

  learning_rate: float = 1e-3

  def __post_init__(self):
    require(self, self.learning_rate >= 0, 'learning_rate', 'at least 0')

  def direction(self) -> optax.GradientTransformation:
    """Gradients to directions of ascent, as `optax.scale_by_*`."""
    raise NotImplementedError(f'{type(self).__name__}.direction')

  def transformation(
    self, learning_rate: optax.Schedule, decay: optax.GradientTransformation
  ) -> optax.GradientTransformation:
    """Gradients to updates: −learning_rate · (direction + decay).

    A rule whose update is not of this form, such as one that retracts the parameters
    to a sphere, overrides this instead of `direction`.

    Args:
      learning_rate: by step, base rate and schedule multiplied.
      decay: adds the weight decay of the kinds that decay.
    """
    return optax.chain(
      self.direction(), decay, optax.scale_by_learning_rate(learning_rate)
    )
