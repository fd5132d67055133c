"""The agent protocol: a program that solves tasks through a model behind HTTP.

docs/design.md §7, docs/add_an_agent.md. The methods follow the functions of Forge's
agents: pre-process, run, post-process and reward (docs/facts/m2-and-forge.md §4.4). A
kind of agents is a module with `Config`, an `AgentConfig`, and `make(config) -> Agent`.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from m2jax import kinds, sandbox
from m2jax.tasks import Environment, Task


@dataclasses.dataclass(frozen=True)
class AuthorConfig:
  """How a scripted author acts through an agent, for demonstrations.

  Attributes:
    rename: name of a tool or of an argument of the task's -> the agent's.
    submit: command with which the agent submits `{answer}`: the argument
      `submit_argument` of its tool `submit_tool`; '' if it answers with a message.
  """

  rename: Mapping[str, str] = dataclasses.field(default_factory=dict)
  submit: str = ''
  submit_tool: str = ''
  submit_argument: str = ''


class Shown(NamedTuple):
  """A chat of a demonstration, as an agent shows it to the model.

  Attributes:
    messages, tools: OpenAI dicts.
    trained: index of the only message that is trained; None trains all of the
      assistant's.
  """

  messages: Sequence[Mapping[str, Any]]
  tools: Sequence[Mapping[str, Any]]
  trained: int | None = None


@dataclasses.dataclass(frozen=True)
class AgentConfig:
  """Settings that every kind of agent has.

  Attributes:
    kind: module that defines the agent (`m2jax.kinds`).
    system: the agent's system prompt, also used for SFT on demonstrations; None is the
      model's default.
  """

  kind: str
  system: str | None = None

  @property
  def author(self) -> AuthorConfig | None:
    """How a scripted author acts through an agent that writes its own prompts.

    A field of the kinds that are such agents: their demonstrations are made by running
    them. None: the task and `system` say all that the model is shown.
    """
    return None

  def of_task(self, spec: str) -> AgentConfig:
    """The agent that attempts the task of a spec: itself, unless it is a mixture."""
    return self

  def shown(
    self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
  ) -> list[Shown]:
    """The chats that the model would be shown of a demonstration, for SFT."""
    messages = list(messages)
    has_system = messages and messages[0].get('role') in ('system', 'developer')
    if self.system is not None and not has_system:
      messages.insert(0, {'role': 'system', 'content': self.system})
    return [Shown(messages, tools)]

  @classmethod
  def of_kind(cls, kind: str) -> type[AgentConfig]:
    """Returns the config class of a kind. Raises ValueError for an unknown kind."""
    return kinds.module(__package__, kind).Config


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """Access to the model for one episode.

  Attributes:
    base_url: URL of the gateway, including '/v1'.
    api_key: the session's key; every episode has its own.
    model: name of the model in requests.
    sampling: sampling fields for every request of an evaluation, such as
      {'temperature': 0.0}; a training session overrides those that would change the
      sampled distribution.
  """

  base_url: str
  api_key: str
  model: str
  sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Outcome:
  """How an episode ended.

  Attributes:
    end_reason: 'answer', 'max_turns', 'length' or 'context'; of a scaffold 'loop' or
      'rules' (its code failed); of a command also 'timeout', 'exit' (a status other
      than 0) or 'limit'; or 'infrastructure', which the model did not cause and which
      is masked from the loss (law 5).
    error: for 'infrastructure', what failed; for the ends of a command, the details;
      for an answer, what its verifier printed (`Environment.notes`).
    answer: text of the last assistant message if `end_reason` is 'answer', else ''.
    messages: the whole chat as OpenAI dicts, for the report.
    tools: those that the agent offered the model, if it chooses them itself.
    tool_calls: number of calls executed.
    tool_errors: number of calls that did not parse, named an unknown tool or had wrong
      arguments.
    wall_s: wall-clock seconds.
    rewards: rewards of single turns, by completion id (`Trajectory.rewards`); `run`,
      `finish` and `Agent.reward` may add to it.
  """

  end_reason: str = ''
  error: str = ''
  answer: str = ''
  messages: Sequence[dict] = dataclasses.field(default_factory=list)
  tools: Sequence[Mapping[str, Any]] = ()
  tool_calls: int = 0
  tool_errors: int = 0
  wall_s: float = 0.0
  rewards: dict[str, float] = dataclasses.field(default_factory=dict)


class Agent(abc.ABC):
  """One object serves all episodes, which run concurrently in one event loop.

  Attributes:
    host: what the agent needs of the sandbox's machine, for `Task.open`; None: nothing.

  For each episode `agents.episodes` calls `prepare`, `run`, `finish` and `reward`, in
  this order, while the task's environment is open. `finish` is also called if `run` was
  cancelled or raised. SandboxError and OSError end the episode as 'infrastructure'; any
  other exception is logged and fails the work item.
  """

  host: sandbox.Host | None = None

  @abc.abstractmethod
  async def prepare(
    self, task: Task, environment: Environment, endpoint: Endpoint
  ) -> Any:
    """Returns the state of the episode for the other methods, such as its prompt."""

  @abc.abstractmethod
  async def run(self, episode: Any) -> None:
    """Acts until the agent has answered or reached a limit."""

  @abc.abstractmethod
  async def finish(self, episode: Any) -> Outcome:
    """Releases the episode's resources; returns how it ended."""

  async def reward(
    self, task: Task, environment: Environment, outcome: Outcome
  ) -> float:
    """Success in [0, 1]: the task's verdict on an answer, 0 without one."""
    if outcome.end_reason != 'answer':
      return 0.0
    return await task.verify(environment, outcome.answer)

  async def close(self) -> None:  # noqa: B027 (most have nothing to close)
    """Called after the last episode."""


def make(config: AgentConfig) -> Agent:
  """Makes the agent of a config."""
  return kinds.module(__package__, config.kind).make(config)


def open_task(agent: Agent, task: Task, backend: str, limits: sandbox.Limits):
  """`task.open` for an episode of the agent."""
  needs = {} if agent.host is None else {'host': agent.host}
  return task.open(backend=backend, limits=limits, **needs)


async def run_within(
  agent: Agent, task: Task, episode: Any, limit_s: float = math.inf
) -> Outcome:
  """Runs and finishes an episode within a time and that of its task (`Task.wall_s`).

  One that takes longer ends with 'timeout'.
  """
  limit_s, late = min(limit_s, getattr(task, 'wall_s', None) or math.inf), False
  try:
    async with asyncio.timeout(limit_s if limit_s < math.inf else None) as limit:
      await agent.run(episode)
  except TimeoutError:
    late = limit.expired()
    if not late:
      raise
  finally:
    outcome = await agent.finish(episode)
  if late:
    outcome.end_reason, outcome.error = 'timeout', f'not ended within {limit_s:g} s'
  return outcome
