"""The tool `sh` of the terminal tasks: its schema, its calls, its observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from m2jax import sandbox
from m2jax.tasks import task as task_lib

NAME, ARGUMENT = 'sh', 'cmd'
SHOWN_CHARS = 160  # of a command's output; no task needs more

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
    BadCall: unknown tool, or wrong arguments.
  """
  if name != NAME:
    raise task_lib.BadCall(f'no tool {name!r}; use {NAME}')
  command = arguments.get(ARGUMENT)
  if len(arguments) != 1 or not isinstance(command, str):
    raise task_lib.BadCall(f'{NAME} takes one string: {ARGUMENT}')
  return command


def observation(result: sandbox.ExecResult, limit_chars: int = SHOWN_CHARS) -> str:
  """Returns the observation of a command: its output, then its errors.

  Text beyond `limit_chars` is replaced by its length. A command that failed without
  output is reported by its exit status.
  """
  output, errors = result.stdout, result.stderr
  if output and errors and not output.endswith('\n'):
    output += '\n'
  text = (output + errors).rstrip()
  if len(text) > limit_chars:
    text = f'{text[:limit_chars]}\n[{len(text) - limit_chars} more characters]'
  if result.timed_out or result.oom:
    text += '\nkilled: out of ' + ('time' if result.timed_out else 'memory')
  elif result.returncode and not text:
    text = f'exit {result.returncode}'
  return text.lstrip('\n')


def executor(box: sandbox.Sandbox) -> task_lib.Execute:
  """Returns the function that runs tool calls in an open sandbox."""

  async def execute(name: str, arguments: Mapping[str, Any]) -> str:
    return observation(await box.exec(command_of(name, arguments)))

  return execute
