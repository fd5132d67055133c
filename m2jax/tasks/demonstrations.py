"""Demonstrations of a teacher whose tool calls are really executed.

On disk they are JSON lines of OpenAI `messages` and `tools`, as `data.chats` reads
them, together with the task's spec and the verdict.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from m2jax import kinds, records, sandbox
from m2jax.tasks import task as task_lib

_TRIES = 3  # of a demonstration


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
  """Settings that every kind of teacher has.

  Attributes:
    kind: module that defines the teacher and its tasks (`m2jax.kinds`).
  """

  kind: str

  @classmethod
  def of_kind(cls, kind: str) -> type[TeacherConfig]:
    """Returns the config class of a kind. Raises ValueError if it has no teacher."""
    module = kinds.module(__package__, kind)
    if not hasattr(module, 'TeacherConfig'):
      raise ValueError(f'kind={kind!r}: {module.__name__} has no teacher')
    return module.TeacherConfig


@dataclasses.dataclass(frozen=True)
class Demonstration:
  """One demonstration.

  Attributes:
    task: the task's spec.
    messages: OpenAI chat dicts from the user's instruction to the final answer.
    tools: OpenAI tool dicts that were available.
    success: the verifier's verdict in [0, 1].
    mistakes: kinds of mistakes made, in order; the messages do not mark them.
  """

  task: str
  messages: Sequence[Mapping[str, Any]]
  tools: Sequence[Mapping[str, Any]]
  success: float
  mistakes: Sequence[str] = ()

  def __post_init__(self):
    records.check_verdict(self.task, self.success)


class Turn(NamedTuple):
  """A turn of a lesson: a tool call or, without a tool, the answer."""

  thought: str
  tool: str = ''
  arguments: Mapping[str, Any] = {}
  content: str = ''


# Yields tool calls, gets their observations, returns the answer.
Lesson = Generator[Turn, str | None, Turn]


def lesson(task: task_lib.Task, teacher: TeacherConfig, mistakes: list[str]) -> Lesson:
  """The teacher's turns on a task, for the code that runs its tool calls.

  Args:
    mistakes: gets the kinds of mistakes made.

  Raises:
    ValueError: this kind of teacher only demonstrates by itself.
  """
  module = kinds.module(__package__, teacher.kind)
  if not hasattr(module, 'lesson'):
    raise ValueError(
      f'kind={teacher.kind!r}: {module.__name__} has no `lesson`, with which '
      'demonstrations of an agent that writes its own prompts are made'
    )
  return module.lesson(task, teacher, mistakes)


async def demonstrate(
  task: task_lib.Task, environment: task_lib.Environment, teacher: TeacherConfig
) -> Demonstration:
  """The teacher's demonstration in an open environment."""
  module = kinds.module(__package__, teacher.kind)
  return await module.demonstrate(task, environment, teacher)


async def perform(
  task: task_lib.Task,
  environment: task_lib.Environment,
  turns: Lesson,
  mistakes: Sequence[str] = (),
) -> Demonstration:
  """A demonstration of a lesson in an open environment.

  Args:
    task: the task.
    environment: runs the lesson's tool calls.
    turns: the lesson; an invalid call shows its error.
    mistakes: list to which the lesson adds.
  """
  messages: list[dict[str, Any]] = [{'role': 'user', 'content': task.instruction}]
  shown: str | None = None
  while True:
    try:
      turn = turns.send(shown)
    except StopIteration as end:
      messages.append(_said(end.value))
      break
    function = {'name': turn.tool, 'arguments': json.dumps(dict(turn.arguments))}
    call = {'id': f'call_{len(messages)}', 'type': 'function', 'function': function}
    messages.append(_said(turn) | {'tool_calls': [call]})
    try:
      shown = await environment.execute(turn.tool, turn.arguments)
    except task_lib.BadCall as error:
      shown = f'error: {error}'
    messages.append({'role': 'tool', 'tool_call_id': call['id'], 'content': shown})
  success = await task.verify(environment, messages[-1]['content'])
  return Demonstration(task.spec, messages, task.tools, success, mistakes)


def _said(turn: Turn) -> dict[str, Any]:
  return {
    'role': 'assistant',
    'content': turn.content,
    'reasoning_content': turn.thought,
  }


async def collect(
  specs: Sequence[str],
  teacher: TeacherConfig,
  *,
  concurrency: int = 16,
  on_done: Callable[[int], None] = lambda done: None,
  **open_options: Any,
) -> list[Demonstration]:
  """Makes one demonstration of each task; returns them in the tasks' order.

  A failure of the machine is no demonstration: the task is tried again, three times in
  all, and the last failure is raised.

  Args:
    specs: specs of the tasks.
    teacher: settings of the teacher.
    concurrency: maximum number of open environments.
    on_done: called with the number finished so far.
    **open_options: passed to `Task.open`.
  """
  running = asyncio.Semaphore(concurrency)
  done = 0

  async def one(spec: str) -> Demonstration:
    nonlocal done
    task = task_lib.make(spec)
    for left in reversed(range(_TRIES)):
      try:
        async with running, task.open(**open_options) as environment:
          demonstration = await demonstrate(task, environment, teacher)
        break
      except (sandbox.SandboxError, OSError) as error:
        if not left:
          raise
        logging.warning('%s is demonstrated again: %s', spec, error)
    done += 1
    on_done(done)
    return demonstration

  return await asyncio.gather(*map(one, specs))


def write(path: Path, demonstrations: Sequence[Demonstration]) -> None:
  """Writes demonstrations to a file, atomically."""
  new = path.with_suffix('.new')
  with open(new, 'w', encoding='utf-8') as file:
    for demonstration in demonstrations:
      file.write(json.dumps(dataclasses.asdict(demonstration)) + '\n')
  new.replace(path)


def read(path: Path) -> list[Demonstration]:
  """Reads a file written by `write`."""
  lines = path.read_text(encoding='utf-8').splitlines()
  return [Demonstration(**json.loads(line)) for line in lines]
