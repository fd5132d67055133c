"""What the audit hook and the snapshot of SWE's guards see, without a sandbox."""

from __future__ import annotations

import asyncio
import json
import platform
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from m2jax import sandbox
from m2jax_pipelines.swe import alone, environment, guards, snapshot

# Each request, a directory and code, is watched in a process of its own.
_WATCHED = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location('guards', sys.argv[1])
guards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(guards)
import collections, enum, logging, typing
for line in sys.stdin:
  directory, code = json.loads(line)
  if not (pid := os.fork()):
    found = []
    sys.argv[2:] = [directory]
    guards.watch(('/trusted/',), directory + '/', (), found.append)
    exec(code)
    print(json.dumps(found), flush=True)
    os._exit(0)
  if os.waitpid(pid, 0)[1]:
    print('null', flush=True)
"""


@pytest.fixture(scope='module')
def watch():
  """`watch(code, directory)`: what the audit hook finds in code."""
  command = [sys.executable, '-S', '-c', _WATCHED, guards.__file__]
  ends = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
  with subprocess.Popen(command, **ends) as process:

    def watch(code: str, directory: Path) -> list[str]:
      process.stdin.write(json.dumps([str(directory), code]) + '\n')
      process.stdin.flush()
      found = json.loads(process.stdout.readline())
      assert found is not None, 'the code fails: its error is above'
      return found

    yield watch
    process.stdin.close()


def test_ordinary_code_raises_nothing(watch, tmp_path):
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
  assert watch(code, tmp_path) == []


def test_each_way_to_a_frame_is_seen(watch, tmp_path):
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
  found = [key.rpartition(' ')[0] for key in watch(code, tmp_path)]
  assert found == [
    *('sys._getframe', 'gi_frame', 'sys._current_frames', 'sys.settrace', 'tb_frame'),
    *('sys._getframe', 'compile with a file name', 'gc.get_objects'),
    *('strict: __code__', 'open /proc', 'strict: open to write'),
  ]


def test_ending_a_child_is_known_from_starting_it(watch, tmp_path):
  """Whether multiprocessing has to end a child is chance: the environment may not have
  seen it, and a right solution must not fail by it."""
  code = """
import multiprocessing, time
child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))
child.start(); child.terminate(); child.join()
"""
  found = watch(code, tmp_path)
  ran = environment.Output(
    {}, {'audited': [e for e in found if 'os.kill' not in e]}, {}, 0
  )
  assert any('os.kill' in event for event in found)
  assert set(found) == set(environment.audited(ran))
  assert environment.audited(environment.Output({}, {}, {}, 0.0)) == ()


def test_c_functions_on_behalf_of_a_test_are_seen(watch, tmp_path):
  """Composed functions of C leave no frame of their own: the test's is not trusted."""
  code = """
from operator import attrgetter
list(map(attrgetter('f_locals'), map(sys._getframe, [0])))
"""
  assert [key.partition(' ')[0] for key in watch(code, tmp_path)] == ['sys._getframe']


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

  class Other:
    pass

  run = Report.run
  Base.__module__ = Report.__module__ = module.__name__
  module.Base, module.Report, module.path = Base, Report, Path
  exec('import warnings\ndef warn(): warnings.warn("old")', vars(module))
  monkeypatch.setitem(sys.modules, module.__name__, module)
  found = snapshot.Snapshot()
  assert found.changes() == []
  module.sub = types.ModuleType('pluggy.made.sub')
  with warnings.catch_warnings(record=True):  # issued on a caller's behalf
    module.warn()
  assert '__warningregistry__' in vars(module)
  assert found.changes() == []
  del module.sub
  module.len = lambda x: 0  # in the place of what may be added: as many names as before
  assert found.changes() == ['pluggy.made.len']
  del module.len, Report.run
  assert found.changes() == ['Report.run']
  Report.run = run
  assert found.changes() == []
  Report.failed = property(lambda self: False)
  Report.passed = True
  module.path = str
  module.isinstance = lambda *a: True
  module.getattr = type('M', (types.ModuleType,), {'__call__': print})('called')
  Report.__bases__ = (Other,)
  assert set(found.changes()) == {
    'Report.__bases__',
    'Report.failed',
    'Report.passed',
    'pluggy.made.path',
    'pluggy.made.isinstance',
    'pluggy.made.getattr',
  }


