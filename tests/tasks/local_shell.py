"""A bare shell in a temporary directory, for commands the tests trust."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from m2jax import sandbox, tasks
from m2jax.tasks.terminal import shell

SANDBOX = dict(backend='namespaces', limits=sandbox.Limits(cpu_s=2, wall_s=5.0))
IN_MEMORY = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None


def put(directory: Path, files) -> None:
  """Writes a workspace's files."""
  for name, content in files.items():
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@functools.cache
def _shell() -> subprocess.Popen:
  """One shell for all commands: a fork of it costs less than a new one."""
  return subprocess.Popen(
    ['/bin/sh'],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env={'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8'},
  )


class Box:
  """A stand-in for the sandbox without isolation; records its commands."""

  def __init__(self, directory):
    self.directory = directory
    self.commands = []

  async def exec(self, command):
    self.commands.append(command)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
      place = Path(name)
      (place / 'command').write_text(
        f'cd {shlex.quote(str(self.directory))}\n{command}'
      )
      ends = f'< /dev/null > {name}/out 2> {name}/err'
      _shell().stdin.write(f'( . {name}/command ) {ends}; echo $?\n')
      _shell().stdin.flush()
      code = int(_shell().stdout.readline())
      out, err = ((place / end).read_text() for end in ('out', 'err'))
    return sandbox.ExecResult(code, out, err)


@contextlib.asynccontextmanager
async def workspace(task):
  """The task's environment without the sandbox, for the teacher's own commands."""
  with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
    directory = Path(name)
    put(directory, task.files)
    yield tasks.Environment(shell.executor(Box(directory)), directory)
