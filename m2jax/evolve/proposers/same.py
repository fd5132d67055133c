"""A/A rounds: the candidate is its parent. Each keep is a false one.

Needs `archive.allow_duplicates` and `archive.method='incumbent'`; with `paired_seeds`
of the loop, a deterministic evaluator scores both alike.
"""

from __future__ import annotations

import dataclasses

from m2jax.evolve import proposers


@dataclasses.dataclass(frozen=True)
class Config(proposers.ProposerConfig):
  """No settings."""

  kind: str = 'same'


@dataclasses.dataclass(frozen=True)
class Same:
  """See the module."""

  config: Config

  def propose(self, view: proposers.View) -> proposers.Proposal:
    return proposers.Proposal({}, 'A/A')


make = Same
