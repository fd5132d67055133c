"""Process 1 of a sandbox: runs its commands, one at a time, and ends what they start.

The supervisor forks it once per sandbox. It enters namespaces of the sandbox's own
(processes, mounts, network, IPC, host name, control groups), and waits for commands.
Each is forked from it, drops the real uid, enters a user namespace of its own and loads
the filter. Process 1 stays outside of that user namespace, so that the kernel denies
commands to trace, signal or limit it (user_namespaces(7)). When the first process of a
command has ended, or when the supervisor says so, it kills all others, and reports the
end when it has no child left: by then no process of the namespace is alive.

In the weaker mode there are no namespaces: it adopts orphans and kills its children
until none is left.

Messages are `marshal` records over a socket pair of packets. From the supervisor:
`('run', command)` with descriptors for stdout and stderr, `('kill',)`, and
`('workspace',)` with a descriptor of a mount. From here: `(error, wait status)`, first
when the sandbox is ready and then for each command.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import resource
import select
import signal
import socket

import linux
import root as root_lib

MESSAGE_BYTES = 1 << 17
SHELL = '/bin/bash'
_MAX_OPEN_FILES = 256
START_S = 10.0  # for process 1 of a sandbox, and for what forks it


def resource_limits(
  *, cpu_s: int, file_bytes: int, address_bytes: int | None, processes: int
) -> list[tuple[int, tuple[int, int]]]:
  """rlimits of one command as `(resource, (soft, hard))`; None omits one."""
  wanted = [
    # SIGXCPU at the soft limit, SIGKILL a second later.
    (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
    (resource.RLIMIT_FSIZE, file_bytes, file_bytes),
    # With 0 a handler in core_pattern still gets a dump; with 1 it does not (core(5),
    # fs/coredump.c). The system call filter prevents changes.
    (resource.RLIMIT_CORE, 1, 1),
    (resource.RLIMIT_NOFILE, _MAX_OPEN_FILES, _MAX_OPEN_FILES),
    # Counts the processes of the command's own user namespace.
    (resource.RLIMIT_NPROC, processes, processes),
    (resource.RLIMIT_RTPRIO, 0, 0),
    (resource.RLIMIT_NICE, 0, 0),
  ]
  if address_bytes is not None:
    wanted.append((resource.RLIMIT_AS, address_bytes, address_bytes))
  limits = []
  for kind, soft, hard in wanted:
    allowed = resource.getrlimit(kind)[1]
    if allowed != resource.RLIM_INFINITY:
      soft, hard = min(soft, allowed), min(hard, allowed)
    limits.append((kind, (soft, hard)))
  return limits


def start(box) -> tuple[int, socket.socket]:
  """Forks process 1 of a `boxes.Box`. Returns its pid and the socket to it.

  Raises:
    OSError: namespaces are not allowed here.
  """
  ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
  ours.settimeout(START_S)
  with theirs:
    child = os.fork()
    if not child:
      ours.close()
      _begin(box, theirs)
  kinds = ['user'] if box.root is not None else []
  kinds += ['cgroup'] if box.group is not None else []
  namespaces = []
  try:
    error, pid = marshal.loads(ours.recv(MESSAGE_BYTES))
    if not error:
      for kind in kinds:
        path = f'/proc/{child}/ns/{kind}'
        namespaces.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
  finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)  # now this process is the parent of process 1
  if error:
    ours.close()
    raise OSError(error)
  socket.send_fds(ours, [b'begin'], namespaces)
  for fd in namespaces:
    os.close(fd)
  return pid, ours


def _begin(box, connection: socket.socket) -> None:
  """Forks process 1, and makes namespaces that it opens. Never returns.

  Process 1 is not forked by the supervisor: without root no process can return from a
  process namespace that it began. It does not enter the control groups: they would
  count it, and the kernel could choose it when memory runs out.
  """
  try:
    if box.root is not None:
      linux.new_processes()
    pid = os.fork()
    if not pid:
      _main(box, connection)
    if box.group is not None:
      box.group.join()
      linux.enter_groups()
    if box.root is not None:
      box.drop_uid()
      linux.new_user(nested=box.root.nested)
    linux.die_with_parent()
    connection.send(marshal.dumps(('', pid)))
    signal.pause()
  except OSError as error:
    connection.send(marshal.dumps((str(error), 0)))
  finally:
    os._exit(0)


def _main(box, connection: socket.socket) -> None:
  """Process 1: never returns."""
  try:
    begin, namespaces, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
    if not begin:
      return
    if box.root is not None:
      linux.die_with_parent()  # the supervisor; and the namespace with this process
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, signal.SIG_DFL)
    try:
      init = _Init(box, connection, namespaces)
    except BaseException as error:  # noqa: BLE001 - reported
      connection.send(marshal.dumps((str(error), 0)))
      raise
    connection.send(marshal.dumps(('', 0)))
    init.serve()
  finally:
    os._exit(0)


class _Init:
  """The state of process 1."""

  def __init__(self, box, connection: socket.socket, namespaces: list[int]):
    self._box = box
    self._connection = connection
    self._pid = None  # the first process of the command that runs
    self._status = None  # where it writes why it could not start
    self._wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for fd in namespaces:
      os.set_inheritable(fd, False)
    self._close_others(woken, *namespaces)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    linux.new_session_keyring()
    if box.uid is not None:
      os.setgroups([])
    if box.root is None:
      linux.adopt_orphans()
      return
    self._user, *groups = namespaces
    linux.enter_groups(*groups)
    linux.new_network()
    workspace = linux.clone_mount(box.path)
    root_lib.enter(box.root, box.scratch_bytes)
    self._attach(workspace)
    self._scratch = self._scratch_state()

  def _close_others(self, *own: int) -> None:
    """Closes what the supervisor has open: pipes of others, its caller's socket."""
    keep = {self._connection.fileno(), self._wake, *own}
    if self._box.group is not None:
      keep.update(self._box.group.join_fds)
    if self._box.root is not None:
      keep.add(self._box.root.mounts)
    last = max(map(int, os.listdir('/proc/self/fd')))
    low = 3
    for fd in (*sorted(keep), last + 1):
      if low < fd:  # Python 3.11 closes everything in an empty range from 0
        os.closerange(low, fd)
      low = fd + 1

  def _attach(self, workspace: int) -> None:
    linux.attach(workspace, '/workspace')
    os.close(workspace)

  # Commands -------------------------------------------------------------------------

  def serve(self) -> None:
    """Runs commands until the supervisor closes the connection."""
    poll = select.poll()
    poll.register(self._connection, select.POLLIN)
    poll.register(self._wake, select.POLLIN)
    while True:
      for fd, _ in poll.poll():
        if fd == self._wake:
          with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
          self._reap()
        elif not self._receive():
          if self._pid is not None:
            self._end(None)
          return

  def _receive(self) -> bool:
    data, fds, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 2)
    for fd in fds:
      os.set_inheritable(fd, False)
    if not data:
      return False
    kind, *arguments = marshal.loads(data)
    if kind == 'run':
      self._run(*arguments, fds)
    elif kind == 'kill' and self._pid is not None:
      self._end(None)
    elif kind == 'workspace':
      linux.unmount('/workspace')
      self._attach(fds[0])
    return True

  def _run(self, command: bytes, fds: list[int]) -> None:
    self._status, status = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    pid = os.fork()
    if not pid:
      self._command(command, fds, status)
    self._pid = pid
    for fd in (status, *fds):
      os.close(fd)

  def _reap(self) -> None:
    """Reaps what has ended; ends the command with its first process."""
    while self._pid is not None:
      try:
        pid, status = os.waitpid(-1, os.WNOHANG)
      except ChildProcessError:
        return
      if not pid:
        return
      if pid == self._pid:
        self._end(status)

  def _end(self, status: int | None) -> None:
    """Kills what is left of the command, and reports when nothing is."""
    while True:
      self._kill()
      try:
        pid, ended = os.waitpid(-1, 0)
      except ChildProcessError:
        break
      if pid == self._pid:
        status = ended
    self._pid = None
    error = ''
    with contextlib.suppress(BlockingIOError):
      error = os.read(self._status, 4096).decode(errors='replace')
    os.close(self._status)
    if self._box.root is not None:
      self._empty_scratch()
    self._connection.send(marshal.dumps((error, status)))

  def _kill(self) -> None:
    if self._box.root is not None:
      assert os.getpid() == 1
      with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all of the namespace but this process
      return
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self._pid, signal.SIGKILL)
    for pid in linux.children():
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

  def _empty_scratch(self) -> None:
    """Replaces /tmp and /dev/shm, if a command used them."""
    if self._scratch_state() != self._scratch:
      root_lib.remove_scratch()
      root_lib.mount_scratch('', self._box.scratch_bytes)
      self._scratch = self._scratch_state()

  def _scratch_state(self) -> tuple:
    changed = [os.stat(path).st_ctime_ns for path in ('/tmp', '/dev/shm')]
    found = os.statvfs('/tmp')
    return found.f_ffree, found.f_bfree, changed

  def _command(self, command: bytes, fds: list[int], status: int) -> None:
    """The forked first process of a command: never returns.

    An error before the exec is written to `status`.
    """
    try:
      box = self._box
      os.setsid()
      if box.group is not None:
        box.group.join()
      for kind, pair in box.rlimits:
        resource.setrlimit(kind, pair)
      if box.root is not None:
        linux.become_user(self._user)
      else:
        box.drop_uid()
      if 0 in os.getresuid():
        raise PermissionError('commands do not run as root')
      os.chdir('/workspace' if box.root is not None else box.path)
      linux.drop_privileges()
      # Python ignores these signals, and handles the last; commands do not inherit it.
      for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
      # Each opens its own /dev/null, because processes share the state of an open file.
      null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
      for number, fd in enumerate((null, *fds)):
        os.dup2(fd, number)
      for calls in box.filters:
        calls.load()
      if box.gvisor is not None:
        box.gvisor.execute(command, box.env, status)
      # `--` permits commands that start with `-` or `+`.
      os.execve(SHELL, [SHELL, '-c', '--', command], box.env)
    except BaseException as error:  # noqa: BLE001 - a forked child must never return
      os.write(status, f'{error}'.encode())
    finally:
      os._exit(125)
