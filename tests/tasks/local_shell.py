"""A bare shell in a temporary directory, for commands the tests trust."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

from m2jax import sandbox, tasks
from m2jax.tasks.terminal import shell

SANDBOX = dict(backend='bubblewrap', limits=sandbox.Limits(cpu_s=2, wall_s=5.0))
IN_MEMORY = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None


def put(directory: Path, files) -> None:
  """Writes a workspace's files."""
  for name, content in files.items():
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


class Box:
  """A stand-in for the sandbox without isolation; records its commands."""

  def __init__(self, directory):
    self.directory = directory
    self.commands = []

  async def exec(self, command):
    self.commands.append(command)
    done = subprocess.run(
      ['/bin/sh', '-c', command],
      cwd=self.directory,
      capture_output=True,
      text=True,
      env={'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8'},
      stdin=subprocess.DEVNULL,
    )
    return sandbox.ExecResult(done.returncode, done.stdout, done.stderr)


@contextlib.asynccontextmanager
async def workspace(task):
  """The task's environment without the sandbox, for the teacher's own commands."""
  with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
    directory = Path(name)
    put(directory, task.files)
    yield tasks.Environment(shell.executor(Box(directory)), directory)
