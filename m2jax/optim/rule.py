"""The interface of an optimizer: its settings, and how they become an update.

Adding one: docs/add_an_optimizer.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import optax

from m2jax.checks import require
from m2jax.optim.matrices import Matrices
from m2jax.params import Kind


@dataclasses.dataclass(frozen=True)
class UpdateRule:
  """Base of the settings of an optimizer; a subclass adds its fields and `direction`.

  Attributes:
    KINDS: kinds of parameters that it can update.
    HIDDEN: the kinds among these that it updates if it is `OptimizerConfig.name`.
    learning_rate: base rate, multiplied by the schedule.
  """

  KINDS: ClassVar[tuple[Kind, ...]] = tuple(Kind)
  HIDDEN: ClassVar[tuple[Kind, ...]] = (Kind.MATRIX, Kind.EXPERT)

  learning_rate: float = 1e-3

  def __post_init__(self):
    require(self, self.learning_rate >= 0, 'learning_rate', 'at least 0')

  def direction(self) -> optax.GradientTransformation:
    """Gradients to directions of ascent, as `optax.scale_by_*`."""
    raise NotImplementedError(f'{type(self).__name__}.direction')

  def transformation(
    self,
    learning_rate: optax.Schedule,
    decay: optax.GradientTransformation,
    matrices: Matrices,
  ) -> optax.GradientTransformation:
    """Gradients to updates: −learning_rate · (direction + decay).

    A rule whose update is not of this form, such as one that retracts the parameters
    to a sphere, overrides this instead of `direction`.

    Args:
      learning_rate: step → base rate times schedule multiplier.
      decay: adds the weight decay of the kinds that decay.
      matrices: how parameters hold matrices, for rules that work on whole ones.
    """
    del matrices
    return optax.chain(
      self.direction(), decay, optax.scale_by_learning_rate(learning_rate)
    )

  def initialize(self, params: Any, matrices: Matrices) -> Any:
    """Random parameters → those that training starts from; unchanged by default."""
    del matrices
    return params


@dataclasses.dataclass(frozen=True)
class MatrixRule(UpdateRule):
  """Base of the rules that work on whole matrices, [in, out].

  Attributes:
    split_heads: take each head's q, k and v as a matrix, not those of all heads.
  """

  KINDS: ClassVar[tuple[Kind, ...]] = tuple(k for k in Kind if k != Kind.NORM)

  split_heads: bool = False

  def matrices(self, known: Matrices) -> Matrices:
    """The matrices that the rule works on.

    Raises:
      ValueError: heads are to be split, and `known` has none.
    """
    if not self.split_heads:
      return dataclasses.replace(known, heads={})
    if not known.heads:
      raise ValueError(
        f'{type(self).__name__}.split_heads=True: needs the numbers of heads; pass the '
        'model to optimizer.make'
      )
    return known

  def matrix_direction(self, matrices: Matrices) -> optax.GradientTransformation:
    """As `direction`, with the matrices that the rule works on."""
    raise NotImplementedError(f'{type(self).__name__}.matrix_direction')

  def transformation(self, learning_rate, decay, matrices):
    """As `UpdateRule`'s, of `matrix_direction`."""
    return optax.chain(
      self.matrix_direction(self.matrices(matrices)),
      decay,
      optax.scale_by_learning_rate(learning_rate),
    )
