"""Times one sandboxed command, and many concurrent sandboxes.

  python -m benchmarks.sandbox
  python -m benchmarks.sandbox --boxes=64 --commands=4 --json
  python -m benchmarks.sandbox --backend=gvisor --sequential=20 --boxes=8

Each line is a case: the wall-clock time per command, and the user and kernel time of
the supervisor, each sandbox's process 1 and their commands (`/proc/PID/stat`). The
kernel removes namespaces in kernel threads, so `machine` is the kernel time of the
whole machine (`/proc/stat`), including other programs: run this on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import resource
import subprocess
import time
from pathlib import Path

from benchmarks import proc_stat
from m2jax import sandbox

_WORDS = {True: 'yes', False: 'no', None: '-'}


@dataclasses.dataclass(frozen=True)
class Times:
  """Clock readings in seconds; `-` gives the time between two readings."""

  wall_s: float
  user_s: float
  kernel_s: float
  machine_s: float

  def __sub__(self, other: Times) -> Times:
    pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
    return Times(*(a - b for a, b in pairs))


def now(supervisor: int | None) -> Times:
  """Reads the clocks of a supervisor's process id; None: of this process's children."""
  if supervisor is None:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    user_s, kernel_s = usage.ru_utime, usage.ru_stime
  else:
    user_s, kernel_s = proc_stat.with_children(supervisor)
  machine = Path('/proc/stat').read_text().split('\n')[0].split()
  system = sum(int(machine[n]) for n in (3, 6, 7))  # system, irq, softirq
  return Times(
    time.perf_counter(),
    user_s,
    kernel_s,
    system / proc_stat.TICKS,
  )


async def sequential(options: dict, commands: int) -> tuple[Times, int]:
  """Runs `true` repeatedly in one sandbox."""
  async with await sandbox.create(**options) as box:
    await box.exec('true')
    before = now(box.supervisor_pid)
    for _ in range(commands):
      assert (await box.exec('true')).returncode == 0
    return now(box.supervisor_pid) - before, commands


async def concurrent(options: dict, boxes: int, commands: int) -> tuple[Times, int]:
  """Concurrent episodes: each creates a sandbox, runs its commands and destroys it."""

  async def episode():
    async with await sandbox.create(contents={'f': b'a\n'}, **options) as box:
      for _ in range(commands):
        assert (await box.exec('wc -l f')).returncode == 0

  async with await sandbox.create(**options) as box:
    await box.exec('true')
    before = now(box.supervisor_pid)
    await asyncio.gather(*(episode() for _ in range(boxes)))
    return now(box.supervisor_pid) - before, boxes * commands


def bare(command: str, commands: int) -> tuple[Times, int]:
  """Runs a command repeatedly without a sandbox."""
  before = now(None)
  for _ in range(commands):
    subprocess.run(['bash', '-c', command], check=True, stdout=subprocess.DEVNULL)
  return now(None) - before, commands


async def measure(arguments) -> list[dict]:
  """Runs every case. Returns one row each, with milliseconds per command."""
  rows = []

  def add(name: str, groups: bool | None, times: Times, commands: int) -> None:
    row = {'case': name, 'cgroups': groups, 'commands': commands}
    for field, value in dataclasses.asdict(times).items():
      row[field.replace('_s', '_ms')] = round(1000 * value / commands, 2)
    rows.append(row)

  for groups in (True, False):
    host = sandbox.Host(cgroups=groups)
    options = dict(backend=arguments.backend, host=host)
    cases = {
      "exec('true'), one after another": sequential(options, arguments.sequential),
      f'{arguments.boxes} sandboxes at once, {arguments.commands} commands each': (
        concurrent(options, arguments.boxes, arguments.commands)
      ),
    }
    for name, case in cases.items():
      add(name, groups, *await case)
  await sandbox.shutdown()
  for command in ('true', 'wc -l /etc/passwd'):
    add(f'bash -c {command!r} alone', None, *bare(command, arguments.sequential))
  return rows


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--backend', default='namespaces')
  parser.add_argument('--sequential', type=int, default=200)
  parser.add_argument('--boxes', type=int, default=64)
  parser.add_argument('--commands', type=int, default=4)
  parser.add_argument('--json', action='store_true')
  arguments = parser.parse_args()
  rows = asyncio.run(measure(arguments))
  if arguments.json:
    print(json.dumps(rows, indent=2))
    return
  print(f'{"":44} {"cgroups":8}{"wall":>8}{"user":>8}{"kernel":>8}{"machine":>9}')
  for row in rows:
    print(
      f'{row["case"]:44} {_WORDS[row["cgroups"]]:8}{row["wall_ms"]:8.2f}'
      f'{row["user_ms"]:8.2f}{row["kernel_ms"]:8.2f}{row["machine_ms"]:9.2f}'
    )
  print('milliseconds per command')


if __name__ == '__main__':
  main()
