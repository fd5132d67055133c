"""Guards of a process that tests share with the code they test; see harness.py.

`watch` is an audit hook (PEP 578), which Python code can neither see nor remove. Each
way to another function's variables begins with a frame, with all objects of the process
or with its memory, and each of these raises an audit event: `sys._getframe`,
`tb_frame`, `gi_frame`, `gc.get_objects`, `open`, …. pytest may raise them while it runs
no other code. Tests, the code under test, and pytest on their behalf may raise only the
events that they raise with the right sources (`audited`), from the same function and
place.

A file is known by its device and inode, so that links, relative paths, other types of
paths and directory descriptors lead to the same answer.

Standard library only: the file is copied into each task.
"""

import builtins
import importlib.machinery
import os
import sys
import types

# Functions defined below keep these builtins, whatever is replaced later.
__builtins__ = dict(vars(builtins))
_stat, _listdir, _decode = os.stat, os.listdir, os.fsdecode
_open, _read, _close = os.open, os.read, os.close
_O_READ, _O_WRITES = os.O_RDONLY, os.O_WRONLY | os.O_RDWR
_Traceback = types.TracebackType

_FRAMES = frozenset(
  'sys._getframe sys.settrace sys.setprofile sys.monitoring.register_callback'.split()
)
# What pytest does not need either.
_EVENTS = frozenset(
  'sys._current_frames sys._current_exceptions sys.addaudithook gc.get_objects '
  'gc.get_referrers gc.get_referents code.__new__ marshal.loads os.kill os.killpg '
  'os.fork os.forkpty os.posix_spawn os.exec os.system subprocess.Popen '
  '_thread.start_new_thread _thread.start_joinable_thread '
  # An interpreter of its own has no hook; a library's code raises no events.
  'cpython.PyInterpreterState_New sqlite3.load_extension'.split()
)
_READ = frozenset(('tb_frame', 'gi_frame', 'cr_frame', 'ag_frame'))
# What tests that an agent writes may not do besides, nor code whose time is measured.
STRICT = 'strict: '
_CODE = frozenset(('__code__', 'gi_code', 'cr_code', 'ag_code'))
_WRITES = frozenset('os.mkdir os.link os.symlink os.rename os.truncate'.split())
# Of these, none on the tree: its owner could make it writable.
_CHANGES = frozenset('os.chmod os.remove os.rename os.rmdir os.truncate'.split())
_OTHERS = frozenset('object.__setattr__ import compile open'.split())
_WATCHED = _EVENTS | _FRAMES | _WRITES | _CHANGES | _OTHERS
_SET = frozenset(('__code__', '__defaults__', '__kwdefaults__', '__bases__'))
# Modules that reach memory, or read files and start processes without an event.
_IMPORTS = frozenset(
  'ctypes _ctypes _testcapi _testinternalcapi cffi _cffi_backend readline _tkinter '
  '_interpreters _xxsubinterpreters'.split()
)
_TREE, _TEST = f'{STRICT}open a file of the tree', 'open a test'
# Names by which Python code opens a file itself.
_OPENS = frozenset(
  ('open', '_open', 'open_code', '_open_code', '_builtin_open', 'FileIO')
)
# Functions that do this to nobody else: (what, where, function).
_HARMLESS = {
  ('tb_frame', 'traceback.py', 'clear_frames'),
  ('set __defaults__', 'collections/__init__.py', 'namedtuple'),
}
if sys.version_info < (3, 12):  # later they ask for a module's name instead
  _HARMLESS |= {
    ('sys._getframe', 'collections/__init__.py', 'namedtuple'),
    ('sys._getframe', 'typing.py', '_caller'),
    ('sys._getframe', 'typing.py', '_allow_reckless_class_checks'),
    ('sys._getframe', 'enum.py', '_create_'),
  }


