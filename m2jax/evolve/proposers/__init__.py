"""Proposers: what to change next. A kind is a module with `Config` and `make(config)`.

  scripted       changes from a list
  same           none: A/A rounds, which measure the rate of false keeps
  random_search  one to three operators of `m2jax.evolve.operators`, drawn at random
  tpe            tree-structured Parzen estimator over the same operators (optuna)
  analyst        rules that read failing trajectories, and combine what looked better
  model          a model by URL, which answers with a JSON object
  gepa           a model by URL, asked by GEPA's reflective mutation for one text

A proposer is a function of its `View`: it has no state, so that a killed round resumes,
and sees neither specs, seeds, the other splits nor the budgets.
"""

from __future__ import annotations

import dataclasses
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from m2jax import kinds
from m2jax.evolve.scaffold import Bound, Scaffold

KINDS = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


class ProposerFailed(Exception):
  """There is no proposal this round; the reason is recorded."""


@dataclasses.dataclass(frozen=True)
class ProposerConfig:
  """Settings that every kind has: the module that defines it."""

  kind: str

  @classmethod
  def of_kind(cls, kind: str) -> type[ProposerConfig]:
    """Returns the config class of a kind. Raises ValueError for an unknown kind."""
    return kinds.module(__package__, kind).Config


@dataclasses.dataclass(frozen=True)
class Attempt:
  """An earlier candidate, or the start (round 0).

  Attributes:
    round: its round.
    parent: its parent's round, None of the start.
    values: all of its fields; None if it was rejected before its evaluation.
    changes: what it changed in its parent.
    score: mean development score, None without an evaluation.
    effect: mean difference from the incumbent of its round, of `pairs` attempts.
    decision, reason: what the loop decided, and why.
    note: the proposer's.
  """

  round: int
  parent: int | None
  values: Mapping[str, Any] | None
  changes: Mapping[str, Any]
  score: float | None
  effect: float | None
  decision: str
  reason: str
  note: str = ''
  pairs: int = 0


@dataclasses.dataclass(frozen=True)
class View:
  """All that a proposer sees.

  Attributes:
    round: the round.
    seed: a seed for its own draws in this round.
    parent: the scaffold to change.
    parent_round: its round.
    bounds: field → bound.
    tools: name and description of the tasks' tools.
    attempts: the start and earlier candidates, oldest first.
    failures: failing development trajectories of the parent: score, end_reason, text.
    memory: what the proposer last wrote.
  """

  round: int
  seed: int
  parent: Scaffold
  parent_round: int
  bounds: Mapping[str, Bound]
  tools: Sequence[Mapping[str, str]]
  attempts: Sequence[Attempt]
  failures: Sequence[Mapping[str, Any]]
  memory: str


@dataclasses.dataclass(frozen=True)
class Proposal:
  """A change of the parent.

  Attributes:
    changes: field → value; 'rules' is the source of rules.py.
    note: what it is for, in a line.
    memory, criticism: markdown for later rounds: what is known, what went wrong.
    tokens: what it cost.
    source: where it is from, for the record.
  """

  changes: Mapping[str, Any]
  note: str = ''
  memory: str = ''
  criticism: str = ''
  tokens: int = 0
  source: str = ''


class Proposer(Protocol):
  """Proposes changes."""

  def propose(self, view: View) -> Proposal:
    """The proposal of a round. Raises ProposerFailed."""


def make(config: ProposerConfig) -> Proposer:
  """Makes the proposer of a config."""
  return kinds.module(__package__, config.kind).make(config)
