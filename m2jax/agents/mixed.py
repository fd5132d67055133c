"""Several scaffolds in one run: each domain of `tasks.mixed` has its own agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from m2jax.agents.agent import Agent, AgentConfig, Endpoint, Outcome, Shown
from m2jax.agents.agent import make as make_agent
from m2jax.tasks import Environment, Task, mixed


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
    domain, _ = mixed.domain_of(spec)
    if domain not in self.domains:
      raise ValueError(f'agent.domains has no {domain!r}: {tuple(self.domains)}')
    return self.domains[domain]

  def shown(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
  ) -> list[Shown]:
    """Not defined: it depends on the task (`of_task`)."""
    raise TypeError('mixed: ask of_task(spec)')


class _Episode(NamedTuple):
  agent: Agent
  episode: Any


class Mixed(Agent):
  """Lets the agent of a task's domain act."""

  def __init__(self, config: Config):
    self._agents = {name: make_agent(c) for name, c in config.domains.items()}

  async def prepare(
    self, task: Task, environment: Environment, endpoint: Endpoint
  ) -> _Episode:
    agent = self._of(task)
    return _Episode(agent, await agent.prepare(task, environment, endpoint))

  async def run(self, episode: _Episode) -> None:
    await episode.agent.run(episode.episode)

  async def finish(self, episode: _Episode) -> Outcome:
    return await episode.agent.finish(episode.episode)

  async def reward(
    self, task: Task, environment: Environment, outcome: Outcome
  ) -> float:
    return await self._of(task).reward(task, environment, outcome)

  async def close(self) -> None:
    for agent in self._agents.values():
      await agent.close()

  def _of(self, task: Task) -> Agent:
    domain, _ = mixed.domain_of(task.spec)
    if domain not in self._agents:
      raise ValueError(f'agent.domains has no {domain!r}: {tuple(self._agents)}')
    return self._agents[domain]


make = Mixed
