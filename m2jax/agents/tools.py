"""The agent's tools: what the model is told, what runs, what it is shown back.

One tool so far, `sh`. Observations are short, since a tiny model reads them: the
output, then only what is out of the ordinary, one line each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from m2jax import sandbox as sandbox_lib


class BadCall(Exception):
  """The model's call is at fault; the text is the observation it gets."""


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool as `whitebox.run` takes it.

  Attributes:
    spec: the OpenAI tool dict.
    run: arguments to observation. Raises BadCall when the model is to blame; anything
      else is an infrastructure failure.
  """

  spec: dict[str, Any]
  run: Callable[[dict[str, Any]], Awaitable[str]]

  @property
  def name(self) -> str:
    """Its function name."""
    return self.spec['function']['name']


def executor(*tools: Tool) -> Callable[[str, dict[str, Any]], Awaitable[str]]:
  """`(name, arguments) -> observation` over tools, as `whitebox.run` takes it."""
  by_name = {tool.name: tool for tool in tools}

  async def execute(name: str, arguments: dict[str, Any]) -> str:
    return await by_name[name].run(arguments)

  return execute


SH_SPEC = {
  'type': 'function',
  'function': {
    'name': 'sh',
    'description': 'Run a shell command.',
    'parameters': {
      'type': 'object',
      'properties': {'cmd': {'type': 'string'}},
      'required': ['cmd'],
    },
  },
}


def sh_tool(sandbox: sandbox_lib.Sandbox) -> Tool:
  """The tool `sh(cmd)`, run in a sandbox."""

  async def run(arguments: dict[str, Any]) -> str:
    return observation(await sandbox.exec(sh_command(arguments)))

  return Tool(SH_SPEC, run)


def sh_command(arguments: dict[str, Any]) -> str:
  """The command of a call to `sh`. Raises BadCall, naming what is wrong."""
  cmd = arguments.get('cmd')
  if not isinstance(cmd, str):
    raise BadCall('sh needs cmd, a string')
  others = sorted(set(arguments) - {'cmd'})
  if others:
    raise BadCall(f'sh takes only cmd, not {", ".join(others)}')
  return cmd


def observation(result: sandbox_lib.ExecResult) -> str:
  """What the model sees of a command: stdout, stderr, then what went wrong."""
  parts = [result.stdout.removesuffix('\n'), result.stderr.removesuffix('\n')]
  if result.truncated:
    parts.append('output truncated')
  if result.timed_out:
    parts.append(f'timed out after {round(result.wall_s, 1):g}s')
  elif result.oom:
    parts.append('out of memory')
  elif result.returncode:
    parts.append(f'exit code {result.returncode}')
  return '\n'.join(part for part in parts if part)


def cut(text: str, limit_bytes: int) -> str:
  """The text if it fits, else its first and last bytes with the loss named between.

  Lone surrogates become '?': what comes back can be sent.

  Args:
    limit_bytes: most UTF-8 bytes kept; the marker comes on top.
  """
  data = text.encode('utf-8', 'replace')
  if len(data) <= limit_bytes:
    return data.decode()
  tail_bytes = limit_bytes // 2
  head = data[: limit_bytes - tail_bytes].decode('utf-8', 'ignore')
  tail = data[len(data) - tail_bytes :].decode('utf-8', 'ignore')
  return f'{head}\n[{len(data) - limit_bytes} bytes cut]\n{tail}'
