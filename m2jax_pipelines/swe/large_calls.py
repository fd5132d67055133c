"""Finds calls of a package's functions with large arguments; runs in the sandbox.

A request is a JSON line on standard input: {"path": [directories to import from],
"modules", "sizes", "most_s", "calls"}. Each public function of a module is called with
`arguments` of each size, in a process of its own. Calls that return the same twice,
within `most_s` seconds, are JSON lines: {"module", "function", "arguments", "digests"
of each size, "s" of the last}; at most `calls` of a function, the longest.

`SHARED` is also the head of the tests that are made of these calls. Standard library
only.
"""

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import signal
import sys
import time

_FUNCTION_S = 1.5


def ints(size):
  return [i * 7919 % size for i in range(size)]


def twice(size):
  return [i * 7919 % (size // 2) for i in range(size)]


def words(size):
  return [f'w{i * 7919 % size}' for i in range(size)]


def text(size):
  return '\n'.join(' '.join(words(size)[i : i + 8]) for i in range(0, size, 8))


def pairs(size):
  return [(i * 7919 % size, f'v{i}') for i in range(size)]


def table(size):
  return {f'k{i}': i * 7919 % size for i in range(size)}


def few(size):
  return 3


def word(size):
  return 'w7'


def function(size):
  return str


def digest(value):
  """SHA-256 of a result, an iterator's items and the parts of containers included.

  Raises:
    ValueError: it has other parts than numbers, texts and containers of them.
  """
  left = [200_000]

  def plain(x):
    left[0] -= 1
    if left[0] < 0:
      raise ValueError('too large')
    if x is None or isinstance(x, (str, bytes, int, float)):
      return repr(x)
    if isinstance(x, dict):
      return f'{{{",".join(f"{plain(k)}:{plain(v)}" for k, v in x.items())}}}'
    if isinstance(x, (set, frozenset)):
      return f'<{",".join(sorted(map(plain, x)))}>'
    if not hasattr(x, '__iter__'):
      raise ValueError(type(x).__name__)
    return f'({",".join(map(plain, x))})'

  return hashlib.sha256(plain(value).encode()).hexdigest()


LARGE = (ints, twice, words, text, pairs, table)
SMALL = (few, word, function)
SHARED = (*LARGE, *SMALL, digest)


def arguments():
  """The tuples of arguments to try."""
  for large in LARGE:
    yield (large,)
    yield large, large
    for small in SMALL:
      yield large, small
      yield small, large


def main():
  request = json.loads(sys.stdin.readline())
  out = os.fdopen(os.dup(1), 'w', buffering=1)
  os.dup2(os.open(os.devnull, os.O_RDWR), 1)
  sys.path[:0] = request['path']
  for module in request['modules']:
    try:
      found = importlib.import_module(module)
    except Exception:
      continue
    for name in sorted(vars(found)):
      called = getattr(found, name)
      own = getattr(called, '__module__', None) == module
      if own and not name.startswith('_') and inspect.isroutine(called):
        _in_a_process(lambda f=called, m=module, n=name: _calls(f, m, n, request, out))


def _in_a_process(work):
  pid = os.fork()
  if not pid:
    with contextlib.suppress(BaseException):
      work()
    os._exit(0)
  deadline = time.monotonic() + 2 * _FUNCTION_S  # for what no signal interrupts
  while not os.waitpid(pid, os.WNOHANG)[0]:
    if time.monotonic() > deadline:
      os.kill(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      return
    time.sleep(0.002)


def _calls(called, module, name, request, out):
  """Writes the calls of one function."""
  found, deadline = [], time.monotonic() + _FUNCTION_S
  signal.signal(signal.SIGALRM, _late)
  for makers in arguments():
    if time.monotonic() > deadline:
      break
    with contextlib.suppress(Exception):
      digests, seconds = [], 0.0
      for size in request['sizes']:
        one, seconds = _called(called, makers, size, request['most_s'])
        if _called(called, makers, size, request['most_s'])[0] != one:
          raise ValueError('another result')
        digests.append(one)
      names = [make.__name__ for make in makers]
      about = {'module': module, 'function': name, 'arguments': names}
      found.append({**about, 'digests': digests, 's': round(seconds, 5)})
  found.sort(key=lambda call: -call['s'])
  for call in found[: request['calls']]:
    out.write(json.dumps(call) + '\n')


def _called(called, makers, size, most_s):
  """(digest of the result, seconds); raises TimeoutError."""
  signal.setitimer(signal.ITIMER_REAL, most_s)
  try:
    started = time.perf_counter()
    found = digest(called(*(make(size) for make in makers)))
    return found, time.perf_counter() - started
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _late(*_):
  raise TimeoutError


if __name__ == '__main__':
  main()
