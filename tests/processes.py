"""Starts modules of the tests as processes of their own, and reads what they say.

JAX's number of devices, its precision and its processes are fixed when it starts.
Modules run in forks of a process that has imported them (tests/fork_server.py), unless
the environment has what only a new interpreter reads.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import json
import os
import pathlib
import random
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

ROOT = pathlib.Path(__file__).parents[1]
# Variables that the loader, the interpreter or an import of jax reads.
_FIXED = ('GLIBC_TUNABLES', 'JAX_PLATFORMS', 'LD_PRELOAD', 'PYTHONPATH', 'PYTHONHOME')
# CPU seconds of forks that have ended: they are no children of this process.
cpu_s = 0.0


def free_port() -> int:
  """A port that nobody has, below those that the system gives to others meanwhile."""
  path = pathlib.Path('/proc/sys/net/ipv4/ip_local_port_range')
  end = int(path.read_text().split()[0])
  while True:
    port = random.SystemRandom().randrange(max(1024, end - 16_000), end)
    with contextlib.suppress(OSError), socket.socket() as s:
      s.bind(('localhost', port))
      return port


@functools.cache
def _server(pid: int) -> tuple[socket.socket, threading.Lock]:
  """The fork server of this process; it ends when the socket is closed."""
  del pid  # a fork has a server of its own
  ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  with theirs:
    subprocess.Popen(
      [sys.executable, '-m', 'tests.fork_server', str(theirs.fileno())],
      cwd=ROOT,
      env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
      pass_fds=[theirs.fileno()],
      stdin=subprocess.DEVNULL,
    )
  atexit.register(ours.close)
  return ours, threading.Lock()


class _Fork(subprocess.Popen):
  """A Popen whose process is a fork of the server: `args` is [module, *arguments]."""

  def _execute_child(self, args, *given):
    cwd, env, start_new_session = given[4], given[5], given[-2]
    pipes = given[9:15]  # p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite
    standard = [
      fd if given_fd == -1 else given_fd
      for fd, given_fd in enumerate((pipes[0], pipes[3], pipes[5]))
    ]
    self._report, theirs = socket.socketpair()
    request = dict(
      module=args[0],
      args=list(args[1:]),
      cwd=str(cwd or os.getcwd()),
      env=dict(os.environ if env is None else env),
      new_session=bool(start_new_session),
    )
    control, lock = _server(os.getpid())
    with theirs, lock:
      fds = [*standard, theirs.fileno()]
      socket.send_fds(control, [json.dumps(request).encode()], fds)
    self._close_pipe_fds(*pipes)
    (self.pid,) = array.array('q', self._receive(8))
    self._child_created = True

  def _receive(self, size: int) -> bytes:
    data = self._report.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
      raise RuntimeError('the fork server has ended: see its message above')
    return data

  def _internal_poll(self, _deadstate=None, **_):
    try:
      return self._wait(0)
    except subprocess.TimeoutExpired:
      return None

  def _wait(self, timeout):
    global cpu_s
    with self._waitpid_lock:
      if self.returncode is None:
        if not select.select([self._report], [], [], timeout)[0]:
          raise subprocess.TimeoutExpired(self.args, timeout)
        status, used_s = array.array('d', self._receive(16))
        self._report.close()
        self.returncode = os.waitstatus_to_exitcode(int(status))
        cpu_s += used_s
    return self.returncode


def popen(module: str, *args, env: Mapping | None = None, **options):
  """`python -m MODULE ARGS…` in the repository's root; `options` are those of Popen."""
  env = dict(os.environ if env is None else env)
  command = [module, *map(str, args)]
  options = {'cwd': ROOT, 'env': env, **options}
  if any(env.get(name) != os.environ.get(name) for name in _FIXED):
    return subprocess.Popen([sys.executable, '-m', *command], **options)
  return _Fork(command, **options)


def start(module: str, *args, **environment: str) -> subprocess.Popen:
  """`python -m MODULE ARGS…` on CPU, in the repository's root, with its text piped."""
  return popen(
    module,
    *args,
    env={**os.environ, 'JAX_PLATFORMS': 'cpu', **environment},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def run(
  module: str, *args, timeout_s: float = 600, **environment: str
) -> subprocess.CompletedProcess:
  """Like `start`, to its end; text of output and error, and the exit code."""
  child = start(module, *args, **environment)
  ((out, err),) = finish([child], timeout_s)
  return subprocess.CompletedProcess([module, *args], child.returncode, out, err)


def finish(
  children: Sequence[subprocess.Popen], timeout_s: float = 900
) -> list[tuple[str, str]]:
  """(standard output, standard error) of each; none is left running."""
  try:
    return [child.communicate(timeout=timeout_s) for child in children]
  finally:
    for child in children:
      child.kill()


def together(module: str, processes: int, fields: Mapping) -> list:
  """The last line, JSON, of each of several processes that meet as one JAX program.

  Each gets JSON: the fields, with `process`, `processes` and `coordinator`.
  """
  fields = {
    **fields,
    'processes': processes,
    'coordinator': f'localhost:{free_port()}',
  }
  children = [
    start(module, json.dumps({**fields, 'process': process}))
    for process in range(processes)
  ]
  ended = finish(children)
  for out, err in ended:
    assert out, err[-3000:]
  return [json.loads(out.splitlines()[-1]) for out, _ in ended]
