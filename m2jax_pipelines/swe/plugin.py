"""The pytest plugin of harness.py: sends a record per test, and one at the end.

It compares functions (snapshot.py) and reports audit events (guards.py), see
harness.py. Code under test could replace a function of pytest for one call, and take
its arguments. Therefore functions are compared after everything that ran such code,
before pytest continues: imports of tests, functions of tests and fixtures, and the
phases of a test. Nor does pytest get objects that run code later: exceptions of tests
are kept, and plain ones raised instead; what fixtures returned is dropped; garbage is
collected between tests.

`Profile` notes which functions each test calls.

Standard library and pytest only: the file is copied into each task.
"""

import _thread
import builtins
import gc
import os
import sys
import time
import types

# Functions defined below keep these builtins, whatever is replaced later.
__builtins__ = dict(vars(builtins))
CANARIES = """\
def test_{0}_equal():
  assert 1 == 2
def test_{0}_raise():
  raise ValueError
def test_{0}_pass():
  pass
"""
_IMPORT = '<import>'
_TOOL = 3  # of sys.monitoring; neither a debugger, nor coverage, nor a profiler
_collect, _count, _collects = gc.collect, gc.get_count, gc.isenabled
_GARBAGE = 20_000  # objects, until it is collected
_CANARY_RESULTS = {'equal': 'FAILED', 'raise': 'FAILED', 'pass': 'PASSED'}


