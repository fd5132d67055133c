"""Runs tests of a tree and reports each result; standard library and pytest only.

A request is a JSON line on standard input; results are lines `NONCE JSON` on standard
output. The nonce is only in the request: what tested code prints counts for nothing,
and the file descriptors that it sees as 1 and 2 are closed. The code under test shares
this process, as under every pytest, so that it is looked for interference:

- two tests of random names that must fail and one that must pass are among the tests;
- functions and classes of pytest, unittest, builtins, … stay the same (snapshot.py),
  compared when the tests are collected, when a test function returns, and at its end;
- a test passes only if its function returned, whatever pytest's report says of it;
- frames and other ways to the caller's variables raise audit events (guards.py);
- where time is measured, threads count towards that of their test; one that stays is
  reported like these events;
- results end with one record of pytest's exit status, which must be that of failures.

None of the harness's objects can be imported, and records are encoded in C by what was
there before the tree was imported. Its functions keep the builtins of then, its memory
is closed to /proc (PR_SET_DUMPABLE), and no path of the verifier's files is in it.

Start it with -s -S -P -B and a clean environment: no site, .pth files or bytecode.
Without arguments it serves one request. As `serve SITE` it says "ready" and serves
many, each in a process that is forked when pytest, and nothing of a tree, is imported.

Requests: {"mode": "run" | "profile", "nonce", "tree", "site", "roots", "files", "keep",
"audited"}; without "audited", events of guards.py are reported and not refused;
or {"mode": "screen", …, "mutants": [{"path", "text", "files", "keep", "limit_s"}]}.
"""

import _thread
import builtins
import contextlib
import gc
import importlib.util
import json
import json.encoder
import os
import secrets
import select
import signal
import sys
import tempfile
import time
import types

# Functions defined below keep these builtins, whatever is replaced later.
__builtins__ = dict(vars(builtins))
_PR_SET_DUMPABLE = 4
_CANARIES = """\
def test_{0}_equal():
  assert 1 == 2
def test_{0}_raise():
  raise ValueError
def test_{0}_pass():
  pass
"""
_CANARY_RESULTS = {'equal': 'FAILED', 'raise': 'FAILED', 'pass': 'PASSED'}


def main():
  """Serves one request, or one of many."""
  guards, snapshot = _beside('guards'), _beside('snapshot')
  if sys.argv[1:2] == ['serve']:
    request, results = _served(sys.argv[2])
  else:
    request, results = json.loads(sys.stdin.readline()), os.dup(1)
  out = os.fdopen(results, 'w', buffering=1)
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  nonce = request.pop('nonce')

  write, encode = out.write, _encoder()

  def send(record):
    write(f'{nonce} {"".join(encode(record, 0))}\n')

  for name in list(os.environ):
    if name.startswith(('PYTEST', 'M2JAX', 'PYTHON')):
      del os.environ[name]
  sys.argv, sys.orig_argv = ['pytest'], ['pytest']
  _close_memory()
  _import_pytest(request['site'])
  hidden = sys.modules['__main__']
  sys.modules['__main__'] = types.ModuleType('__main__')
  if request['mode'] == 'screen':
    for number, mutant in enumerate(request['mutants']):
      _screen(request, number, mutant, send, guards, snapshot)
    return hidden
  _run(request, send, guards, snapshot)


def _served(site):
  """Returns each request in a process of its own, with where its results go.

  The answer to a request is a line {"output": its results, "late": whether it took
  longer than its `limit_s`, "left": whether processes that it left did not end}, sent
  when no process of it is left.
  """
  processes = _beside('processes')
  processes.adopt()
  _close_memory()
  _import_pytest(site)
  gc.freeze()
  print('ready', flush=True)
  for line in sys.stdin:
    request = json.loads(line)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
      os.close(read)
      os.setsid()
      return request, write
    os.close(write)
    output, late = _output(read, request['limit_s'])
    with contextlib.suppress(ProcessLookupError):
      os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    answer = {'output': output.decode(errors='replace'), 'late': late, 'left': False}
    try:
      processes.end_children()
    except TimeoutError:
      answer['left'] = True
    print(json.dumps(answer), flush=True)
  sys.exit()


