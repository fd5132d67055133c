"""Guards of a process that tests share with the code they test; see harness.py.

`watch` is an audit hook (PEP 578), which Python code can neither see nor remove. Each
way to another function's variables begins with a frame or with all objects of the
process, and each of these raises an audit event: `sys._getframe`, `tb_frame`,
`gi_frame`, `gc.get_objects`, …. The innermost frame that is not of the standard library
tells on whose behalf: pytest may; tests and the code under test may only what they do
with the right sources (`audited`), as far as function and place are the same.

`Snapshot` finds functions and classes of pytest, pluggy, unittest, builtins and time
that were replaced.

Standard library only: the file is copied into each task.
"""

import builtins
import os
import sys
import time
import types

_EVENTS = frozenset(
  'sys._getframe sys._current_frames sys._current_exceptions sys.settrace '
  'sys.setprofile sys.monitoring.register_callback sys.addaudithook gc.get_objects '
  'gc.get_referrers gc.get_referents code.__new__ marshal.loads os.kill os.killpg '
  'os.fork os.forkpty os.posix_spawn os.exec os.system subprocess.Popen '
  '_thread.start_new_thread _thread.start_joinable_thread'.split()
)
_READ = frozenset(('tb_frame', 'gi_frame', 'cr_frame', 'ag_frame'))
# What tests that an agent writes may not do besides, nor code whose time is measured.
STRICT = 'strict: '
_CODE = frozenset(('__code__', 'gi_code', 'cr_code', 'ag_code'))
_WRITES = frozenset('os.mkdir os.link os.symlink os.rename os.truncate'.split())
_WATCHED = _EVENTS | _WRITES | {'object.__setattr__', 'import', 'compile', 'open'}
_SET = frozenset(('__code__', '__defaults__', '__kwdefaults__', '__bases__'))
_IMPORTS = frozenset(('ctypes', '_ctypes', '_testcapi', '_testinternalcapi', 'cffi'))
# Functions that ask for frames or code and hand none to anybody: where → names.
_HARMLESS = {
  'collections/__init__.py': ('namedtuple',),
  'typing.py': ('_caller', '_allow_reckless_class_checks'),
  'enum.py': ('_create_',),
  'traceback.py': ('clear_frames',),
  '<frozen importlib._bootstrap_external>': ('_compile_bytecode',),
}
_GUARDED = ('pytest', '_pytest', 'pluggy', 'unittest')
_LEGACY = '_getini_unknown_type'  # that pytest's own plugin legacypath replaces
# What Python and that plugin add to modules and classes later.
_ADDED = frozenset(
  '__annotations__ __annotate__ __annotate_func__ __annotations_cache__ '
  '__abstractmethods__ __warningregistry__ _abc_impl __doc__ '
  '_pytest_diamond_inheritance_warning_shown '
  'makedir inifile invocation_dir rootdir fspath startdir testdir'.split()
)


def watch(trusted, tree, found):
  """Calls `found(key)` before each event that neither pytest nor Python needs.

  Args:
    trusted: directories and files of pytest and of the harness.
    tree: directory of tests and of the code under test.
    found: gets 'event file:function'; must not return to refuse.
  """
  library = os.path.dirname(os.__file__) + '/'
  getframe, own, describe = sys._getframe, [], _described

  def hook(event, arguments):
    if event == 'sys._getframe' and arguments and arguments[0].f_code is own[0]:
      return
    if event == 'object.__getattr__':
      if arguments[1] not in _READ and arguments[1] not in _CODE:
        return  # above all f_code, which is read below
    elif event not in _WATCHED and not event.startswith('ctypes.'):
      return
    inner = getframe(0).f_back
    detail = describe(event, arguments, tree, inner)
    if not detail or inner is not None and inner.f_code is own[0]:
      return
    frame = inner
    while frame is not None:
      name = frame.f_code.co_filename
      if name.startswith(trusted):
        return
      if not name.startswith((library, '<frozen ')):
        break
      frame = frame.f_back
    else:
      return  # the interpreter itself
    code = inner.f_code
    place = code.co_filename.removeprefix(library).removeprefix(tree)
    if code.co_name not in _HARMLESS.get(place, ()):
      found(f'{detail} {place}:{code.co_qualname}')

  own.append(hook.__code__)
  sys.addaudithook(hook)


