"""The task protocol: instruction, environment and verdict of an episode.

docs/design.md §7, docs/add_a_task.md. A kind of tasks is a module with

    Config         a `TasksConfig`: the distribution of its tasks
    families(config) -> {family: relative frequency}     (of all stages, if it has any)
    spec(split, index, seed, config, family) -> str
    make(spec) -> Task

and, if demonstrations of its tasks can be made,

    TeacherConfig  a `tasks.TeacherConfig`
    demonstrate(task, environment, teacher) -> Demonstration     (a coroutine)
    lesson(task, teacher, mistakes) -> Lesson      (for agents with their own prompts)

A spec is a string that begins with its kind and a slash; `make` builds the same task
from it in every process. A verdict depends on the environment and the final answer
only, not on the trajectory, so any way to the right end state counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from m2jax import kinds, sandbox
from m2jax.checks import require

# Runs a tool call: (tool name, arguments) -> observation. Raises BadCall.
Execute = Callable[[str, Mapping[str, Any]], Awaitable[str]]


class BadCall(Exception):
  """A tool call is invalid; the agent gets the message as its observation."""


@dataclasses.dataclass(frozen=True)
class Environment:
  """The environment of one attempt at a task; a kind may subclass it.

  Attributes:
    execute: runs a tool call in it. Raises BadCall.
    workspace: its directory on the host, for the verifier; None if it has none.
    box: its sandbox, in which an agent that is a command runs; None if it has none.
    independent: names of the tools whose calls do not affect one another: an agent may
      run those of one turn at the same time. All others run in order.
    turn_reward: called after each turn (a completion and its calls, or the answer):
      what it is paid, a finite number, beside the verdict. None: turns are not paid.
    notes: what `Task.verify` adds for a reader of the trajectory: why the verdict is
      not 1, and what the verifier printed. Agents do not see them.
  """

  execute: Execute
  workspace: Path | None = None
  box: sandbox.Sandbox | None = None
  independent: frozenset[str] = frozenset()
  turn_reward: Callable[[], Awaitable[float]] | None = None
  notes: list[str] = dataclasses.field(default_factory=list)


class Task(Protocol):
  """One task.

  Attributes:
    spec: string from which `make` builds the same task.
    family: class of the task within its kind; results are reported per family.
    split: 'train', 'dev' or 'held_out'.
    instruction: the user's message to the agent.
    tools: OpenAI tool dicts available to the agent.
    max_tool_calls: maximum tool calls of an episode.
    baseline_calls: tool calls that a correct solution needs; results are reported by
      it.

  A task may also have `wall_s`, the elapsed time of an episode in seconds; None and no
  such attribute: not limited by the task.
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
      backend, limits: arguments of `sandbox.create`, if the environment has a sandbox.
        A task for agents that are commands also takes `host`.

    Raises:
      SandboxError, OSError: an infrastructure failure, which is not judged (law 5).
    """

  async def verify(self, environment: Environment, answer: str) -> float:
    """Returns the success in [0, 1] of an attempt that ended with `answer`.

    Must be safe on an environment that an agent filled with links, pipes or huge files.

    Raises:
      SandboxError, OSError: the environment cannot be read; the attempt is not judged.
    """


@dataclasses.dataclass(frozen=True)
class TasksConfig:
  """Distribution of tasks: the settings that every kind has.

  Attributes:
    kind: module that defines the tasks (`m2jax.kinds`).
    weights: family -> relative frequency; other families are never sampled. Empty: the
      kind's default.
    partial_credit: maximum verdict on a partly correct end state; a fully correct one
      always gets 1. 0 for evaluations.
  """

  kind: str
  weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
  partial_credit: float = 0.0

  def __post_init__(self):
    require(self, 0 <= self.partial_credit <= 1, 'partial_credit', 'a share in [0, 1]')

  def changes(self) -> str:
    """The fields that shape a task and differ from the default, as JSON."""
    changed = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ('kind', 'weights')
      and getattr(self, field.name) != field.default
    }
    return json.dumps(changed, separators=(',', ':'), sort_keys=True) if changed else ''

  @classmethod
  def of_kind(cls, kind: str) -> type[TasksConfig]:
    """Returns the config class of a kind. Raises ValueError for an unknown kind."""
    return kinds.module(__package__, kind).Config


def families(config: TasksConfig, index: int | None = None) -> Mapping[str, float]:
  """Relative frequency of each family that the config samples.

  Args:
    config: distribution of the tasks.
    index: the work item's index, for a kind with `has_stages`; None: all families of
      any stage.
  """
  module = kinds.module(__package__, config.kind)
  if index is not None and getattr(module, 'has_stages', False):
    return module.families(config, index)
  return module.families(config)


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
    config: distribution of the tasks.
    split: 'train', 'dev' or 'held_out'; they have no task in common.
    index: position in the stream, >= 0.
    seed: seed of the stream.
    family: family of the task; None samples one.

  Raises:
    ValueError: an unknown split or family, or a negative index.
  """
  return kinds.module(__package__, config.kind).spec(split, index, seed, config, family)


def make(spec: str) -> Task:
  """Builds the task of a spec.

  Raises:
    ValueError: the spec is invalid.
  """
  return kinds.module(__package__, spec.partition('/')[0]).make(spec)