def watch(trusted, tree, tests, found):
  """Calls `found(key)` before each event that neither pytest nor Python needs.

  Compiled module files are not read from here on, since they themselves name the file
  that their code is from.

  Args:
    trusted: directories and files of pytest and of the harness, which called this.
    tree: directory of tests and of the code under test.
    tests: paths in it of the tests that run, which tell what is expected.
    found: gets 'event file:function'; must not return to refuse.

  Returns:
    An object of the hook's, to be hidden.
  """
  library = os.path.dirname(os.__file__) + '/'
  known = (library, '<frozen ', *trusted)
  getframe, asks, files = sys._getframe, '', _Files(tree, tests, known)
  sys.dont_write_bytecode, sys.pycache_prefix = True, os.devnull + '/none'

  def hook(event, arguments):
    nonlocal asks
    if asks == event:  # this hook's own call, and no other
      asks = ''
      return
    if event == 'object.__getattr__':
      if arguments[1] not in _READ and arguments[1] not in _CODE:
        return  # above all f_code, which is read below
    elif event not in _WATCHED and not event.startswith('ctypes.'):
      return
    asks = 'sys._getframe'
    inner = getframe(0).f_back
    if event == 'object.__getattr__' and arguments[1] in _CODE:
      asks = event
      arguments = getattr(*arguments), arguments[1]
    detail, pytest_may = files.describe(event, arguments, inner)
    if not detail:
      return
    frame, last = inner, ''
    while frame is not None:
      last = frame.f_code.co_filename
      if not last.startswith(known):
        break
      frame = frame.f_back
    if frame is None and pytest_may and last.startswith(trusted):
      return
    if inner is None:
      found(f'{detail} ?:?')
      return
    code = inner.f_code
    place = code.co_filename.removeprefix(library).removeprefix(tree)
    if _harmless(detail, place, inner):
      return
    key = f'{place}:{code.co_qualname}'
    if frame is not None and code.co_filename.startswith(trusted):
      place = frame.f_code.co_filename.removeprefix(tree)
      key = f'{place}:{frame.f_code.co_qualname}>{key}'
    found(f'{detail} {key}')

  sys.addaudithook(hook)
  return files


def _harmless(detail, place, frame):
  if (detail, place, frame.f_code.co_name) not in _HARMLESS:
    return False
  return detail != 'tb_frame' or type(frame.f_locals.get('tb')) is _Traceback