def _described(event, arguments, tree, frame):
  """What an audit event does, in words; '' if it may be done."""
  if event in _EVENTS:
    return event
  if event in _WRITES:
    return f'{STRICT}{event}'
  if event == 'object.__getattr__':
    name = arguments[1]
    return name if name in _READ else f'{STRICT}{name}' if name in _CODE else ''
  if event == 'object.__setattr__':
    return f'set {arguments[1]}' if arguments[1] in _SET else ''
  if event == 'import':
    return f'import {arguments[0]}' if arguments[0] in _IMPORTS else ''
  if event == 'compile':
    # Code that pretends to be of a file would count as that file's.
    return 'compile with a file name' if _pretends(arguments[1], frame) else ''
  if event == 'open':
    return _opens(arguments, tree, frame)
  return 'ctypes'


def _opens(arguments, tree, frame):
  path, mode, flags = arguments
  if isinstance(path, str) and path.startswith('/proc/'):
    return 'open /proc'
  writes = (
    flags & (os.O_WRONLY | os.O_RDWR) if mode is None else set(mode) & set('wax+')
  )
  if writes:
    return f'{STRICT}open to write'
  if not isinstance(path, str) or not path.startswith(tree):
    return ''
  callers = []
  while frame is not None and len(callers) < 3:
    callers.append((frame.f_code.co_filename[:17], frame.f_code.co_name))
    frame = frame.f_back
  imports = [('<frozen importlib', n) for n in ('get_data', 'get_code', 'exec_module')]
  return '' if callers == imports else f'{STRICT}open a file of the tree'


def _pretends(name, frame):
  if isinstance(name, bytes):
    name = os.fsdecode(name)
  if not isinstance(name, str) or name.startswith('<') and name[:8] != '<frozen ':
    return False
  return frame is not None and not frame.f_code.co_filename.startswith('<frozen import')


class Snapshot:
  """Functions and classes of the modules that decide, as they are now."""

  def __init__(self):
    self._pytest, self._python = [], []
    for name, module in sorted(sys.modules.items()):
      if name.partition('.')[0] in _GUARDED and module is not None:
        self._pytest += _holders(module, name)
    for module in (builtins, time):
      kept = {k: v for k, v in vars(module).items() if _decides(v)}
      self._python.append((module, kept, None, None))

  def changes(self, *, python=True):
    """Names that were replaced or added; builtins and time only if `python`."""
    found = []
    for holder, kept, keys, order in [*self._pytest, *(self._python if python else ())]:
      now = vars(holder)
      name = getattr(holder, '__name__', holder)
      found += [f'{name}.{k}' for k, v in kept.items() if now.get(k) is not v]
      if keys is not None and len(now) != len(keys):
        found += [
          f'{name}.{k}'
          for k, v in list(now.items())
          if k not in keys and k not in _ADDED and not isinstance(v, types.ModuleType)
        ]
      if order is not None and holder.__mro__ is not order:
        found.append(f'{name}.__bases__')
    return found


def _holders(holder, module):
  """(module or class, its functions and classes, all its keys, order of bases)."""
  kept = {k: v for k, v in vars(holder).items() if _decides(v) and k != _LEGACY}
  yield holder, kept, frozenset(vars(holder)), getattr(holder, '__mro__', None)
  for value in list(kept.values()):
    if isinstance(value, type) and value.__module__ == module and value is not holder:
      yield from _holders(value, module)


def _decides(value):
  return callable(value) or isinstance(
    value, property | staticmethod | classmethod | types.ModuleType
  )
