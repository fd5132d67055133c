"""The task protocol: what an agent is asked, where it acts, and how it is judged.

docs/design.md §7, docs/add_a_task.md. A kind of tasks is a module with

    Config         a `TasksConfig`: what its tasks are drawn from
    families(config) -> {family: relative frequency}
    spec(split, index, seed, config, family) -> str
    make(spec) -> Task

and, if demonstrations of its tasks can be made,

    TeacherConfig  a `tasks.TeacherConfig`
    demonstrate(task, environment, teacher) -> Demonstration     (a coroutine)

A spec is a string that begins with its kind and a slash, and from which `make` builds
the same task in every process. A verdict looks at the environment and the final answer,
never at the trajectory, so any way to the right end state counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from m2jax import kinds, sandbox
from m2jax.checks import require

# Runs a tool call: (tool name, arguments) -> the text to show. Raises BadCall.
Execute = Callable[[str, Mapping[str, Any]], Awaitable[str]]


class BadCall(Exception):
  """A tool call is at fault, not the tool: the text is meant for who made it."""


@dataclasses.dataclass(frozen=True)
class Environment:
  """Where one attempt at a task happens; a kind may add to it.

  Attributes:
    execute: runs a tool call there. Raises BadCall.
    workspace: its directory on this machine, for the verifier; None if it has none.
  """

  execute: Execute
  workspace: Path | None = None


class Task(Protocol):
  """One task.

  Attributes:
    spec: string from which the same task can be made again.
    family: name of the sort of task; results are reported by it.
    split: 'train', 'dev' or 'held_out'.
    instruction: what the agent reads as the user's message.
    tools: OpenAI tool dicts that the agent is offered.
    max_tool_calls: tool calls an episode may use.
    baseline_calls: tool calls that suffice; results are reported by it.
  """

  spec: str
  family: str
  split: str
  instruction: str
  tools: Sequence[Mapping[str, Any]]
  max_tool_calls: int
  baseline_calls: int

  def open(
    self, *, backend: str, limits: sandbox.Limits
  ) -> contextlib.AbstractAsyncContextManager[Environment]:
    """Opens a new environment for one attempt; leaving the context destroys it.

    Args:
      backend, limits: of the sandbox, if the environment has one (`sandbox.create`).

    Raises:
      SandboxError, OSError: the machine failed, which is not judged (law 5).
    """

  async def verify(self, environment: Environment, answer: str) -> float:
    """Returns the success in [0, 1] of an attempt that ended with `answer`.

    Has to be safe on an environment that an agent filled with links, pipes or huge
    files.

    Raises:
      SandboxError, OSError: the environment itself cannot be read, which is not judged.
    """


@dataclasses.dataclass(frozen=True)
class TasksConfig:
  """What tasks are drawn from: the fields that every kind has.

  Attributes:
    kind: module that defines the tasks (`m2jax.kinds`).
    weights: family -> relative frequency; families left out never come. Empty: the
      kind's own choice.
    partial_credit: at most this for an end state that is right in part; an agent whose
      whole end state is right gets 1 in any case. 0 for evaluations.
  """

  kind: str
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
  partial_credit: float = 0.0

  def __post_init__(self):
    require(self, 0 <= self.partial_credit <= 1, 'partial_credit', 'a share in [0, 1]')

  @classmethod
  def of_kind(cls, kind: str) -> type[TasksConfig]:
    """The config of a kind. Raises ValueError for a kind that is not there."""
    return kinds.module(__package__, kind).Config


def families(config: TasksConfig) -> Mapping[str, float]:
  """Relative frequency of each family that the config draws."""
  return kinds.module(__package__, config.kind).families(config)


def spec(
  config: TasksConfig,
  split: str,
  index: int,
  *,
  seed: int = 0,
  family: str | None = None,
) -> str:
  """The spec of the index-th task of a stream.

  Args:
    config: what is drawn from.
    split: 'train', 'dev' or 'held_out'; they have no task in common.
    index: position in the stream, >= 0.
    seed: which stream.
    family: this family instead of a drawn one.

  Raises:
    ValueError: an unknown split or family, or a negative index.
  """
  return kinds.module(__package__, config.kind).spec(split, index, seed, config, family)


def make(spec: str) -> Task:
  """The task of a spec.

  Raises:
    ValueError: the spec names no task.
  """
  return kinds.module(__package__, spec.partition('/')[0]).make(spec)