class _Files:
  """What events do, in words: files above all."""

  def __init__(self, tree, tests, known):
    self._tree, self._known, self._own = tree, known, _content.__code__
    self._test_paths = {os.path.join(tree, path) for path in tests}
    self._tests = {_key(os.stat(path)) for path in self._test_paths}
    self._of_tree, self._kept, self._proc = set(), set(), None
    above = os.path.realpath(tree)
    while above != '/':
      self._kept.add(_key(os.stat(above)))
      above = os.path.dirname(above)
    for directory, _, names in os.walk(tree):
      self._kept.add(_key(os.stat(directory)))
      for name in names:
        self._of_tree.add(_key(os.lstat(os.path.join(directory, name))))
    self._kept |= self._of_tree
    if os.path.isdir('/proc/self'):
      self._proc = os.stat('/proc/self').st_dev
    loader = importlib.machinery.SourceFileLoader
    self._loader = loader
    self._methods = [(c, dict(vars(c))) for c in loader.__mro__[:-1]]

  def describe(self, event, arguments, frame):
    """(words or '', whether pytest may do it for its own sake)."""
    if event in _EVENTS:
      return event, False
    if event in _FRAMES:
      return event, _names(frame, event.rpartition('.')[2])
    if event in _CHANGES and any(map(self._is_kept, arguments[:2])):
      return 'change the tree', False
    if event in _WRITES or event in _CHANGES:
      return (f'{STRICT}{event}' if event in _WRITES else ''), True
    if event == 'object.__getattr__':
      return self._reads(*arguments), _names(frame, arguments[1])
    if event == 'object.__setattr__':
      name = arguments[1]
      return (f'set {name}', _names(frame, name)) if name in _SET else ('', True)
    if event == 'import':
      return self._imports(arguments), False
    if event == 'compile':
      # Code that pretends to be of a file would count as that file's.
      return ('compile with a file name' if self._pretends(arguments) else ''), False
    if event == 'open':
      return self._opens(arguments, frame)
    return 'ctypes', False

  def _reads(self, value, name):
    """Frames; code only where a test is not to be read, or where it is a test's."""
    if name in _READ:
      return name
    return 'read a test' if value.co_filename in self._test_paths else STRICT + name

  def _imports(self, arguments):
    """Those of `_IMPORTS`, and compiled ones that are not installed."""
    name, path = arguments[:2]
    if str.rpartition(name, '.')[2] in _IMPORTS:
      return f'import {str.rpartition(name, ".")[2]}'
    if path is None:
      return ''
    stem = str.partition(str.rpartition(path, '/')[2], '.')[0]
    if stem in _IMPORTS:
      return f'import {stem}'
    installed = str.startswith(path, self._known) and '/..' not in path
    return '' if installed else 'import a compiled module'

  def _pretends(self, arguments):
    source, name = arguments
    if type(name) is bytes:
      name = _decode(name)
    if type(name) is not str:
      return name is not None
    if name[:1] == '<':
      return name[:8] == '<frozen '
    if not name.startswith((self._tree, *self._known)):
      return True
    data = _content(name)
    return not (
      type(source) is bytes
      and source == data
      or type(source) is str
      and source.encode('utf-8', 'replace') == data
    )

  def _opens(self, arguments, frame):
    path, mode, flags = arguments
    if frame is not None and frame.f_code is self._own:
      if frame.f_locals.get('name') is path:
        return '', True
    path = _plain(path)
    if path is None:
      return 'open an object', False
    statuses = _statuses(path, mode is None)
    if any(s.st_dev == self._proc for s in statuses):
      return 'open /proc', False
    if mode is None:
      writes = flags & _O_WRITES
    else:
      writes = set(mode) & set('wax+')
    keys = {_key(s) for s in statuses}
    of_tree = keys & self._of_tree
    if writes:
      return ('change the tree', False) if of_tree else (f'{STRICT}open to write', True)
    if not of_tree:
      return '', True
    if self._is_import(frame):
      return '', True
    pytest_may = frame is not None and bool(_OPENS & set(frame.f_code.co_names))
    return (_TEST if keys & self._tests else _TREE), pytest_may

  def _is_kept(self, path):
    path = _plain(path)
    statuses = () if path is None else _statuses(path, True)
    return any(_key(s) in self._kept for s in statuses)

  def _is_import(self, frame):
    """Whether Python reads a module, by a loader whose methods are its own."""
    for name in ('get_data', 'get_code', 'exec_module'):
      if frame is None or frame.f_code.co_name != name:
        return False
      if frame.f_code.co_filename[:17] != '<frozen importlib':
        return False
      if type(frame.f_locals.get('self')) is not self._loader:
        return False
      frame = frame.f_back
    return all(
      vars(kind).get(name) is value
      for kind, methods in self._methods
      for name, value in methods.items()
    )


def _names(frame, name):
  """Whether a frame's own code names what is done; a C function that it was made to
  call, as by `str` of an object, is not."""
  return frame is not None and name in frame.f_code.co_names


def _key(status):
  return status.st_dev, status.st_ino


def _plain(path):
  """A path as the system takes it, whatever methods its class has; or None."""
  for kind, plain in ((str, str.__str__), (int, int.__int__)):
    if issubclass(type(path), kind):
      return plain(path)
  return bytes.__getitem__(path, slice(None)) if issubclass(type(path), bytes) else None


def _statuses(path, low_level):
  """Statuses of all files that a path may mean: os.open takes any open directory."""
  places = [None]
  if low_level and type(path) is not int and path[:1] not in ('/', b'/'):
    places += map(int, _descriptors())
  found = []
  for directory in places:
    try:
      found.append(_stat(path, dir_fd=directory))  # of a number: of the open file
    except (OSError, ValueError):
      continue
  return found


def _descriptors():
  try:
    return _listdir('/dev/fd')
  except OSError:
    return range(256)


def _content(name):
  """Bytes of a file; None if it cannot be read."""
  try:
    fd = _open(name, _O_READ)
  except (OSError, ValueError):
    return None
  try:
    parts = []
    while part := _read(fd, 1 << 20):
      parts.append(part)
    return b''.join(parts)
  finally:
    _close(fd)