def test_what_functions_use_is_compared(monkeypatch):
  """Closures, also of what a closure holds, and keyword defaults, changed in place."""
  module = types.ModuleType('pluggy.made')

  def inner(*, most=3):
    return most

  def outer():
    return inner()

  module.outer = outer
  module.method = staticmethod(outer)
  monkeypatch.setitem(sys.modules, module.__name__, module)
  for function in (inner, outer):
    function.__module__ = module.__name__
  found = snapshot.Snapshot()
  inner.__kwdefaults__['most'] = 4
  (change,) = found.changes()
  assert change.endswith('inner')
  inner.__kwdefaults__['most'] = 3
  assert found.changes() == []
  (cell,) = outer.__closure__
  cell.cell_contents = print
  (change,) = found.changes()
  assert change.endswith('outer')
  del cell.cell_contents
  (change,) = found.changes()
  assert change.endswith('outer')


@pytest.mark.parametrize(
  'code',
  [
    "open(b'/proc/self/status')",
    "os.chdir('/proc/self'); open('status')",
    "os.symlink('/proc/self', sys.argv[2] + '/l'); open(sys.argv[2] + '/l/status')",
    "os.open('proc/self/status', 0, dir_fd=os.open('/', 0))",
    "d = os.open('/', 0); open(f'/proc/self/fd/{d}/proc/self/status')",
    "d = os.open('/', 0); open(f'/dev/fd/{d}/proc/self/status')",
    "import pathlib; pathlib.Path('/proc/self/status').read_bytes()",
    "import io; io.open_code('/proc/self/status')",
    'class S(str):\n  __str__ = startswith = __getitem__ = None\n'
    "os.open(S('/proc/self/status'), 0)",
    "import builtins as b; b.issubclass = lambda *a: False; open('/proc/self/status')",
    "os.O_WRONLY = os.stat = None; open('/proc/self/status')",
    "list(map(open, ['/proc/self/status']))",
  ],
)
def test_however_proc_is_opened_it_is_seen(watch, code, tmp_path):
  found = watch(f'import os\n{code}\n', tmp_path)
  assert 'open /proc' in {key.rpartition(' ')[0] for key in found}


@pytest.mark.parametrize(
  'code, what',
  [
    ('import io, pathlib; io.FileIO(pathlib.Path("/dev/null"))', 'open an object'),
    ('import ctypes', 'import ctypes'),
    (
      'import importlib.machinery as m, importlib.util as u\n'
      'import _bz2\n'
      'spec = u.spec_from_file_location("x._ctypes", _bz2.__file__)\n'
      'try:\n  u.module_from_spec(spec)\nexcept ImportError:\n  pass',
      'import _ctypes',
    ),
    (
      'import importlib.util as u, shutil, _bz2\n'
      'shutil.copy(_bz2.__file__, sys.argv[2] + "/_bz2.so")\n'
      'u.module_from_spec(u.spec_from_file_location("_bz2", sys.argv[2] + "/_bz2.so"))',
      'import a compiled module',
    ),
    (
      'import importlib.machinery as m\n'
      'm.SourceFileLoader("x", typing.__file__).source_to_code(b"1", typing.__file__)',
      'compile with a file name',
    ),
    ('import marshal; marshal.loads(marshal.dumps(1))', 'marshal.loads'),
    ('(lambda: 0).__code__.replace(co_filename="/x")', 'code.__new__'),
    ('open(sys.argv[2] + "/in", "a")', 'change the tree'),
    ('import os; os.chmod(sys.argv[2], 0o777)', 'change the tree'),
    ('import os; os.rename(sys.argv[2], sys.argv[2] + "2")', 'change the tree'),
    ('import os; os.remove(sys.argv[2] + "/in")', 'change the tree'),
    ('open(sys.argv[2].encode() + b"/in")', 'strict: open a file of the tree'),
    ('import os; os.chdir(sys.argv[2]); open("in")', 'strict: open a file of the tree'),
  ],
)
def test_other_ways_round_the_guards_are_seen(watch, code, what, tmp_path):
  (tmp_path / 'in').write_text('x')
  found = watch(code + '\n', tmp_path)
  assert [key for key in found if key.startswith(f'{what} ')], found


