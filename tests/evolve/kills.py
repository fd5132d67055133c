"""Runs a small lineage in forks, each killed at one of its events, then resumed.

  python -m tests.evolve.kills DIR ROUNDS STRIDE

Prints one JSON object: for each event, whether the resumed lineage is that of a run
without a kill. An event is a line that is about to be written, is half written or was
written, or the begin of a git command.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys

from m2jax.evolve import lineage, record, trees
from m2jax.evolve.trees import Trees
from tests.evolve import simulated

_CHANGES = (
  simulated.BETTER,
  simulated.WORSE,
  {'seed': 1},
  {**simulated.BEST, 'rules': 'def act(e):\n  return None\n'},
)


class Events:
  """Counts events; the process kills itself at one of them."""

  def __init__(self, at: int):
    self.count, self.names, self._at = 0, [], at

  def __call__(self, name: str, half=None) -> None:
    self.count += 1
    self.names.append(name)
    if self.count == self._at:
      if half is not None:
        half()
      os.kill(os.getpid(), signal.SIGKILL)


def instrument(events: Events) -> None:
  append, git = record.Record.append, Trees._git

  def appended(self, kind, **fields):
    events(f'before {kind}')
    events(f'within {kind}', lambda: os.write(self._file, b'{"schema":1,"kind"'))
    line = append(self, kind, **fields)
    events(f'after {kind}')
    return line

  def run(self, *arguments, **options):
    events(f'git {arguments[0]}')
    return git(self, *arguments, **options)

  record.Record.append, Trees._git = appended, run


def lineage_of(workdir: pathlib.Path) -> dict:
  """What a lineage is: its record without times, its commits."""
  lines = record.read(workdir / record.FILE_NAME)
  assert not list(lineage.replay(lines))
  for line in lines:
    del line['time_s']
    for cost in ('cost', 'incumbent_cost'):
      line.get(cost, {}).pop('seconds', None)
  repository = trees.Trees(workdir)
  refs = repository._git('for-each-ref', '--format=%(refname) %(objectname)')
  left = sorted(path.name for path in workdir.iterdir())
  return {'lines': lines, 'refs': refs, 'left': left}


def run(workdir: pathlib.Path) -> None:
  rounds = int(sys.argv[2])
  loop = simulated.make(workdir, simulated.script(*_CHANGES), rounds)
  loop.run()
  loop.close()


def in_fork(work) -> int:
  """The exit status of `work` in a process of its own."""
  child = os.fork()
  if not child:
    status = 1
    try:
      work()
      status = 0
    finally:
      os._exit(status)
  return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(workdir: pathlib.Path, at: int) -> int:
  def work():
    instrument(Events(at))
    run(workdir)

  return in_fork(work)


def main() -> None:
  place, stride = pathlib.Path(sys.argv[1]), int(sys.argv[3])
  events = Events(-1)
  saved = record.Record.append, Trees._git
  instrument(events)
  run(place / 'whole')
  record.Record.append, Trees._git = saved
  whole, found = lineage_of(place / 'whole'), {}
  for at in range(1, events.count + 1, stride):
    workdir, name = place / str(at), f'{at} {events.names[at - 1]}'
    assert killed(workdir, at) == -signal.SIGKILL, name
    assert in_fork(lambda workdir=workdir: run(workdir)) == 0, name
    found[name] = lineage_of(workdir) == whole
  print(json.dumps(found))


if __name__ == '__main__':
  main()
