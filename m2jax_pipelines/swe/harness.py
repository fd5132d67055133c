"""Runs tests of a tree and reports each result; standard library and pytest only.

A request is a JSON line on standard input; results are lines `NONCE JSON` on standard
output. The nonce is only in the request: what tested code prints counts for nothing,
and the file descriptors that it sees as 1 and 2 are closed. The code under test shares
this process, as always under pytest, so the harness looks for interference:

- two tests of random names that must fail and one that must pass are among the tests;
- functions and classes of pytest, unittest, builtins, … stay the same (snapshot.py),
  compared when the tests are collected, when a test function returns, and at its end;
- a test passes only if its function returned, whatever pytest's report says of it;
- frames and other ways to the caller's variables raise audit events (guards.py);
- no process can be started (alone.py), unless the right sources start some;
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
"audited"}; without "audited", events of guards.py are reported and not refused, and
processes only with "alone";
or {"mode": "screen", …, "mutants": [{"path", "text", "files", "keep", "limit_s",
"quiet_s"}]}: of all tests, and without a result.
"""

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
# Plugins of pytest that write files, or later call what tests made: the texts of
# warnings, the handlers of logging. The streams are null, so that none is captured.
_WITHOUT = 'cacheprovider junitxml logging warnings threadexception unraisableexception'
_PARTS = ('alone', 'guards', 'snapshot', 'plugin')  # modules beside this file


def main():
  """Serves one request, or one of many."""
  parts = types.SimpleNamespace(**{name: _beside(name) for name in _PARTS})
  hidden = sys.modules['__main__']  # before any module keeps it
  sys.modules['__main__'] = types.ModuleType('__main__')
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
  if request.get('alone', not parts.alone.may_start(request.get('audited'))):
    parts.alone.stay()
  _close_memory()
  _import_pytest(request['site'])
  if request['mode'] == 'screen':
    for number, mutant in enumerate(request['mutants']):
      _screen(request, number, mutant, send, parts)
    return hidden
  _run(request, send, parts)


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
  # pdb and pytest would import it; it reads files without an event.
  sys.modules['readline'] = None
  importlib.import_module('pdb')
  import _pytest.config

  for name in _pytest.config.default_plugins:
    importlib.import_module(f'_pytest.{name}')
  sys.modules['_pytest.capture']._readline_workaround = dict
  del sys.modules['readline']


def _beside(name):
  """A module beside this file, which is in no path and not in sys.modules."""
  path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f'{name}.py')
  spec = importlib.util.spec_from_file_location(name, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def _run(request, send, parts):
  """Runs pytest in this process."""
  import pytest

  tree = request['tree']
  os.chdir(tree)
  sys.path[:0] = [os.path.join(tree, root) for root in request['roots']]
  place = tempfile.mkdtemp()
  name = 'c' + secrets.token_hex(8)
  canary = os.path.join(place, f'test_{name}.py')
  with open(canary, 'w') as file:
    file.write(parts.plugin.CANARIES.format(name))
  ini = os.path.join(place, 'pytest.ini')
  with open(ini, 'w') as file:
    file.write('[pytest]\n')
  keep = request.get('keep')
  keep = None if keep is None else set(keep)
  snapshot = parts.snapshot.Snapshot if request.get('compare', True) else None
  plugin = parts.plugin.Plugin(send, name, keep, snapshot)
  ours = [part.__file__ for part in vars(parts).values()]
  trusted = f'{request["site"]}/', __file__, *ours
  plugin.audit(request.get('audited'), request.get('strict', False))
  files = parts.guards.watch(trusted, f'{tree}/', request['files'], plugin.found)
  if request['mode'] == 'profile':
    plugin.profile = parts.plugin.Profile(tree)
  _hide(parts, [plugin, files])
  arguments = ['-c', ini, '--rootdir', tree, '--confcutdir', tree]
  arguments += ['--basetemp', f'{place}/tmp']
  for without in _WITHOUT.split():
    arguments += ['-p', f'no:{without}']
  arguments += ['--capture=no', '--tb=no', '-q']
  arguments += ['--assert=plain']  # rewriting leaves the session where code finds it
  arguments += ['--continue-on-collection-errors', *request.get('options', ())]
  gc.disable()
  with contextlib.suppress(KeyboardInterrupt):
    status = pytest.main([*arguments, canary, *request['files']], plugins=[plugin])
    plugin.check()
    plugin.end(int(status))
  os._exit(0)  # no atexit functions of the tree


def _hide(parts, objects):
  """Moves the methods of all classes of `parts` to their objects, found from `objects`.

  Any code finds a class below `object`, and by a method what its module's functions
  use. It does not find objects.
  """
  methods = {
    kind: [n for n, v in vars(kind).items() if type(v) is types.FunctionType]
    for part in vars(parts).values()
    for kind in vars(part).values()
    if isinstance(kind, type) and kind.__module__ == part.__name__
  }
  seen = set()
  while objects:
    one = objects.pop()
    if type(one) in (list, tuple):
      objects += one
    elif type(one) in methods and id(one) not in seen:
      seen.add(id(one))
      objects += vars(one).values()
      for name in methods[type(one)]:
        vars(one).setdefault(name, getattr(one, name))
  for kind, names in methods.items():
    for name in names:
      delattr(kind, name)


def _screen(request, number, mutant, send, parts):
  """Runs the tests of one mutant in a forked process; nothing of it is a verdict."""
  path = os.path.join(request['tree'], mutant['path'])
  with open(path, encoding='utf-8') as file:
    original = file.read()
  with open(path, 'w', encoding='utf-8') as file:
    file.write(mutant['text'])
  read, write = os.pipe()
  pid = os.fork()
  if not pid:

    def report(record):
      send({'mutant': number, **record})
      os.write(write, b'.')

    try:
      os.setpgid(0, 0)
      _run({**request, **mutant, 'mode': 'run', 'compare': False}, report, parts)
    finally:
      os._exit(1)
  os.close(write)
  started = heard = time.monotonic()
  while os.waitpid(pid, os.WNOHANG)[0] == 0:
    now = time.monotonic()
    if now > min(started + mutant['limit_s'], heard + mutant['quiet_s']):
      with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      send({'mutant': number, 'timeout': True})
      break
    if select.select([read], [], [], 0.005)[0] and os.read(read, 1 << 16):
      heard = now
  os.close(read)
  with open(path, 'w', encoding='utf-8') as file:
    file.write(original)


if __name__ == '__main__':
  main()
