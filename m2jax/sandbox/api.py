"""What the sandbox room promises: limits, results, errors (DESIGN §6).

A limit is either enforced by a named mechanism or reported as not enforced
(`Capabilities`); what cannot be isolated is refused (`SandboxUnavailable`).
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from collections.abc import Mapping

BACKENDS = ('bubblewrap', 'rlimit_only')


class SandboxError(RuntimeError):
  """The sandbox failed, not the command: nobody's reward may depend on it (law 5)."""


class SandboxUnavailable(SandboxError):
  """This machine cannot give the sandbox asked for.

  Attributes:
    reason: what was tried and failed.
    fix: one line that a person can run or do.
  """

  def __init__(self, reason: str, fix: str):
    super().__init__(f'no sandbox: {reason.strip()}\nfix: {fix}')
    self.reason = reason.strip()
    self.fix = fix


class SandboxPathError(SandboxError):
  """A path that leaves the workspace, or is not a plain file; never followed.

  An agent can cause it, by putting a link or a pipe where a file was expected.
  """


@dataclasses.dataclass(frozen=True)
class Limits:
  """What one sandbox may use. All positive.

  Attributes:
    cpu_s: CPU time of each process of a command; whole seconds.
    memory_bytes: all processes of a sandbox together under a control group, swap and
      the files that they write included. Elsewhere the address space of each process,
      and `Capabilities` reports the limit as not enforced.
    processes: processes (threads count) at once in one command.
    output_bytes: kept of each of stdout and stderr; the rest is dropped as it comes,
      and a command that goes on printing (64 times as much) is killed.
    file_bytes: size of any one file.
    workspace_bytes: all files of the workspace together; those of /tmp and /dev/shm
      together have the same limit, and go with each command.
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
        raise ValueError(f'Limits.{field.name}: want a positive {kind}, got {value!r}')


@dataclasses.dataclass(frozen=True)
class ExecResult:
  """How a command ended.

  Attributes:
    returncode: as a shell reports it: 128 + n after signal n; 124 when timed out; 137
      when killed for memory or for endless output.
    stdout, stderr: UTF-8, undecodable bytes replaced; cut at `Limits.output_bytes`.
    truncated: some output was dropped.
    wall_s: elapsed time from start to end.
    timed_out: killed because its wall-clock time was over.
    oom: the kernel killed one of its processes for memory. Known only under a control
      group; elsewhere allocation fails and the program reports that itself.
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
  """How sandboxes sit on this machine; one supervisor serves each distinct value.

  Attributes:
    uids: `[low, high)`, where the caller is root: each sandbox runs under its own. None
      picks a range that this machine maps.
    read_only: (directory on the host, place in the sandbox), beside /usr.
    parallel_execs: commands running at once; more wait, their clocks not running.
    cgroups: use control groups where they can be had.
  """

  uids: tuple[int, int] | None = None
  read_only: tuple[tuple[str, str], ...] = ()
  parallel_execs: int = 32
  cgroups: bool = True

  def __post_init__(self):
    if self.uids is not None and not 0 < self.uids[0] < self.uids[1]:
      raise ValueError(f'Host.uids: want (low, high), 0 < low < high: {self.uids}')
    if self.parallel_execs < 1:
      raise ValueError(f'Host.parallel_execs: want at least 1: {self.parallel_execs}')
    for source, target in self.read_only:
      if not os.path.isdir(source) or not target.startswith('/'):
        raise ValueError(
          f'Host.read_only: want (directory, absolute path): {(source, target)}'
        )


@dataclasses.dataclass(frozen=True)
class Capabilities:
  """What was really seen to hold here, each by trying it (`probe.capabilities`).

  Attributes:
    backend: 'bubblewrap' or 'rlimit_only'.
    isolation: property -> whether a command tried to break it and failed.
    limits: field of `Limits` -> mechanism that enforced it in a trial, or None.
    notes: what a person should know, one line each.
  """

  backend: str
  isolation: Mapping[str, bool]
  limits: Mapping[str, str | None]
  notes: tuple[str, ...] = ()


def default_python() -> tuple[tuple[str, str], ...]:
  """`Host.read_only` that gives commands a `python3`: ours, where /usr has none."""
  if shutil.which('python3', path='/usr/local/bin:/usr/bin:/bin'):
    return ()
  # At the same path: an interpreter may have its own location compiled in.
  return ((sys.base_prefix, sys.base_prefix),)


def default_uids() -> tuple[int, int]:
  """Uids beyond any real user's, among those that this user namespace maps."""
  with open('/proc/self/uid_map') as f:
    top = max(int(line.split()[0]) + int(line.split()[2]) for line in f)
  if top >= 265_536:
    return 200_000, 265_536
  return max(top // 2, 1), max(top - 2, 2)  # a container's 65,536: not nobody's
