"""What the audit hook and the snapshot of SWE's guards see, without a sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
import types
import warnings
from pathlib import Path

from m2jax.pipelines.swe import guards

_WATCHED = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location('guards', sys.argv[1])
guards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guards)
import collections, enum, logging, typing
found = []
guards.watch(('/trusted/',), sys.argv[2] + '/', found.append)
exec(sys.stdin.read())
print(json.dumps(found))
"""


def _found(code: str, tmp_path) -> list[str]:
  done = subprocess.run(
    [sys.executable, '-S', '-c', _WATCHED, guards.__file__, str(tmp_path)],
    input=code,
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def test_ordinary_code_raises_nothing(tmp_path):
  """The standard library asks for frames too; an honest agent must not pay for that."""
  code = """
collections.namedtuple('A', 'b'); typing.NamedTuple('N', [('a', int)])
enum.Enum('E', 'A B'); typing.TypeVar('T'); import colorsys
class P(typing.Protocol):
  def f(self): ...
def values():
  yield 1
list(values()); eval(compile('1', '<string>', 'eval'))
"""
  assert _found(code, tmp_path) == []


def test_each_way_to_a_frame_is_seen(tmp_path):
  code = """
def values():
  yield 1
sys._getframe(); values().gi_frame; sys._current_frames(); sys.settrace(None)
try:
  1 / 0
except ZeroDivisionError as error:
  error.__traceback__.tb_frame
logging.currentframe(); compile('1', '/usr/lib/x.py', 'eval')
import gc; gc.get_objects(); values.__code__; open('/proc/self/maps')
open(sys.argv[2] + '/x', 'w')
"""
  found = [key.rpartition(' ')[0] for key in _found(code, tmp_path)]
  assert found == [
    *('sys._getframe', 'gi_frame', 'sys._current_frames', 'sys.settrace', 'tb_frame'),
    *('sys._getframe', 'compile with a file name', 'gc.get_objects'),
    *('strict: __code__', 'open /proc', 'strict: open to write'),
  ]


def test_c_functions_on_behalf_of_a_test_are_seen(tmp_path):
  """Composed functions of C leave no frame of their own: the test's is not trusted."""
  code = """
from operator import attrgetter
list(map(attrgetter('f_locals'), map(sys._getframe, [0])))
"""
  assert [key.partition(' ')[0] for key in _found(code, tmp_path)] == ['sys._getframe']


def test_what_is_replaced_or_added_is_named(monkeypatch):
  """Functions, properties, bases and what a module imports; not a new submodule or
  what Python notes of warnings."""
  module = types.ModuleType('pluggy.made')

  class Base:
    pass

  class Report(Base):
    failed = property(lambda self: True)

    def run(self):
      return 1

  Base.__module__ = Report.__module__ = module.__name__
  module.Base, module.Report, module.path = Base, Report, Path
  exec('import warnings\ndef warn(): warnings.warn("old")', vars(module))
  monkeypatch.setitem(sys.modules, module.__name__, module)
  snapshot = guards.Snapshot()
  assert snapshot.changes() == []
  module.sub = types.ModuleType('pluggy.made.sub')
  with warnings.catch_warnings(record=True):  # issued on a caller's behalf
    module.warn()
  assert '__warningregistry__' in vars(module)
  assert snapshot.changes() == []
  Report.failed = property(lambda self: False)
  Report.passed = True
  module.path = str
  module.isinstance = lambda *a: True
  assert set(snapshot.changes()) == {
    'Report.failed',
    'Report.passed',
    'pluggy.made.path',
    'pluggy.made.isinstance',
  }