class Plugin:
  """A pytest plugin that sends a record per test."""

  def __init__(self, send, canary, keep, snapshot=None):
    import pytest
    from _pytest import config, fixtures, python, runner

    self._send, self._canary, self._keep = send, canary, keep
    self._seen, self._tampered, self._raised = {}, [], set()
    self._canaries, self._audited, self._kept = {}, set(), []
    self._fixtures = False  # whether functions of fixtures ran for the present test
    self._seconds, self._import_s, self._checks = {}, 0.0, (0.0, 0.0)
    # Of now: the tree may replace those of `time` for as long as one call.
    self._clock, self._used = time.perf_counter, time.process_time
    self._sleep = time.sleep
    self._threads = _thread._count
    self.profile, self.found, self._timed = None, self._audited.add, True
    first = pytest.hookimpl(wrapper=True, tryfirst=True)
    for hook in self._observers():
      setattr(self, f'pytest_runtest_{hook.__name__}', first(hook))
    # Next to the function itself, before pytest does more that it may have changed.
    last = pytest.hookimpl(wrapper=True, trylast=True)
    self.pytest_pyfunc_call, self.pytest_fixture_setup = map(last, self._checkers())
    # The tree can import what is replaced: nothing of the plugin's may be found by it.
    checks = self._checking().__next__
    for request in (fixtures.TopRequest, fixtures.SubRequest):
      request.addfinalizer = _alone(_addfinalizer, request.addfinalizer, checks)
    importing = python.importtestmodule
    python.importtestmodule = _alone(_importtestmodule, importing, checks)
    manager = config.PytestPluginManager
    manager._importconftest = _alone(_importconftest, manager._importconftest, checks)
    # It writes to os.environ, whose methods are the tree's to replace.
    runner._update_current_test_var = {}.get
    self._snapshot = snapshot and snapshot()
    self._begun = self._used()

  def _times(self):
    """Seconds and CPU seconds since some moment, without those of comparisons."""
    return _minus((self._clock(), self._used()), self._checks)

  def _checkers(self):
    """Hooks that compare as soon as a test's or a fixture's function returns."""

    from _pytest.python import get_direct_param_fixture_func as parameter

    def call():
      try:
        return (yield)
      finally:
        started = self._times()
        self.check(python=False)
        self._checks = _sum(self._checks, _minus(self._times(), started))

    def setup(fixturedef):
      if fixturedef.func is parameter:  # pytest's own, of which a test has several
        return (yield)
      self._fixtures = True
      return (yield from call())

    return call, setup

  def _checking(self):
    """Compares at each step; its `__next__` does not lead to the plugin."""
    while True:
      self.check(python=False)
      yield

  def _observers(self):
    """Hooks that note which tests raise, before a report is made of it."""

    seconds, threads = self._seconds, self._threads

    from _pytest.assertion import util
    from _pytest.python import Function

    plain, stored = self._plain()

    def observe(item, unseen):
      """Compares if the test fails, or if code ran that `unseen` reports."""
      util._config = util._reprcompare = util._assertion_pass = None
      error, before = None, threads()
      started = self._times()
      try:
        result = yield
      except GeneratorExit:
        raise
      except BaseException as raised:
        self._kept.append(raised)
        error = plain(raised)
      self._wait(before)
      took = _minus(self._times(), started)
      seconds[item.nodeid] = _sum(seconds.get(item.nodeid, (0.0, 0.0)), took)
      failed = error is not None or stored(item)
      if failed:
        self._raised.add(item.nodeid)
      if failed or unseen():
        self.check(python=False)
      if error is not None:
        raise error
      return result

    def setup(item):
      self._fixtures = False

      def unseen():
        """A class of the tests is called; those of unittest are unittest's to call."""
        return type(item) is Function and item.cls is not None

      return (yield from observe(item, unseen))

    def call(item):
      return (yield from observe(item, lambda: type(item) is not Function))

    def teardown(item, nextitem):
      return (yield from observe(item, lambda: self._deleted(item, nextitem)))

    return setup, call, teardown

  def _deleted(self, item, nextitem):
    """Deletes what fixtures returned, and garbage; whether there may be any."""
    item.funcargs = {}
    if _count()[0] > _GARBAGE:
      _collect()
      return True
    return self._fixtures or nextitem is None or nextitem.parent is not item.parent

  def _plain(self):
    """Functions that replace a raised exception, and those that unittest has stored."""

    from unittest import SkipTest

    from _pytest import outcomes
    from _pytest._code import ExceptionInfo

    same = outcomes.Skipped, outcomes.XFailed, outcomes.Exit, KeyboardInterrupt

    def plain(error):
      kind = type(error)
      if kind in same:
        return kind()
      return SkipTest() if issubclass(kind, SkipTest) else AssertionError()

    def stored(item):
      found = getattr(item, '_excinfo', None)
      for at, info in enumerate(found or ()):
        self._kept.append(info)
        try:
          raise plain(info.value)
        except BaseException:
          found[at] = ExceptionInfo.from_current()
      return bool(found)

    return plain, stored

  def _wait(self, before):
    """Waits until no more threads run than `before`, or for a moment if time counts.

    Before Python 3.12 there is no audit event of a thread's start.
    """
    if not self._timed:
      return
    deadline = self._clock() + 0.5
    while self._threads() > before:
      if self._clock() > deadline:
        self.found('strict: threads left')
        return
      self._sleep(0.001)

  def audit(self, audited, strict):
    """Refuses events of guards.watch from now on, unless they are in `audited`."""
    if audited is None:
      return
    self._timed = strict
    audited, leave, send = frozenset(audited), os._exit, self._send

    def refuse(key):
      if key not in audited and (strict or not key.startswith('strict: ')):
        send({'end': -1, 'tampered': [key]})
        leave(0)

    self.found = refuse

  def pytest_sessionstart(self, session):
    """Nothing that can be imported leads to the session."""
    from _pytest import debugging
    from _pytest.mark import structures

    kept = debugging.pytestPDB
    kept._saved[:] = [(trace, None, None) for trace, *_ in kept._saved]
    kept._config = kept._pluginmanager = structures.MARK_GEN._config = None

  def pytest_collection_modifyitems(self, config, items):
    ours = [i for i in items if self._canary in i.nodeid]
    theirs = [i for i in items if self._canary not in i.nodeid]
    if self._keep is not None:
      theirs = [i for i in theirs if i.nodeid in self._keep]
    items[:] = [*ours[:1], *theirs, *ours[1:]]

  def pytest_collection_finish(self, session):
    self._import_s = self._used() - self._begun
    self.check(python=False)
    # They have results that tests expect, and the module of a test can be found.
    for item in session.items:
      for holder in filter(None, (getattr(item, 'function', None), item.cls)):
        if 'pytestmark' in vars(holder):
          del holder.pytestmark
    self._wait(0)

  def pytest_collectreport(self, report):
    if report.failed:
      why = str(report.longrepr).strip()[-400:]
      self._send({'test': report.nodeid, 'status': 'ERROR', 'why': why})

  def pytest_runtest_logstart(self, nodeid, location):
    if self.profile is not None:
      self.profile.start(nodeid)

  def pytest_runtest_logreport(self, report):
    status = self._seen.get(report.nodeid, 'PASSED')
    xfail = hasattr(report, 'wasxfail')
    if report.failed:
      status = 'FAILED' if report.when == 'call' else 'ERROR'
    elif report.skipped and status == 'PASSED':
      status = 'XFAIL' if xfail else 'SKIPPED'
    elif xfail and report.when == 'call':
      status = 'XPASS'
    self._seen[report.nodeid] = status

  def pytest_runtest_logfinish(self, nodeid, location):
    if self.profile is not None:
      self.profile.stop()
    status = self._seen.pop(nodeid, 'ERROR')
    took = self._seconds.pop(nodeid, (0.0, 0.0))
    if status == 'PASSED' and nodeid in self._raised:
      status = 'FAILED'
    if self._canary in nodeid:
      self._canaries[nodeid.rpartition('_')[2]] = status
    else:
      s, cpu_s = (round(t, 4) for t in took)
      self._send({'test': nodeid, 'status': status, 's': s, 'cpu_s': cpu_s})
    self.check()

  def check(self, python=True):
    """Compares the functions that decide with those at the start.

    A test may replace Python's own until it ends.
    """
    if _collects():
      self.found('gc.enable')
    if self._snapshot and len(self._tampered) < 8:
      self._tampered += self._snapshot.changes(python=python)[:8]

  def end(self, status):
    """Sends the last record."""
    record = {'end': status, 'tampered': sorted(set(self._tampered))}
    record['import_s'] = round(self._import_s, 4)
    record['cpu_s'] = round(self._used() - self._begun, 4)
    if self._canaries != _CANARY_RESULTS:
      record['tampered'].append(f'tests that must fail: {self._canaries}')
    if self._audited:
      record['audited'] = sorted(self._audited)
    if self.profile is not None:
      record['calls'] = self.profile.found()
    self._send(record)


