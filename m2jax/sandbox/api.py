"""The sandbox's limits, results and errors (DESIGN §6).

A limit is either enforced by a named mechanism or reported as not enforced
(`Capabilities`). Without isolation there is no sandbox (`SandboxUnavailable`).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping

_LEAST_MEMORY_BYTES = 8 << 20
_MAX_COMMAND_BYTES = 120_000  # the kernel's limit for one argument is 131,072
BACKENDS = ('namespaces', 'gvisor', 'rlimit_only')
CONTAINERS = ('podman', 'docker')  # backends that need an image


class SandboxError(RuntimeError):
  """The sandbox failed, not the command: rewards must not depend on it (law 5)."""


class SandboxUnavailable(SandboxError):
  """This machine does not support the requested sandbox.

  Attributes:
    reason: what failed.
    fix: one line: a command to run, or what to do.
  """

  repeatable = False

  def __init__(self, reason: str, fix: str):
    super().__init__(f'no sandbox: {reason.strip()}\nfix: {fix}')
    self.reason = reason.strip()
    self.fix = fix


class SandboxPathError(SandboxError):
  """A path that leaves the workspace or is not a regular file; it is not followed.

  An agent can cause this with a link or a pipe in place of a file.
  """


class WorkspaceFull(OSError):
  """No space is left in a workspace, which is the doing of what is in it."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of a sandbox. All are positive.

  Attributes:
    cpu_s: CPU time of each process of a command; whole seconds.
    memory_bytes: at least 8 MiB, for a shell. With a control group, of all processes of
      a sandbox together, including swap and their files in memory. Otherwise the
      address space of each process, and `Capabilities` reports the limit as not
      enforced.
    processes: processes and threads of a command at any time.
    output_bytes: returned of each of stdout and stderr; the rest is dropped, and a
      command that prints 64 times as much is killed.
    file_bytes: size of a single file.
    workspace_bytes: all files of the workspace together. /tmp and /dev/shm together
      have the same limit; their files last for one command.
    wall_s: elapsed time of a command.
  """

  cpu_s: int = 10
  memory_bytes: int = 512 << 20
  processes: int = 64
  output_bytes: int = 64 << 10
  file_bytes: int = 32 << 20
  workspace_bytes: int = 64 << 20
  wall_s: float = 30.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      kinds = (int, float) if field.name == 'wall_s' else (int,)
      if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
        kind = 'number' if field.name == 'wall_s' else 'whole number'
        raise ValueError(f'Limits.{field.name}={value!r}: must be a positive {kind}')
    if self.memory_bytes < _LEAST_MEMORY_BYTES:
      raise ValueError(f'Limits.memory_bytes={self.memory_bytes}: at least 8 MiB')


@dataclasses.dataclass(frozen=True)
class ExecResult:
  """The result of a command.

  Attributes:
    returncode: as in a shell: 128 + n after signal n; 124 after a timeout; 137 if
      killed for memory or for too much output.
    stdout, stderr: UTF-8, undecodable bytes replaced; up to `Limits.output_bytes`.
    truncated: whether output was dropped.
    wall_s: elapsed time.
    timed_out: whether it was killed for its elapsed time.
    oom: whether the kernel killed one of its processes for memory. Known only with a
      control group; otherwise allocation fails, and the program reports it.
  """

  returncode: int
  stdout: str
  stderr: str
  truncated: bool = False
  wall_s: float = 0.0
  timed_out: bool = False
  oom: bool = False


@dataclasses.dataclass(frozen=True)
class Host:
  """Use of this machine by sandboxes; each distinct value has its own supervisor.

  Attributes:
    uids: `[low, high)`, if the caller is root: each sandbox runs under a separate uid,
      also those of other processes. None chooses a range that this machine maps.
    read_only: (directory on the host, path in the sandbox), in addition to /usr.
    hidden: paths in the sandbox that are empty there, whatever this machine has; those
      of directories end with '/'.
    parallel_execs: maximum commands at a time; others wait, without using up their
      time.
    cgroups: use control groups if they are available.
  """

  uids: tuple[int, int] | None = None
  read_only: tuple[tuple[str, str], ...] = ()
  hidden: tuple[str, ...] = ()
  parallel_execs: int = 32
  cgroups: bool = True

  def __post_init__(self):
    if self.uids is not None and not 0 < self.uids[0] < self.uids[1]:
      raise ValueError(f'Host.uids={self.uids}: must be (low, high), 0 < low < high')
    if self.parallel_execs < 1:
      raise ValueError(f'Host.parallel_execs={self.parallel_execs}: must be at least 1')
    for source, target in self.read_only:
      if not os.path.isdir(source) or not target.startswith('/'):
        raise ValueError(
          f'Host.read_only: {(source, target)} must be (directory, absolute path)'
        )


@dataclasses.dataclass(frozen=True)
class Capabilities:
  """What this machine enforces, from a trial of each property (`probe.capabilities`).

  Attributes:
    backend: one of `BACKENDS`.
    isolation: property -> whether a command failed to break it.
    limits: field of `Limits` -> mechanism that enforced it in the trial, or None.
    notes: further information, one line each.
  """

  backend: str
  isolation: Mapping[str, bool]
  limits: Mapping[str, str | None]
  notes: tuple[str, ...] = ()


def wall_s(limits: Limits, timeout_s: float | None) -> float:
  """Elapsed time of a command, within its limit.

  Raises:
    ValueError: `timeout_s` is not a positive number.
  """
  if timeout_s is None:
    return float(limits.wall_s)
  if not timeout_s > 0:  # nan is not
    raise ValueError(f'timeout_s={timeout_s!r}: must be a positive number')
  return float(min(timeout_s, limits.wall_s))


def impossible(command: str) -> ExecResult | None:
  """The result of a command that no shell can be given; None if one can."""
  if '\0' in command:
    return ExecResult(126, '', 'bash: the command contains a NUL byte\n')
  if len(command.encode(errors='replace')) > _MAX_COMMAND_BYTES:
    words = f'bash: the command is longer than {_MAX_COMMAND_BYTES} bytes\n'
    return ExecResult(126, '', words)
  return None


def default_python() -> tuple[tuple[str, str], ...]:
  """`Host.read_only` with a `python3`: this interpreter's, if /usr has none."""
  if shutil.which('python3', path='/usr/local/bin:/usr/bin:/bin'):
    return ()
  # At the same path: an interpreter may contain its location.
  return ((sys.base_prefix, sys.base_prefix),)


def default_uids() -> tuple[int, int]:
  """Uids above those of real users, among those that this user namespace maps."""
  with open('/proc/self/uid_map') as f:
    top = max(int(line.split()[0]) + int(line.split()[2]) for line in f)
  if top >= 265_536:
    return 200_000, 265_536
  # A container with 65,536 uids; the last but one is nobody's.
  return max(top // 2, 1), max(top - 2, 2)
