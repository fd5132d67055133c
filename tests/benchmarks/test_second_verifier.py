"""The second verifier judges a review without its answer, runs no test that is not of
the task, and has no opinion of a run that was cut off."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sysconfig
from pathlib import Path

import pytest

from benchmarks import second_verifier
from m2jax import sandbox

_RIGHT = """\
def clamp(value, low, high):
  # The order matters here.
  if value < low:
    return low
  return value


def names(first, /, *more, last=None):
  return [first, *more, last]


def wait(values):
  for value in values:
    if value:
      continue
    return value
"""
CHANGES = {
  'an operator': ('value < low', 'value > low', 3),
  'a name': ('return value\n\n\ndef names', 'return high\n\n\ndef names', 5),
  'a number of statements': ('  return [first', '  first = 1\n  return [first', 9),
  'a keyword': ('last=None', 'last=1', 8),
  'a statement without fields': ('continue', 'break', 15),
}


def _reviewed(tmp_path, changed, line):
  place = tmp_path / 'solution' / 'files'
  place.mkdir(parents=True, exist_ok=True)
  answer = {'path': 'a.py', 'line': line}
  (place / 'review.json').write_text(json.dumps(answer))
  release, after = {'a.py': _RIGHT.encode()}, {'a.py': changed.encode()}
  return second_verifier.reviewed(release, after, {'path': 'a.py'}, tmp_path)


@pytest.mark.parametrize('name', CHANGES)
def test_only_a_line_near_the_change_is_right(tmp_path, name):
  old, new, line = CHANGES[name]
  changed = _RIGHT.replace(old, new)
  assert changed != _RIGHT
  assert _reviewed(tmp_path, changed, line) == ''
  assert 'difference' in _reviewed(tmp_path, changed, line + 40)


def test_a_change_of_comments_alone_is_none(tmp_path):
  assert 'comments' in _reviewed(tmp_path, _RIGHT.replace('order', 'sort'), 2)


# In the place of pytest: the junit file names one test, then the process goes on.
_PYTEST = """\
import os, signal, sys, time
path = next(a for a in sys.argv if a.startswith('--junitxml=')).partition('=')[2]
open(path, 'w').write('<s><testcase classname="a" name="b" time="0"/></s>')
"""
ENDS = {
  'passes': ('', True),
  'a test fails': ('sys.exit(1)', True),
  'collection fails': ('sys.exit(4)', True),
  'takes too long': ('time.sleep(60)', False),
  'takes too much of the processor': ('\nwhile True: pass', False),
  'is killed': ('os.kill(os.getpid(), signal.SIGKILL)', False),
}


@pytest.mark.parametrize('name', ENDS)
def test_a_run_that_was_cut_off_is_no_opinion(tmp_path, monkeypatch, name):
  code, ends = ENDS[name]
  wall_s, cpu_s = (4.0, 60) if 'long' in name else (60.0, 1)
  limits = dataclasses.replace(second_verifier._LIMITS, wall_s=wall_s, cpu_s=cpu_s)
  monkeypatch.setattr(second_verifier, '_LIMITS', limits)
  package = tmp_path / 'sites' / 'site' / 'pytest'
  package.mkdir(parents=True)
  (package / '__init__.py').touch()  # else a pytest of the interpreter itself wins
  (package / '__main__.py').write_text(_PYTEST + code)

  if ends:
    assert _outcomes(tmp_path, 'site', {'a.py': b''}, []) == {('a', 'b'): 'passed'}
    return
  with pytest.raises(second_verifier.CutOffError):
    _outcomes(tmp_path, 'site', {'a.py': b''}, [])


def _outcomes(dataset, site, tree, files, only=None):
  async def run():
    try:
      return await second_verifier.outcomes(dataset, site, tree, (), files, only)
    finally:
      await sandbox.shutdown()

  return asyncio.run(run())


_TESTS = b"""\
def test_other():
  while True:
    pass

def test_of_the_task():
  pass
"""


def test_other_tests_of_the_files_do_not_run(tmp_path):
  """One that is random, so no part of the task, may never end with the bug."""
  site = Path(sysconfig.get_path('purelib'))
  (tmp_path / 'sites').symlink_to(site.parent)
  tree, only = {'test_a.py': _TESTS}, ['test_a.py::test_of_the_task']
  found = _outcomes(tmp_path, site.name, tree, ['test_a.py'], only)
  assert found == {('test_a', 'test_of_the_task'): 'passed'}
