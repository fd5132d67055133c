"""Functions and classes that decide on a result, compared with those at the start.

They belong to pytest, to what it calls with its own objects, to builtins and time; see
harness.py. Code under test can replace them, or values in their closures, without an
audit event.

Standard library only: the file is copied into each task.
"""

import builtins
import itertools
import operator
import sys
import time
import types

# Functions defined below keep these builtins, whatever is replaced later.
__builtins__ = dict(vars(builtins))
_Module, _Function = types.ModuleType, types.FunctionType
_call, _is, _chain = operator.call, operator.is_, itertools.chain
_item, _order = operator.itemgetter, operator.attrgetter('__mro__')
_inner, _EMPTY = operator.attrgetter('cell_contents'), object()
_GUARDED = frozenset(
  # The last five have functions to which pytest gives its own objects.
  'pytest _pytest pluggy unittest abc contextlib functools inspect enum'.split()
)
_LEGACY = '_getini_unknown_type'  # that pytest's own plugin legacypath replaces
# What Python and that plugin add to modules and classes later.
_ADDED = frozenset(
  '__annotations__ __annotate__ __annotate_func__ __annotations_cache__ '
  '__abstractmethods__ __warningregistry__ _abc_impl __doc__ '
  '_pytest_diamond_inheritance_warning_shown '
  'makedir inifile invocation_dir rootdir fspath startdir testdir'.split()
)


class Snapshot:
  """Functions and classes of the modules that decide, as they are now."""

  def __init__(self):
    found = []
    for name, module in sorted(sys.modules.items()):
      if name.partition('.')[0] in _GUARDED and module is not None:
        found += _holders(module, name)
    inside, seen = [], set()
    for holder in found:
      for value in holder.kept.values():
        inside += _inside(value, seen)
    self._pytest = _Holders([*found, *inside])
    self._python = _Holders([_Holder(m, additions=False) for m in (builtins, time)])

  def changes(self, *, python=True):
    """Names that were replaced or added; builtins and time only if `python`."""
    return self._pytest.changes() + (self._python.changes() if python else [])


class _Holders:
  """Modules and classes, which are compared a few times for every test.

  Nearly always nothing has changed, so that this is found out by loops in C.
  """

  def __init__(self, holders):
    self._holders = holders
    self._classes = [h.holder for h in holders if h.order is not None]
    self._orders = [h.order for h in holders if h.order is not None]
    self._nows = [h.now for h in holders]
    self._cells = [cell for h in holders for cell in h.cells]
    self._contents = [content for h in holders for content in h.contents]
    self._learn()

  def changes(self):
    """Names that were replaced or added."""
    if self._same():
      return []
    found = [change for holder in self._holders for change in holder.changes()]
    if not found:
      self._learn()  # what may be added
    return found

  def _learn(self):
    names = [h.names() for h in self._holders]
    # Twice the first: of one name, itemgetter would give no tuple.
    self._getters = [_item(*n, n[0]) for n in names]
    self._counts = list(map(len, self._nows))
    self._values = [*self._found()]

  def _found(self):
    return _chain.from_iterable(map(_call, self._getters, self._nows))

  def _same(self):
    try:
      return (
        list(map(len, self._nows)) == self._counts
        and all(map(_is, map(_order, self._classes), self._orders))
        and all(map(_is, self._found(), self._values))
        and all(map(_is, map(_inner, self._cells), self._contents))
      )
    except (KeyError, ValueError):  # a name or the content of a cell is gone
      return False


class _Holder:
  """A module or class, as it is now."""

  cells = contents = ()

  def __init__(self, holder, additions=True):
    self.holder, self.now = holder, vars(holder)  # which follows later changes
    self.kept = {k: v for k, v in self.now.items() if _decides(v) and k != _LEGACY}
    self._keys = frozenset(self.now)
    self._additions = additions
    self.order = getattr(holder, '__mro__', None)

  def names(self):
    """Names of what must stay, and of allowed additions."""
    added = (k for k in self.now if k not in self._keys)
    return [*self.kept, *added] or [next(iter(self.now))]

  def changes(self):
    """Names that were replaced or added."""
    now, name = self.now, getattr(self.holder, '__name__', self.holder)
    found = [f'{name}.{k}' for k, v in self.kept.items() if now.get(k) is not v]
    if self._additions and len(now) != len(self._keys):
      found += [
        f'{name}.{k}'
        for k, v in list(now.items())
        if k not in self._keys and k not in _ADDED and type(v) is not _Module
      ]
    if self.order is not None and self.holder.__mro__ is not self.order:
      found.append(f'{name}.__bases__')
    return found


class _Inside:
  """What a function uses without raising an event: its variables and keyword
  defaults."""

  order = None

  def __init__(self, function):
    # Every holder has a name, which `_Holders` looks up.
    self.holder, self.now = function, function.__kwdefaults__ or {'': None}
    self._defaults = dict(self.now)
    self.cells = [c for c in function.__closure__ or () if _held(c) is not _EMPTY]
    self.contents = [*map(_inner, self.cells)]

  def names(self):
    """Names of keyword defaults."""
    return [*self._defaults]

  def changes(self):
    """The function's name, if anything of it was replaced."""
    same = (
      len(self.now) == len(self._defaults)
      and all(self.now.get(k, self) is v for k, v in self._defaults.items())
      and all(map(_is, map(_held, self.cells), self.contents))
    )
    return [] if same else [f'{self.holder.__module__}.{self.holder.__qualname__}']


def _held(cell):
  """What a variable of a closure is; _EMPTY if it is nothing yet or no longer."""
  try:
    return cell.cell_contents
  except ValueError:
    return _EMPTY


def _inside(value, seen):
  """The functions that a function, method or property is or leads to."""
  kind = type(value)
  if kind is property:
    inner = [value.fget, value.fset, value.fdel]
  elif kind in (staticmethod, classmethod):
    inner = [value.__func__]
  elif kind is _Function and id(value) not in seen:
    seen.add(id(value))
    if value.__closure__ or value.__kwdefaults__:
      found = _Inside(value)
      yield found
      inner = found.contents
    else:
      return
  else:
    return
  for one in inner:
    yield from _inside(one, seen)


def _holders(holder, module):
  """Holders of a module or class and of the classes in it."""
  found = _Holder(holder)
  yield found
  for value in found.kept.values():
    if isinstance(value, type) and value.__module__ == module and value is not holder:
      yield from _holders(value, module)


def _decides(value):
  return callable(value) or isinstance(
    value, property | staticmethod | classmethod | types.ModuleType
  )
