"""The kernel's clocks of a process or a thread: `/proc/PID/stat` (proc_pid_stat(5))."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib

TICKS = os.sysconf('SC_CLK_TCK')  # a second


@dataclasses.dataclass(frozen=True)
class ProcStat:
  """Processor seconds so far; `children`: of those that have ended and were reaped."""

  name: str
  parent: int
  user_s: float
  kernel_s: float
  children_user_s: float
  children_kernel_s: float


def with_children(pid: int) -> tuple[float, float]:
  """User and kernel seconds of a process, of its living children and of all that these
  and it have reaped. Raises OSError if the process has ended."""
  children = pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
  found = [read(f'/proc/{pid}/stat')]
  for child in children:
    with contextlib.suppress(OSError):
      found.append(read(f'/proc/{child}/stat'))
  user_s = sum(stat.user_s + stat.children_user_s for stat in found)
  return user_s, sum(stat.kernel_s + stat.children_kernel_s for stat in found)


def read(path: str) -> ProcStat:
  """Raises OSError if the process has ended."""
  before, _, after = pathlib.Path(path).read_text().rpartition(') ')
  fields = after.split()
  seconds = (int(field) / TICKS for field in fields[11:15])
  return ProcStat(before.partition('(')[2], int(fields[1]), *seconds)
