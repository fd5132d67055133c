"""An agent that leaves each task to the agent that its config names for it."""

from __future__ import annotations

from typing import Any, NamedTuple

from m2jax.agents.agent import Agent, AgentConfig, Endpoint, Outcome, make
from m2jax.tasks import Environment, Task


class _Episode(NamedTuple):
  agent: Agent
  episode: Any


class ByTask(Agent):
  """Agents of a config with `of_task`, each made when a task first needs it."""

  def __init__(self, config: AgentConfig):
    self._config = config
    self._agents: dict[str, Agent] = {}  # by their configs

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
    config = self._config.of_task(task.spec)
    key = repr(config)
    if key not in self._agents:
      self._agents[key] = make(config)
    return self._agents[key]