def _output(read, limit_s):
  """(all that is written to a pipe, whether that takes longer than `limit_s`)."""
  deadline, parts = time.monotonic() + limit_s, []
  with contextlib.closing(os.fdopen(read, 'rb', buffering=0)) as file:
    while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
      part = file.read(1 << 20)
      if not part:
        return b''.join(parts), False
      parts.append(part)
  return b''.join(parts), True


def _close_memory():
  """Gives /proc/self to root, and leaves no module that reaches memory."""
  with contextlib.suppress(ImportError, AttributeError, OSError):
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
  for name in [n for n in sys.modules if n.partition('.')[0] in ('ctypes', '_ctypes')]:
    del sys.modules[name]


def _encoder():
  """The encoder of records, which looks up nothing that could be replaced."""
  c = json.encoder
  text = c.c_encode_basestring_ascii
  return c.c_make_encoder(None, None, text, None, ': ', ', ', False, False, True)


def _import_pytest(site):
  """Imports all of it before anything of the tree can be imported."""
  if site not in sys.path:
    sys.path.insert(0, site)
  import _pytest.config

  for name in _pytest.config.default_plugins:
    importlib.import_module(f'_pytest.{name}')


def _beside(name):
  """A module beside this file, which is in no path and not in sys.modules."""
  path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f'{name}.py')
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _run(request, send, guards, snapshot):
  """Runs pytest in this process."""
  import pytest

  tree = request['tree']
  os.chdir(tree)
  sys.path[:0] = [os.path.join(tree, root) for root in request['roots']]
  place = tempfile.mkdtemp()
  name = 'c' + secrets.token_hex(8)
  canary = os.path.join(place, f'test_{name}.py')
  with open(canary, 'w') as file:
    file.write(_CANARIES.format(name))
  ini = os.path.join(place, 'pytest.ini')
  with open(ini, 'w') as file:
    file.write('[pytest]\n')
  keep = request.get('keep')
  plugin = _Plugin(send, name, None if keep is None else set(keep), snapshot.Snapshot())
  trusted = f'{request["site"]}/', __file__, guards.__file__, snapshot.__file__
  plugin.audit(request.get('audited'), request.get('strict', False))
  guards.watch(trusted, f'{tree}/', request['files'], plugin.found)
  if request['mode'] == 'profile':
    plugin.profile = _Profile(tree)
  arguments = ['-c', ini, '--rootdir', tree, '--confcutdir', tree]
  arguments += ['--basetemp', f'{place}/tmp']
  arguments += ['-p', 'no:cacheprovider', '-p', 'no:junitxml', '--tb=no', '-q']
  arguments += ['--assert=plain']  # rewriting leaves the session where code finds it
  arguments += ['--continue-on-collection-errors', *request.get('options', ())]
  with contextlib.suppress(KeyboardInterrupt):
    status = pytest.main([*arguments, canary, *request['files']], plugins=[plugin])
    plugin.check()
    plugin.end(int(status))
  os._exit(0)  # no atexit functions of the tree


def _screen(request, number, mutant, send, guards, snapshot):
  """Runs the tests of one mutant in a forked process."""
  path = os.path.join(request['tree'], mutant['path'])
  with open(path, encoding='utf-8') as file:
    original = file.read()
  with open(path, 'w', encoding='utf-8') as file:
    file.write(mutant['text'])
  pid = os.fork()
  if not pid:
    try:
      os.setpgid(0, 0)
      _run(
        {**request, **mutant, 'mode': 'run'},
        lambda record: send({'mutant': number, **record}),
        guards,
        snapshot,
      )
    finally:
      os._exit(1)
  deadline = time.monotonic() + mutant['limit_s']
  while os.waitpid(pid, os.WNOHANG)[0] == 0:
    if time.monotonic() > deadline:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      send({'mutant': number, 'timeout': True})
      break
    time.sleep(0.005)
  with open(path, 'w', encoding='utf-8') as file:
    file.write(original)


