"""Several scaffolds in one run: each domain of `tasks.mixed` has its own agent.

The context of a domain may grow from stage to stage of RL, as the report's does
(docs/facts/m2-and-forge.md §4.10).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax.agents.agent import AgentConfig, Shown
from m2jax.agents.by_task import ByTask
from m2jax.checks import require
from m2jax.tasks import mixed


@dataclasses.dataclass(frozen=True)
class Config(AgentConfig):
  """The agents of a run.

  Attributes:
    domains: name of a domain -> its agent.
    contexts: name of a domain -> tokens of prompt and response in an episode, one per
      stage of `tasks.mixed`; a stage beyond the last, and what is of no stage, has the
      last. 0 is the agent's own limit, as is a domain without.
  """

  kind: str = 'mixed'
  domains: Mapping[str, AgentConfig] = dataclasses.field(default_factory=dict)
  contexts: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    limited = {
      name
      for name, agent in self.domains.items()
      if hasattr(getattr(agent, 'agent', agent), 'context')
    }
    named = set(self.contexts) <= limited
    require(self, named, 'contexts', f'of white-box agents: {tuple(sorted(limited))}')
    for tokens in self.contexts.values():
      good = len(tokens) > 0 and min(tokens) >= 0
      require(self, good, 'contexts', '0 or more tokens for each stage')
    for name, agent in self.domains.items():
      if agent.author is not None:
        raise ValueError(
          f'domains[{name!r}]: a kind that writes its own prompts cannot be mixed yet'
        )

  def of_task(self, spec: str) -> AgentConfig:
    """The agent of the spec's domain and stage. Raises ValueError if it has none."""
    domain, inner = mixed.domain_of(spec)
    if domain not in self.domains:
      raise ValueError(f'agent.domains has no {domain!r}: {tuple(self.domains)}')
    agent = self.domains[domain].of_task(inner)
    if tokens := self._context(domain, mixed.stage_of(spec)):
      context = dataclasses.replace(agent.context, tokens=tokens)
      agent = dataclasses.replace(agent, context=context)
    return agent

  def _context(self, domain: str, stage: int | None) -> int:
    found = self.contexts.get(domain, (0,))
    last = len(found) - 1
    return found[last if stage is None else min(stage, last)]

  def shown(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
  ) -> list[Shown]:
    """Not defined: it depends on the task (`of_task`)."""
    raise TypeError('mixed: ask of_task(spec)')


make = ByTask
