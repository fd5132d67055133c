"""Several scaffolds in one run: each domain of `tasks.mixed` has its own agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.agents.agent import AgentConfig, Shown
from m2jax.agents.by_task import ByTask
from m2jax.tasks import mixed


@dataclasses.dataclass(frozen=True)
class Config(AgentConfig):
  """The agents of a run.

  Attributes:
    domains: name of a domain -> its agent.
  """

  kind: str = 'mixed'
  domains: Mapping[str, AgentConfig] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for name, agent in self.domains.items():
      if agent.author is not None:
        raise ValueError(
          f'domains[{name!r}]: a kind that writes its own prompts cannot be mixed yet'
        )

  def of_task(self, spec: str) -> AgentConfig:
    """The agent of the spec's domain. Raises ValueError if it has none."""
    domain, inner = mixed.domain_of(spec)
    if domain not in self.domains:
      raise ValueError(f'agent.domains has no {domain!r}: {tuple(self.domains)}')
    return self.domains[domain].of_task(inner)

  def shown(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
  ) -> list[Shown]:
    """Not defined: it depends on the task (`of_task`)."""
    raise TypeError('mixed: ask of_task(spec)')


make = ByTask