class _Plugin:
  """A pytest plugin that sends a record per test."""

  def __init__(self, send, canary, keep, snapshot):
    import pytest

    self._send, self._canary, self._keep = send, canary, keep
    self._seen, self._tampered, self._raised = {}, [], set()
    self._canaries, self._audited = {}, set()
    self._seconds, self._import_s, self._checks_s = {}, 0.0, 0.0
    self._clock, self._sleep = time.perf_counter, time.sleep
    self._threads = _thread._count
    self._snapshot = snapshot
    self.profile, self.found, self._timed = None, self._audited.add, True
    first = pytest.hookimpl(wrapper=True, tryfirst=True)
    for name in ('setup', 'call', 'teardown'):
      setattr(self, f'pytest_runtest_{name}', first(self._observer()))
    # Next to the function itself, before pytest does more that it may have changed.
    last = pytest.hookimpl(wrapper=True, trylast=True)
    self.pytest_pyfunc_call, self.pytest_fixture_setup = map(last, self._checkers())

  def _checkers(self):
    """Hooks that compare as soon as a test's or a fixture's function returns."""

    from _pytest.python import get_direct_param_fixture_func as parameter

    clock = self._clock

    def call():
      try:
        return (yield)
      finally:
        started = clock()
        self.check(python=False)
        self._checks_s += clock() - started

    def setup(fixturedef):
      if fixturedef.func is parameter:  # pytest's own, of which a test has several
        return (yield)
      return (yield from call())

    return call, setup

  def _observer(self):
    """A hook that notes which tests raise, before a report is made of it."""

    clock, seconds, threads = self._clock, self._seconds, self._threads

    from _pytest.assertion import util

    def observe(item):
      util._config = util._reprcompare = util._assertion_pass = None
      returned, before = False, threads()
      started = clock() - self._checks_s
      try:
        result = yield
        # unittest's exceptions are stored, not raised.
        returned = not getattr(item, '_excinfo', None)
        return result
      finally:
        self._wait(before)
        took = clock() - self._checks_s - started
        seconds[item.nodeid] = seconds.get(item.nodeid, 0.0) + took
        if not returned:
          self._raised.add(item.nodeid)
        self.check(python=False)

    return observe

  def _wait(self, before):
    """Until no more threads run than `before`, or for a moment, if time is measured.

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

  def pytest_collection_modifyitems(self, config, items):
    ours = [i for i in items if self._canary in i.nodeid]
    theirs = [i for i in items if self._canary not in i.nodeid]
    if self._keep is not None:
      theirs = [i for i in theirs if i.nodeid in self._keep]
    items[:] = [*ours[:1], *theirs, *ours[1:]]

  def pytest_collection(self, session):
    self._import_s = -time.process_time()  # which sees less of the load

  def pytest_collection_finish(self, session):
    self._import_s += time.process_time()
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
    seconds = self._seconds.pop(nodeid, 0.0)
    if status == 'PASSED' and nodeid in self._raised:
      status = 'FAILED'
    if self._canary in nodeid:
      self._canaries[nodeid.rpartition('_')[2]] = status
    else:
      self._send({'test': nodeid, 'status': status, 's': round(seconds, 4)})
    self.check()

  def check(self, python=True):
    """Compares the functions that decide with those at the start.

    A test may replace Python's own until it ends.
    """
    if len(self._tampered) < 8:
      self._tampered += self._snapshot.changes(python=python)[:8]

  def end(self, status):
    """Sends the last record."""
    record = {'end': status, 'tampered': sorted(set(self._tampered))}
    record['import_s'] = round(self._import_s, 4)
    if self._canaries != _CANARY_RESULTS:
      record['tampered'].append(f'tests that must fail: {self._canaries}')
    if self._audited:
      record['audited'] = sorted(self._audited)
    if self.profile is not None:
      record['calls'] = self.profile.found()
    self._send(record)


class _Profile:
  """Which functions of the tree each test calls, by file and first line."""

  def __init__(self, tree):
    self._tree = tree.rstrip('/') + '/'
    self._tests = {}
    self._names = {}
    self._now = set()
    self._tests['<import>'] = self._now
    sys.setprofile(self._event)

  def _event(self, frame, event, argument):
    if event == 'call':
      self._now.add(frame.f_code)

  def start(self, test):
    """Calls belong to `test` from here."""
    self._now = self._tests.setdefault(test, set())
    sys.setprofile(self._event)

  def stop(self):
    """Calls belong to no test, which is imports."""
    sys.setprofile(None)
    self._now = self._tests['<import>']
    sys.setprofile(self._event)

  def found(self):
    """{path: {first line: [tests]}}."""
    sys.setprofile(None)
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


if __name__ == '__main__':
  main()
