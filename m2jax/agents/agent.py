"""The agent protocol: what solves a task through a model that it reaches over HTTP.

docs/design.md §7, docs/add_an_agent.md; after the functions that Forge's agents plug
in with, pre-process, run, post-process and reward (docs/facts/m2-and-forge.md §4.4). A
kind of agents is a module with `Config`, an `AgentConfig`, and `make(config) -> Agent`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from m2jax import kinds
from m2jax.tasks import Environment, Task


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """What every kind of agent has.

  Attributes:
    kind: module that defines the agent (`m2jax.kinds`).
    system: the agent's system prompt, under which demonstrations are trained too; None
      leaves the model's default.
  """

  kind: str
  system: str | None = None

  @classmethod
  def of_kind(cls, kind: str) -> type[AgentConfig]:
    """The config of a kind. Raises ValueError for a kind that is not there."""
    return kinds.module(__package__, kind).Config


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """The model as one episode reaches it.

  Attributes:
    base_url: of the gateway, with '/v1'.
    api_key: the session; every episode has its own.
    model: the name to ask for.
    sampling: fields that an evaluation wants in each request, {'temperature': 0.0}; a
      training session overrides what would bend the sampled distribution.
  """

  base_url: str
  api_key: str
  model: str
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Outcome:
  """How an episode ended.

  Attributes:
    end_reason: 'answer', 'max_turns', 'length' or 'context'; or 'infrastructure', which
      is not the model's doing and is masked from the loss (law 5).
    error: for 'infrastructure', what broke.
    answer: text of the last assistant message if `end_reason` is 'answer', else ''.
    messages: the whole chat as OpenAI dicts, for people to read.
    tool_calls: calls executed.
    tool_errors: calls that did not parse, named no tool or had wrong arguments.
    wall_s: wall-clock seconds.
  """

  end_reason: str = ''
  error: str = ''
  answer: str = ''
  messages: Sequence[dict] = dataclasses.field(default_factory=list)
  tool_calls: int = 0
  tool_errors: int = 0
  wall_s: float = 0.0


class Agent(abc.ABC):
  """One object for all episodes, which run concurrently in one event loop.

  Of each episode `agents.episodes` calls `prepare`, `run`, `finish` and `reward`, in
  this order, while the task's environment is open. `finish` is also called when `run`
  was cancelled or raised. SandboxError and OSError end the episode as 'infrastructure';
  any other exception fails the work item and is logged.
  """

  @abc.abstractmethod
  async def prepare(
    self, task: Task, environment: Environment, endpoint: Endpoint
  ) -> Any:
    """What the other methods need of this episode: prompt, files, a process to be."""

  @abc.abstractmethod
  async def run(self, episode: Any) -> None:
    """Acts until the agent has answered or may not go on."""

  @abc.abstractmethod
  async def finish(self, episode: Any) -> Outcome:
    """Releases what the episode holds and says how it ended."""

  async def reward(
    self, task: Task, environment: Environment, outcome: Outcome
  ) -> float:
    """Success in [0, 1]: the task's verdict on an answer, 0 where there is none."""
    if outcome.end_reason != 'answer':
      return 0.0
    return await task.verify(environment, outcome.answer)

  async def close(self) -> None:  # noqa: B027 (most have nothing to close)
    """After the last episode."""


def make(config: AgentConfig) -> Agent:
  """The agent that a config describes."""
  return kinds.module(__package__, config.kind).make(config)
