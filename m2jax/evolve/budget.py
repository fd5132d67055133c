"""Hard budgets of a lineage, and why it stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from m2jax.checks import require


@dataclasses.dataclass(frozen=True)
class Cost:
  """What something cost.

  Attributes:
    tokens: tokens of prompts and responses, the proposer's included.
    seconds: elapsed time.
    episodes: attempts at tasks.
  """

  tokens: int = 0
  seconds: float = 0.0
  episodes: int = 0

  def __add__(self, other: Cost) -> Cost:
    return Cost(
      self.tokens + other.tokens,
      self.seconds + other.seconds,
      self.episodes + other.episodes,
    )

  @classmethod
  def of(cls, line: Mapping[str, Any]) -> Cost:
    """What a line of the record cost."""
    found = [Cost(**line[key]) for key in ('cost', 'incumbent_cost') if key in line]
    return sum(found, Cost())

  def as_dict(self) -> dict[str, Any]:
    """The cost as JSON has it."""
    return {**dataclasses.asdict(self), 'seconds': round(self.seconds, 3)}


@dataclasses.dataclass(frozen=True)
class BudgetConfig:
  """Bounds of a lineage; a round that has begun is finished. 0: no bound.

  Attributes:
    rounds: planned rounds, over which the gate's level is spent; not 0.
    seconds: elapsed time of all phases, over restarts.
    tokens: tokens of all attempts and proposals.
    failures: rounds in a row that did not reach the development evaluation.
    patience: rounds in a row without a keep.
  """

  rounds: int = 100
  seconds: float = 0.0
  tokens: int = 0
  failures: int = 10
  patience: int = 0

  def __post_init__(self):
    require(self, self.rounds >= 1, 'rounds', 'at least 1')
    for name in ('seconds', 'tokens', 'failures', 'patience'):
      require(self, getattr(self, name) >= 0, name, 'at least 0')


def stop_reason(
  config: BudgetConfig, rounds: int, spent: Cost, failures: int, since_keep: int
) -> str:
  """Why no further round begins, or ''.

  Args:
    config: bounds.
    rounds: rounds that have a decision.
    spent: cost of all lines.
    failures, since_keep: rounds in a row (`BudgetConfig`).
  """
  if rounds >= config.rounds:
    return f'rounds: {rounds} of {config.rounds}'
  if config.seconds and spent.seconds >= config.seconds:
    return f'seconds: {spent.seconds:.0f} of {config.seconds:.0f}'
  if config.tokens and spent.tokens >= config.tokens:
    return f'tokens: {spent.tokens:,} of {config.tokens:,}'
  if config.failures and failures >= config.failures:
    return f'failures: {failures} rounds in a row reached no evaluation'
  if config.patience and since_keep >= config.patience:
    return f'patience: {since_keep} rounds in a row without a keep'
  return ''
