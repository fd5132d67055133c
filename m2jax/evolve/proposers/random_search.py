"""Random search: one to three operators, drawn with equal probability."""

from __future__ import annotations

import dataclasses
import random

from m2jax.checks import require
from m2jax.evolve import operators, proposers


@dataclasses.dataclass(frozen=True)
class Config(proposers.ProposerConfig):
  """How far a candidate is from its parent.

  Attributes:
    most: maximum fields that change.
  """

  kind: str = 'random_search'
  most: int = 3

  def __post_init__(self):
    require(self, self.most >= 1, 'most', 'at least 1')


@dataclasses.dataclass(frozen=True)
class RandomSearch:
  """See the module."""

  config: Config

  def propose(self, view: proposers.View) -> proposers.Proposal:
    rng, current = random.Random(view.seed), view.parent.values
    chosen = rng.sample(operators.OPERATORS, rng.randint(1, self.config.most))
    drawn = {
      o.field: operators.draw(o, current[o.field], rng, view.bounds) for o in chosen
    }
    changes = {name: value for name, value in drawn.items() if value != current[name]}
    return proposers.Proposal(changes, f'random: {", ".join(changes)}')


make = RandomSearch
