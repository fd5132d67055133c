"""The one tool of the terminal tasks: `sh`, as an agent is offered it and reads it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from m2jax import sandbox
from m2jax.tasks import task as task_lib

NAME, ARGUMENT = 'sh', 'cmd'
SHOWN_CHARS = 160  # of what a command printed; no task needs more

# (tool name, arguments) -> the text to show the agent.
Execute = Callable[[str, Mapping[str, Any]], Awaitable[str]]

TOOL: Mapping[str, Any] = {
  'type': 'function',
  'function': {
    'name': NAME,
    'description': 'Run a command.',
    'parameters': {
      'type': 'object',
      'properties': {ARGUMENT: {'type': 'string'}},
      'required': [ARGUMENT],
    },
  },
}


def command_of(name: str, arguments: Mapping[str, Any]) -> str:
  """Returns the command of a tool call.

  Raises:
    ValueError: another tool, or other arguments; the text is meant for the model.
  """
  if name != NAME:
    raise ValueError(f'no tool {name!r}; use {NAME}')
  command = arguments.get(ARGUMENT)
  if len(arguments) != 1 or not isinstance(command, str):
    raise ValueError(f'{NAME} takes one string: {ARGUMENT}')
  return command


def observation(result: sandbox.ExecResult, limit_chars: int = SHOWN_CHARS) -> str:
  """Returns what the agent reads of a command: its output, then its errors.

  Text beyond `limit_chars` is only counted. A command that failed without a word is
  told by its exit status.
  """
  text = (result.stdout + result.stderr).rstrip()
  if len(text) > limit_chars:
    text = f'{text[:limit_chars]}\n[{len(text) - limit_chars} more characters]'
  if result.timed_out or result.oom:
    text += '\nkilled: out of ' + ('time' if result.timed_out else 'memory')
  elif result.returncode and not text:
    text = f'exit {result.returncode}'
  return text.lstrip('\n')


@contextlib.asynccontextmanager
async def workspace(
  task: task_lib.Task, **create_options: Any
) -> AsyncIterator[tuple[Execute, Path]]:
  """Opens a sandbox that holds a task's files.

  Args:
    task: the task.
    **create_options: for `sandbox.create`.

  Yields:
    What runs a tool call there and returns the text to show, errors of the call
    included, and the directory for the task's verifier.
  """
  async with await sandbox.create(contents=task.files, **create_options) as box:

    async def execute(name: str, arguments: Mapping[str, Any]) -> str:
      try:
        command = command_of(name, arguments)
      except ValueError as error:
        return f'error: {error}'
      return observation(await box.exec(command))

    yield execute, box.workspace
