"""Where the time of the tests goes: seconds, compilations, processes, sleeps.

A pytest plugin, loaded by conftest.py where TEST_TIMINGS names a folder, that records
every test, and a command that prints what was recorded:

    TEST_TIMINGS=.cache/timings make test
    python -m tests.timings .cache/timings [--by=room|file|test] [--top=40]

CPU seconds are those of the process and of the children it has waited for, so that a
child counts for the test that ends it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import resource
import sys
import time

import pytest

from tests import processes

_COUNTS = collections.Counter()
_COLUMNS = (
  'tests', 'cpu_s', 'children_s', 'wall_s', 'collect_s', 'compilations', 'compile_s',
  'trace_s', 'processes', 'sleep_s',
)  # fmt: skip
# CPU seconds that a test or a file of tests should not exceed.
_SHARES = {'test': 20, 'file': 40}


def _audit(event: str, args) -> None:
  if event in ('subprocess.Popen', 'os.fork', 'os.posix_spawn'):
    _COUNTS['processes'] += 1
  elif event == 'time.sleep':
    _COUNTS['sleep_s'] += args[0]


def _duration(event: str, seconds: float, **_) -> None:
  if event.endswith('backend_compile_duration'):
    _COUNTS['compilations'] += 1
    _COUNTS['compile_s'] += seconds
  elif event.endswith(('jaxpr_trace_duration', 'jaxpr_to_mlir_module_duration')):
    _COUNTS['trace_s'] += seconds


def _now() -> collections.Counter:
  own = resource.getrusage(resource.RUSAGE_SELF)
  children = resource.getrusage(resource.RUSAGE_CHILDREN)
  return collections.Counter(
    _COUNTS,
    cpu_s=own.ru_utime + own.ru_stime,
    children_s=children.ru_utime + children.ru_stime + processes.cpu_s,
    wall_s=time.perf_counter(),
  )


class Recorder:
  """Writes a line of JSON for each file collected and each test run."""

  def __init__(self, folder: pathlib.Path):
    folder.mkdir(parents=True, exist_ok=True)
    self._file = (folder / f'{os.getpid()}.jsonl').open('a', buffering=1)
    sys.addaudithook(_audit)
    import jax.monitoring

    jax.monitoring.register_event_duration_secs_listener(_duration)
    self._write('start', _now())

  def _write(self, name: str, spent: collections.Counter, **fields) -> None:
    self._file.write(json.dumps({'test': name, **spent, **fields}) + '\n')

  @pytest.hookimpl(wrapper=True)
  def pytest_make_collect_report(self, collector):
    before = _now()
    try:
      return (yield)
    finally:
      if isinstance(collector, pytest.Module):
        spent = _now() - before
        self._write(
          collector.nodeid,
          collections.Counter(collect_s=spent['cpu_s'] + spent['children_s']),
        )

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item):
    before = _now()
    try:
      return (yield)
    finally:
      self._write(item.nodeid, _now() - before, tests=1)


def load(folder: pathlib.Path) -> list[dict]:
  """Every line recorded in a folder."""
  return [
    json.loads(line)
    for path in sorted(folder.glob('*.jsonl'))
    for line in path.read_text().splitlines()
  ]


def table(lines: list[dict], by: str, top: int) -> list:
  """Sums by room, file or test, most CPU first, and a last line for all."""
  sums = collections.defaultdict(collections.Counter)
  total = collections.Counter()
  for line in lines:
    name = line.pop('test')
    if by != 'test':
      name = name.split('::')[0]
    if by == 'room':
      name = '/'.join(name.split('/')[:2])
    sums[name].update(line)
    total.update(line)
  most = lambda entry: -_cpu_s(entry[1])
  return [*sorted(sums.items(), key=most)[:top], ('all', total)]


def _cpu_s(spent: collections.Counter) -> float:
  return spent['cpu_s'] + spent['children_s'] + spent['collect_s']


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--by', choices=('room', 'file', 'test'), default='room')
  parser.add_argument('--top', type=int, default=40)
  parser.add_argument('--warn', action='store_true', help='name what exceeds its share')
  args = parser.parse_args()
  if not any(args.folder.glob('*.jsonl')):
    parser.error(f'{args.folder}: no timings; run TEST_TIMINGS={args.folder} make test')
  print('| |', ' | '.join(_COLUMNS), '|')
  print('|---|' + '---:|' * len(_COLUMNS))
  for name, spent in table(load(args.folder), args.by, args.top):
    print('|', name, '|', ' | '.join(f'{spent[c]:.0f}' for c in _COLUMNS), '|')
  if args.warn:
    for by, limit_s in _SHARES.items():
      for name, spent in table(load(args.folder), by, 10_000)[:-1]:
        if not name.startswith('start') and _cpu_s(spent) > limit_s:
          print(f'{name}: {_cpu_s(spent):.0f} CPU s, above the {limit_s} s of a {by}')


if __name__ == '__main__':
  main()
