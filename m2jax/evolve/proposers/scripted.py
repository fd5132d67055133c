"""Changes from a list, one a round."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.evolve import proposers


@dataclasses.dataclass(frozen=True)
class Config(proposers.ProposerConfig):
  """The list.

  Attributes:
    script: the changes of round 1, 2, …, as JSON objects; later rounds have none.
  """

  kind: str = 'scripted'
  script: Sequence[Mapping[str, Any]] = ()


@dataclasses.dataclass(frozen=True)
class Scripted:
  """See the module."""

  config: Config

  def propose(self, view: proposers.View) -> proposers.Proposal:
    if view.round > len(self.config.script):
      raise proposers.ProposerFailed('the script has ended')
    changes = dict(self.config.script[view.round - 1])
    return proposers.Proposal(changes, f'entry {view.round} of the script')


make = Scripted
