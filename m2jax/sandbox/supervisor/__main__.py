"""The supervisor: a small process that starts, limits, watches and ends commands.

A fork of the caller (a large, multi-threaded JAX process) would be slow and unsafe, so
forks happen here: one thread, the standard library, a few MB. It runs as
`python -I -S m2jax/sandbox/supervisor SOCKET_FD CALLER_PID`, speaks length-prefixed
`marshal` records `(id, operation, arguments)` -> `(id, error or None, result)` over a
socket pair (both ends are the same interpreter), and ends with its caller: end of file
kills every command and takes the mounts and control groups along.
"""

from __future__ import annotations

import collections
import contextlib
import marshal
import os
import resource
import select
import socket
import sys
import time

import cgroups as cgroups_lib
import commands
import linux
import runs

_HEADER_BYTES = 4
_WORKSPACE_INODES = 16384
_WATCH_CALLER_S = 5.0
_BUBBLEWRAP_PROCESSES = 2  # its monitor and its init
# After this long nothing of a destroyed sandbox runs any more in its network.
_NETWORK_REST_S = 1.0


class Supervisor:
  """Serves one caller until it goes away."""

  def __init__(self, connection: socket.socket, caller: int):
    self._connection = connection
    self._caller = caller
    self._received = bytearray()
    self._to_send = bytearray()
    self._epoll = select.epoll()
    self._on_event = {}  # fd -> function()
    self._boxes = {}
    self._runs = {}  # request id -> Run
    self._waiting = collections.deque()  # (request id, box number, command, wall_s)
    self._uids_taken = set()
    self._networks = collections.deque()  # (when it was given back, descriptor)
    self._next_number = 0
    self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    self._cgroups = None

  # Requests -------------------------------------------------------------------------

  def _start(self, config: dict) -> dict:
    """Prepares the machine once. Returns what was found, for the caller's report."""
    self._config = config
    self._root = os.geteuid() == 0
    self._isolated = config['backend'] == 'bubblewrap'
    self._run_directory = config['directory']
    self._read_only = []
    linux.adopt_orphans()
    if self._isolated:
      linux.enter_private_mounts()
      self._networks.append((time.monotonic(), linux.new_network()))
      linux.mount_tmpfs(self._run_directory, 16 << 20, 65536, 0o711, 0)
      commands.prepare_etc(os.path.join(self._run_directory, 'etc'), linux.bind)
      for number, (source, target) in enumerate(config['read_only']):
        # Bound to where the dropped uid can reach it, whatever lies above the source.
        place = os.path.join(self._run_directory, f'read_only_{number}')
        os.mkdir(place)
        linux.bind(source, place)
        self._read_only.append((place, target))
    else:
      os.chmod(self._run_directory, 0o711)
    self._cgroups = cgroups_lib.Cgroups('none', {}, 'not asked for')
    if config['cgroups']:
      self._cgroups = cgroups_lib.detect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    self._next_uid = config['uids'][0] + os.getpid() * 1009
    self._shared_processes = _tasks_of_this_uid()
    return {
      'root': self._root,
      'cgroups': self._cgroups.kind,
      'cgroups_reason': self._cgroups.reason,
    }

  def _open(self, limits: dict, env: dict) -> tuple[int, str, int | None]:
    """Makes a sandbox. Returns its number, directory and uid (None: the own one)."""
    number = self._next_number
    self._next_number += 1
    path = os.path.join(self._run_directory, f'workspace_{number}')
    uid = self._take_uid() if self._root else None
    group = network = None
    os.mkdir(path, 0o700)
    try:
      if self._isolated:
        network = self._take_network()
        linux.mount_tmpfs(
          path, limits['workspace_bytes'], _WORKSPACE_INODES, 0o700, uid or 0
        )
        if self._cgroups.kind != 'none':
          processes = limits['processes'] + _BUBBLEWRAP_PROCESSES
          group = self._cgroups.make(str(number), limits['memory_bytes'], processes)
        argv = commands.bubblewrap_argv(
          self._config['bwrap'],
          etc=os.path.join(self._run_directory, 'etc'),
          workspace=path,
          read_only=self._read_only,
          scratch_bytes=limits['workspace_bytes'],
          processes=limits['processes'],
          env=env,
        )
        processes = None
      else:
        if uid is not None:
          os.chown(path, uid, uid)
        argv = commands.shell_argv()
        processes = limits['processes']
        if not self._root:
          processes = self._shared_processes + processes * self._config['parallel']
    except OSError:
      self._discard(path, uid, network, group)
      raise
    rlimits = commands.resource_limits(
      cpu_s=limits['cpu_s'],
      file_bytes=limits['file_bytes'],
      address_bytes=None if group else limits['memory_bytes'],
      processes=processes,
    )
    run_env = {} if self._isolated else dict(env)
    self._boxes[number] = runs.Box(
      path, uid, network, limits, argv, run_env, group, rlimits
    )
    return number, path, uid

  def _take_network(self) -> int:
    """A network namespace that no other living sandbox has.

    The kernel takes milliseconds to make and to remove one, so they are used again.
    """
    if self._networks and time.monotonic() - self._networks[0][0] > _NETWORK_REST_S:
      return self._networks.popleft()[1]
    return linux.new_network()

  def _take_uid(self) -> int:
    low, high = self._config['uids']
    for _ in range(high - low):
      uid = low + self._next_uid % (high - low)
      self._next_uid += 1
      if uid not in self._uids_taken:
        self._uids_taken.add(uid)
        return uid
    raise OSError(f'all {high - low} uids of the range are in use')

  def _close(self, number: int) -> None:
    box = self._boxes.pop(number, None)
    if box is None:
      return
    if box.run is not None:
      box.closed = True  # what is left to do, `_finish` does
      box.run.kill('cancel')
    else:
      self._discard(box.path, box.uid, box.network, box.group)

  def _discard(self, path: str, uid: int | None, network: int | None, group) -> None:
    if network is not None:
      self._networks.append((time.monotonic(), network))
    if self._isolated:
      with contextlib.suppress(OSError):
        linux.unmount(path)
      with contextlib.suppress(OSError):
        os.rmdir(path)
    if group is not None:
      self._cgroups.remove(group)
    self._uids_taken.discard(uid)

  # Commands -------------------------------------------------------------------------

  def _launch_waiting(self) -> None:
    while self._waiting and len(self._runs) < self._config['parallel']:
      request, number, command, wall_s = self._waiting.popleft()
      box = self._boxes.get(number)
      if box is None:
        self._reply(request, 'the sandbox was destroyed', None)
        continue
      try:
        self._launch(request, box, command, wall_s)
      except OSError as error:
        self._reply(request, f'cannot start a command: {error}', None)

  def _launch(self, request: int, box: runs.Box, command: bytes, wall_s: float):
    run = runs.Run(request, box, command, wall_s, self._null)
    for fd in (run.stdout, run.stderr):
      self._watch(fd, lambda fd=fd: self._read_output(run, fd))
    self._watch(run.pidfd, lambda: self._finish(run))
    self._runs[request] = run
    box.run = run

  def _read_output(self, run: runs.Run, fd: int) -> None:
    if run.read_output(fd) == runs.CLOSED:
      self._unwatch(fd)

  def _finish(self, run: runs.Run) -> None:
    """The command's first process has ended: ends the others, collects, replies."""
    for fd in (run.pidfd, run.stdout, run.stderr):
      self._unwatch(fd)
    del self._runs[run.request]
    run.box.run = None
    error, result = run.finish(reported=self._isolated)
    self._reply(run.request, error, result)
    if run.box.closed:
      self._discard(run.box.path, run.box.uid, run.box.network, run.box.group)

  def _reap_orphans(self) -> None:
    """Collects what ended commands left behind, such as bubblewrap's init."""
    first = {run.pid for run in self._runs.values()}  # theirs `Run.finish` collects
    with contextlib.suppress(ChildProcessError):
      while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        if ended.si_pid in first:
          return
        os.waitpid(ended.si_pid, 0)

  # Plumbing -------------------------------------------------------------------------

  def _watch(self, fd: int, function) -> None:
    self._on_event[fd] = function
    self._epoll.register(fd, select.EPOLLIN)

  def _unwatch(self, fd: int) -> None:
    if self._on_event.pop(fd, None):
      self._epoll.unregister(fd)

  def _reply(self, request: int, error: str | None, result) -> None:
    record = marshal.dumps((request, error, result))
    self._to_send += len(record).to_bytes(_HEADER_BYTES, 'little') + record
    self._send()

  def _send(self) -> None:
    with contextlib.suppress(BlockingIOError):
      while self._to_send:
        del self._to_send[: self._connection.send(self._to_send)]
    events = select.EPOLLIN | (select.EPOLLOUT if self._to_send else 0)
    self._epoll.modify(self._connection.fileno(), events)

  def _serve_connection(self) -> None:
    self._send()
    try:
      data = self._connection.recv(1 << 20)
    except BlockingIOError:
      return
    if not data:
      raise EOFError
    self._received += data
    while len(self._received) >= _HEADER_BYTES:
      end = _HEADER_BYTES + int.from_bytes(self._received[:_HEADER_BYTES], 'little')
      if len(self._received) < end:
        return
      record = marshal.loads(self._received[_HEADER_BYTES:end])
      del self._received[:end]
      self._serve(*record)

  def _serve(self, request: int, operation: str, arguments: tuple) -> None:
    if operation == 'exec':
      self._waiting.append((request, *arguments))
    elif operation == 'cancel':
      (cancelled,) = arguments
      if cancelled in self._runs:
        self._runs[cancelled].kill('cancel')
      kept = [item for item in self._waiting if item[0] != cancelled]
      self._waiting = collections.deque(kept)
    else:
      handler = {'start': self._start, 'open': self._open, 'close': self._close}
      try:
        self._reply(request, None, handler[operation](*arguments))
      except OSError as error:
        self._reply(request, str(error), None)

  def run(self) -> None:
    """Serves until the caller is gone, then ends every command."""
    self._connection.setblocking(False)
    self._watch(self._connection.fileno(), self._serve_connection)
    try:
      while os.getppid() == self._caller:
        timeout = _WATCH_CALLER_S
        if self._runs:
          now = time.monotonic()
          first = min(run.deadline for run in self._runs.values())
          timeout = min(timeout, max(first - now, 0.0))
        for fd, _ in self._epoll.poll(timeout):
          function = self._on_event.get(fd)
          if function is not None:
            function()
        # Not before: a new file must not get the number of one with an event pending.
        self._launch_waiting()
        self._reap_orphans()
        now = time.monotonic()
        for run in self._runs.values():
          if run.deadline <= now and not run.ended_by:
            run.kill('wall')
    except (EOFError, ConnectionError):
      pass
    finally:
      self._end()

  def _end(self) -> None:
    for run in self._runs.values():
      run.kill('cancel')
    for run in self._runs.values():
      run.wait()
    for number in list(self._boxes):
      self._boxes[number].run = None
      self._close(number)
    self._remove_run_directory()
    deadline = time.monotonic() + 1.0
    while self._cgroups and not self._cgroups.sweep() and time.monotonic() < deadline:
      time.sleep(0.01)

  def _remove_run_directory(self) -> None:
    import shutil  # only now: every fork copies what is loaded

    if self._cgroups is None:
      return
    with contextlib.suppress(OSError):
      if self._isolated:
        linux.unmount(self._run_directory)
    shutil.rmtree(self._run_directory, ignore_errors=True)


def _tasks_of_this_uid() -> int:
  """Threads of this uid on the machine: what RLIMIT_NPROC counts."""
  uid, tasks = os.getuid(), 0
  for name in os.listdir('/proc'):
    if name.isdigit():
      with contextlib.suppress(OSError):
        if os.stat(f'/proc/{name}').st_uid == uid:
          tasks += len(os.listdir(f'/proc/{name}/task'))
  return tasks


def main() -> None:
  connection = socket.socket(fileno=int(sys.argv[1]))
  connection.set_inheritable(False)
  Supervisor(connection, int(sys.argv[2])).run()


if __name__ == '__main__':
  main()