def _alone(function, *defaults):
  """A function without globals or builtins; `defaults` cannot be replaced unseen."""
  nothing = {'__builtins__': {}}
  return types.FunctionType(function.__code__, nothing, function.__name__, defaults)


def _addfinalizer(request, finalizer, add, checks):
  """Adds a finalizer, after which `checks` is called."""

  def ended():
    try:
      return finalizer()
    finally:
      checks()

  add(request, ended)


def _importtestmodule(path, config, importing, checks):
  """Imports a module of tests; then `checks` is called."""
  try:
    return importing(path, config)
  finally:
    checks()


def _importconftest(
  self, path, mode, root, importing, checks, *, consider_namespace_packages
):
  """Imports a conftest.py; then `checks` is called."""
  try:
    return importing(
      self, path, mode, root, consider_namespace_packages=consider_namespace_packages
    )
  finally:
    checks()


def _sum(a, b):
  return a[0] + b[0], a[1] + b[1]


def _minus(a, b):
  return a[0] - b[0], a[1] - b[1]


class Profile:
  """Which functions of the tree each test calls, by file and first line.

  From Python 3.12 a function is reported once for each test; before, on each call.
  """

  def __init__(self, tree):
    self._tree = tree.rstrip('/') + '/'
    self._tests = {}
    monitoring = self._monitoring = getattr(sys, 'monitoring', None)
    self.start(_IMPORT)
    if monitoring is None:
      sys.settrace(self._called)
      return
    events = monitoring.events.PY_START, monitoring.events.PY_RESUME
    monitoring.use_tool_id(_TOOL, 'm2jax')
    for event in events:
      monitoring.register_callback(_TOOL, event, self._started)
    monitoring.set_events(_TOOL, sum(events))

  def _called(self, frame, event, argument):
    self._now.add(frame.f_code)

  def _started(self, code, offset):
    self._now.add(code)
    return self._monitoring.DISABLE

  def start(self, test):
    """Calls belong to `test` from here."""
    self._now = self._tests.setdefault(test, set())
    if self._monitoring:
      self._monitoring.restart_events()

  def stop(self):
    """Calls belong to no test, which is imports."""
    self.start(_IMPORT)

  def found(self):
    """{path: {first line: [tests]}}."""
    if self._monitoring:
      self._monitoring.free_tool_id(_TOOL)
    else:
      sys.settrace(None)
    calls = {}
    for test, codes in self._tests.items():
      for code in codes:
        if code.co_filename.startswith(self._tree):
          path = code.co_filename[len(self._tree) :]
          lines = calls.setdefault(path, {})
          tests = lines.setdefault(code.co_firstlineno, [])
          if test not in tests:
            tests.append(test)
    return calls