_STAYS = """
import importlib.util, json, os, subprocess, sys, threading
spec = importlib.util.spec_from_file_location('alone', sys.argv[1])
alone = importlib.util.module_from_spec(spec)
spec.loader.exec_module(alone)
sys.audit = lambda *a: None
def start(name):
  try:
    STARTS[name]()
  except OSError as error:
    return type(error).__name__
  return 'started'
def fork():
  if not os.fork():
    os._exit(0)
  os.wait()
def thread():
  thread = threading.Thread(target=ran.append, args=(1,))
  thread.start()
  thread.join()
STARTS = {
  'fork': fork,
  'spawn': lambda: os.posix_spawn('/bin/true', ['true'], {}),
  'subprocess': lambda: subprocess.run(['/bin/true']),
  'in a session': lambda: subprocess.run(['/bin/true'], start_new_session=True),
  'system': lambda: subprocess.getoutput('true'),
  'thread': thread,
}
ran = []
before = [start(name) for name in STARTS]
alone.stay()
print(json.dumps([before, [start(name) for name in STARTS], len(ran)]))
"""


@pytest.mark.skipif(
  platform.machine() not in ('x86_64', 'aarch64'),
  reason='a filter for two machines',
)
def test_no_process_can_be_started(tmp_path):
  """Whether or not Python tells of it; threads can."""
  done = subprocess.run(
    [sys.executable, '-c', _STAYS, alone.__file__], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  before, after, threads = json.loads(done.stdout)
  assert before == ['started'] * 6 and threads == 2
  assert after == ['PermissionError'] * 5 + ['started']


@pytest.mark.parametrize(
  'audited, may', [(None, True), ((), False), (('tb_frame a.py:f',), False)]
  + [((f'{event} a.py:f',), True) for event in ('os.fork', 'subprocess.Popen')]
)  # fmt: skip
def test_right_sources_that_start_processes_may(audited, may):
  assert alone.may_start(audited) == may


# Follows references, as no code under guards may, from all that can be imported, and
# from the classes below them. Frames are left out: they raise events.
_SEARCH = """
import builtins, gc, sys, types

PARTS = ('__main__', 'alone', 'guards', 'plugin', 'snapshot')
KINDS = ('Config', 'Session', 'PytestPluginManager', 'FixtureManager', 'SetupState')


def is_own(value):
  kind = type(value)
  if isinstance(value, types.FunctionType):
    return value.__globals__.get('__name__') in PARTS
  if kind is dict:  # the verifier's own builtins
    return '__build_class__' in value and value is not vars(builtins)
  of_pytest = kind.__module__.startswith('_pytest.') and kind.__name__ in KINDS
  return of_pytest or kind.__module__ in PARTS


def found():
  seen, paths = set(), []
  queue = [(m, n) for n, m in list(sys.modules.items())]
  for value, path in queue:
    if id(value) in seen or isinstance(value, types.FrameType | types.GeneratorType):
      continue
    seen.add(id(value))
    if is_own(value):
      paths.append(f'{path} > {value!r}'[-300:])
      continue
    inner = [r for r in gc.get_referents(value) if r is not queue and r is not seen]
    if isinstance(value, type):
      inner += type.__subclasses__(value)
    names = {id(v): k for k, v in value.items()} if type(value) is dict else {}
    queue += [(r, f'{path} > {names.get(id(r), type(r).__name__)}') for r in inner]
  return paths


def test_nothing_is_found():
  paths = found()
  assert not paths, paths


def test_a_searcher_finds(request):
  kept.append(request)
  assert any(path.startswith('tests.') or 'kept' in path for path in found())


kept = []
"""


def test_nothing_that_can_be_imported_leads_to_the_verifier(env, dataset):
  """Neither to objects of the harness, by which results could be forged, nor to those
  of pytest that know what tests expect. The second test shows that the search works."""
  tree = {**env.source.files, 'tests/test_search.py': _SEARCH.encode()}

  async def ran():
    try:
      return await environment.run(
        dataset, env.site, tree, 'run', roots=env.roots, files=['tests/test_search.py']
      )
    finally:
      await sandbox.shutdown()

  found = asyncio.run(ran())
  assert {t.partition('::')[2]: r['status'] for t, r in found.tests.items()} == {
    'test_nothing_is_found': 'PASSED',
    'test_a_searcher_finds': 'PASSED',
  }
