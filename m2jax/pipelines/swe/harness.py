"""Runs tests of a tree and reports each result; standard library and pytest only.

A request is a JSON line on standard input; results are lines `NONCE JSON` on standard
output. The nonce is only in the request: what tested code prints counts for nothing,
and the file descriptors that it sees as 1 and 2 are closed. The code under test shares
this process, as under every pytest, so that three checks look for interference:

- two tests of random names that must fail and one that must pass are among the tests;
- functions and classes of pytest, pluggy, unittest, builtins and time stay the same;
- results end with one record of pytest's exit status, which must be that of failures.

Start it with -s -S -P -B and a clean environment: no site, .pth files or bytecode.

Requests: {"mode": "run" | "profile", "nonce", "tree", "site", "roots", "files", "keep"}
or {"mode": "screen", …, "mutants": [{"path", "text", "files", "keep", "limit_s"}]}.
"""

import builtins
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
import types

_CANARIES = """\
def test_{0}_equal():
  assert 1 == 2
def test_{0}_raise():
  raise ValueError
def test_{0}_pass():
  pass
"""
_CANARY_RESULTS = {'equal': 'FAILED', 'raise': 'FAILED', 'pass': 'PASSED'}
_GUARDED = ('pytest', '_pytest', 'pluggy', 'unittest')
_LEGACY = '_getini_unknown_type'  # that pytest's own plugin legacypath replaces


def main():
  """Serves one request."""
  request = json.loads(sys.stdin.readline())
  out = os.fdopen(os.dup(1), 'w', buffering=1)
  null = os.open(os.devnull, os.O_RDWR)
  for fd in (0, 1, 2):
    os.dup2(null, fd)
  nonce = request.pop('nonce')

  def send(record):
    out.write(f'{nonce} {json.dumps(record)}\n')

  for name in list(os.environ):
    if name.startswith(('PYTEST', 'M2JAX', 'PYTHON')):
      del os.environ[name]
  sys.argv = ['pytest']
  sys.path.insert(0, request['site'])
  import pytest  # noqa: F401 - before anything of the tree can be imported

  if request['mode'] == 'screen':
    for number, mutant in enumerate(request['mutants']):
      _screen(request, number, mutant, send)
    return
  _run(request, send)


def _run(request, send):
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
  plugin = _Plugin(send, name, None if keep is None else set(keep))
  if request['mode'] == 'profile':
    plugin.profile = _Profile(tree)
  arguments = ['-c', ini, '--rootdir', tree, '--confcutdir', tree]
  arguments += ['--basetemp', f'{place}/tmp']
  arguments += ['-p', 'no:cacheprovider', '-p', 'no:junitxml', '--tb=no', '-q']
  arguments += ['--continue-on-collection-errors', *request.get('options', ())]
  with contextlib.suppress(KeyboardInterrupt):
    status = pytest.main([*arguments, canary, *request['files']], plugins=[plugin])
    plugin.check()
    plugin.end(int(status))
  os._exit(0)  # no atexit functions of the tree


def _screen(request, number, mutant, send):
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

  def __init__(self, send, canary, keep):
    self._send, self._canary, self._keep = send, canary, keep
    self._seen, self._tampered = {}, []
    self._canaries = {}
    self._guarded = _snapshot()
    self.profile = None

  def pytest_collection_modifyitems(self, config, items):
    ours = [i for i in items if self._canary in i.nodeid]
    theirs = [i for i in items if self._canary not in i.nodeid]
    if self._keep is not None:
      theirs = [i for i in theirs if i.nodeid in self._keep]
    items[:] = [*ours[:1], *theirs, *ours[1:]]

  def pytest_collectreport(self, report):
    if report.failed:
      why = str(report.longrepr).strip()[-400:]
      self._send({'test': report.nodeid, 'status': 'ERROR', 'why': why})

  def pytest_runtest_logstart(self, nodeid, location):
    if self.profile is not None:
      self.profile.start(nodeid)

  def pytest_runtest_logreport(self, report):
    status, seconds = self._seen.get(report.nodeid, ('PASSED', 0.0))
    xfail = hasattr(report, 'wasxfail')
    if report.failed:
      status = 'FAILED' if report.when == 'call' else 'ERROR'
    elif report.skipped and status == 'PASSED':
      status = 'XFAIL' if xfail else 'SKIPPED'
    elif xfail and report.when == 'call':
      status = 'XPASS'
    self._seen[report.nodeid] = status, seconds + report.duration

  def pytest_runtest_logfinish(self, nodeid, location):
    if self.profile is not None:
      self.profile.stop()
    status, seconds = self._seen.pop(nodeid, ('ERROR', 0.0))
    if self._canary in nodeid:
      self._canaries[nodeid.rpartition('_')[2]] = status
    else:
      self._send({'test': nodeid, 'status': status, 's': round(seconds, 4)})
    self.check()

  def check(self):
    """Compares the functions that decide with those at the start."""
    if len(self._tampered) < 8:
      self._tampered += _changes(self._guarded)[:8]

  def end(self, status):
    """Sends the last record."""
    record = {'end': status, 'tampered': sorted(set(self._tampered))}
    if self._canaries != _CANARY_RESULTS:
      record['tampered'].append(f'tests that must fail: {self._canaries}')
    if self.profile is not None:
      record['calls'] = self.profile.found()
    self._send(record)


def _snapshot():
  """[(holder, name, function or class)] of the modules that decide."""
  found = []
  for name, module in sorted(sys.modules.items()):
    if name.partition('.')[0] in _GUARDED and module is not None:
      found += _members(module, name)
  found += [
    (module, key, value)
    for module in (builtins, time)
    for key, value in vars(module).items()
    if isinstance(value, type | types.BuiltinFunctionType)
  ]
  return found


def _members(holder, module):
  for key, value in list(vars(holder).items()):
    kind = isinstance(value, type)
    if not kind and not isinstance(value, types.FunctionType) or key == _LEGACY:
      continue
    if getattr(value, '__module__', None) != module:
      continue
    code = None if kind else value.__code__
    yield holder, key, (value, code)
    if kind:
      yield from _members(value, module)


def _changes(snapshot):
  changed = []
  for holder, key, value in snapshot:
    now = vars(holder).get(key)
    if isinstance(value, tuple):
      value, code = value
      same = now is value and (code is None or now.__code__ is code)
    else:
      same = now is value
    if not same:
      changed.append(f'{getattr(holder, "__name__", holder)}.{key}')
  return changed


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
