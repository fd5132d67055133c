r"""Where the processor time of the main job's RL goes, while it waits and trains.

  python -m benchmarks.rl_profile --config=configs/forge.py \
    --config.start=workdir/forge --workdir=workdir/rl_profile

Runs the job of `experiments.forge`, here RL from the SFT weights of a finished run, and
reads the kernel's clocks of each thread and of the sandbox's processes meanwhile
(`/proc/PID/stat`, ten milliseconds a tick). The records of the updates say when the
learner waited for rollouts and when it trained.

Printed: seconds of waiting and of training, and their processor time by part. `model`
is XLA's threads, of the engine alone while the learner waits, of both while it trains.
`kernel threads` do work of the sandbox: they remove namespaces. `idle` is what is left
of all cores, with the time of other programs: run this on an idle machine.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import threading
import time
from collections.abc import Iterable, Sequence

from benchmarks import proc_stat
from experiments import common, forge
from m2jax.observe import metrics

_EVERY_S = 0.25
# Parts by the names of threads, and of processes, which begin with these.
_THREADS = {
  'tf_XLA': 'model',
  'rollout': 'engine, Python',
  'gateway': 'gateway',
  'agents': 'agents',
  'pool-writer': 'pool',
  'retire-items': 'pool',
  'MainThread': 'learner, Python',
}
PARTS = (
  *dict.fromkeys(_THREADS.values()),
  'sandbox',
  'kernel threads',
  'other',
  'idle',
)


@dataclasses.dataclass(frozen=True)
class Reading:
  """Processor seconds by part since the start, at a time."""

  time_s: float
  parts: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Interval:
  """A time in which the learner waited for rollouts, or trained."""

  phase: str
  begin_s: float
  end_s: float


class Sampler:
  """Reads the clocks in a thread of its own until the body of `with` ends."""

  def __init__(self):
    self.readings: list[Reading] = []
    # Part and last reading of each thread and process, also of those that have ended.
    self._last: dict[int, tuple[str, float]] = {}
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._run, name='sampler', daemon=True)

  def __enter__(self) -> Sampler:
    self._thread.start()
    return self

  def __exit__(self, *exc) -> None:
    self._stop.set()
    self._thread.join()

  def _run(self) -> None:
    while not self._stop.wait(_EVERY_S):
      self.readings.append(self._read())

  def _read(self) -> Reading:
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in os.listdir('/proc/self/task'):
      if found := _stat(f'/proc/self/task/{task}/stat'):
        used_s = found.user_s + found.kernel_s
        part, before_s = self._last.get(int(task), ('', math.inf))
        # Python forgets a thread that ends a little before the kernel does.
        if int(task) in names or used_s < before_s:
          part = _part(names.get(int(task), found.name))
        self._last[int(task)] = part, used_s
    for pid in filter(str.isdigit, os.listdir('/proc')):
      if not (found := _stat(f'/proc/{pid}/stat')):
        continue
      if found.parent == os.getpid():  # the sandbox's supervisor
        with contextlib.suppress(OSError):
          self._last[int(pid)] = 'sandbox', sum(proc_stat.with_children(int(pid)))
      elif found.parent == 2:
        self._last[int(pid)] = 'kernel threads', found.user_s + found.kernel_s
    parts: collections.Counter = collections.Counter()
    for part, seconds in self._last.values():
      parts[part] += seconds
    return Reading(time.time(), dict(parts))


def _stat(path: str) -> proc_stat.ProcStat | None:
  """Clocks of a process or thread; None if it has ended."""
  try:
    return proc_stat.read(path)
  except OSError:
    return None


def _part(name: str) -> str:
  found = (part for prefix, part in _THREADS.items() if name.startswith(prefix))
  return next(found, 'other')


def intervals(records: Iterable[metrics.Record]) -> list[Interval]:
  """When the learner waited and trained, from the records of its updates."""
  found = []
  for record in records:
    end_s = record['time_s']
    begin_s = end_s - record['step_s']
    middle_s = begin_s + record['wait_s']
    found.append(Interval('waiting', begin_s, middle_s))
    found.append(Interval('training', middle_s, end_s))
  return found


def totals(
  readings: Sequence[Reading], found: Sequence[Interval], cores: int
) -> dict[str, dict[str, float]]:
  """Phase → processor seconds of each part, and `seconds`, the time it took.

  The time between two readings counts for the phase at its middle.
  """
  out: dict[str, collections.Counter] = {
    phase: collections.Counter(seconds=0.0) for phase in ('waiting', 'training')
  }
  for last, reading in zip(readings, readings[1:], strict=False):
    middle_s = (last.time_s + reading.time_s) / 2
    phase = next((i.phase for i in found if i.begin_s <= middle_s < i.end_s), None)
    if phase is None:
      continue
    for part, seconds in reading.parts.items():
      out[phase][part] += seconds - last.parts.get(part, 0.0)
    out[phase]['seconds'] += reading.time_s - last.time_s
  for counter in out.values():
    counter['idle'] = cores * counter['seconds'] - sum(counter[p] for p in PARTS[:-1])
  return {phase: dict(counter) for phase, counter in out.items()}


def table(found: dict[str, dict[str, float]]) -> str:
  """A Markdown table: seconds of a phase, and shares of its processor time."""
  phases = tuple(found)
  wholes = {
    phase: sum(values.get(part, 0.0) for part in PARTS) or 1.0
    for phase, values in found.items()
  }
  rows = [['part', *phases], ['---'] * (1 + len(phases))]
  rows.append(['seconds', *(f'{found[phase]["seconds"]:.0f}' for phase in phases)])
  for part in PARTS:
    shares = (found[phase].get(part, 0.0) / wholes[phase] for phase in phases)
    rows.append([part, *(f'{share:.1%}' for share in shares)])
  return '\n'.join(f'| {" | ".join(row)} |' for row in rows)


def main() -> None:
  with Sampler() as sampler:
    forge.main()
  found = intervals(metrics.read(common.workdir(), 'rl'))
  used = totals(sampler.readings, found, len(os.sched_getaffinity(0)))
  if not sum(values['seconds'] for values in used.values()):
    raise common.BadInput(
      '--workdir: its run is complete, and no update was made: --fresh starts it anew'
    )
  print(table(used))


if __name__ == '__main__':
  common.run(main, *forge.EXPECTED, distributed=True)
