"""A command in progress: its pipes, its output and its end.

bubblewrap's monitor, which this process starts, exits with the command's first process.
Its init, process 1 of the command's process namespace, then dies with the monitor,
unless the command has taken control of init. This module therefore kills init, and the
command has ended when the kernel reports the end of init: by then it has killed all
processes of the namespace (pid_namespaces(7)). Init is a child of this process from the
moment that the monitor exits (PR_SET_CHILD_SUBREAPER), so that its process id cannot be
reused.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import commands
import linux

OPEN, EMPTY, CLOSED = 'open', 'empty', 'closed'
_READ_BYTES = 65536
# Output above the limit is read and dropped; a command that prints this many times the
# limit is killed.
_DROPPED_OUTPUT_FACTOR = 64
_MAX_PIPE_BYTES = 1 << 20  # maximum of fcntl F_SETPIPE_SZ
_MAX_END_S = 10.0  # for killed processes to end


class Run:
  """A started command. The caller polls `stdout`, `stderr` and `pidfd`.

  When `pidfd` is readable, call `first_ended`; then call `ended` whenever one of
  `init_fds` is readable, and periodically; when it is True, call `result` and `close`.

  Raises:
    OSError: the command could not be started.
  """

  def __init__(self, request: int, box, command: bytes, wall_s: float):
    self.request = request
    self.box = box
    self.ended_by = ''  # 'wall', 'output' or 'cancel', if it was killed
    self.inits = set()  # processes 1 that were not reaped
    self.init_fds = []
    self.ending = False  # the first process has ended
    self.pid = None  # of the first process, until it is reaped
    self._dropped_bytes = 0
    self._oom_kills = box.group.oom_kills() if box.group else 0
    self._started = time.monotonic()
    self._give_up = None
    self.deadline = self._started + wall_s
    pipes = []
    try:
      for _ in range(3):
        pipes.append(os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
      for _, write_end in pipes[:2]:
        os.set_blocking(write_end, True)  # programs do not expect EAGAIN
      streams = commands.Streams(*(write_end for _, write_end in pipes))
      self.pid = commands.start(box, command, streams)
      self.pidfd = os.pidfd_open(self.pid)
    except OSError:
      for read_end, _ in pipes:
        os.close(read_end)
      if self.pid is not None:
        self.kill('cancel')
        os.waitpid(self.pid, 0)
      raise
    finally:
      for _, write_end in pipes:
        os.close(write_end)
    self.stdout, self.stderr, self._status = (read_end for read_end, _ in pipes)
    self._output = {self.stdout: [], self.stderr: []}
    limit = box.limits['output_bytes']
    self._left = {self.stdout: limit, self.stderr: limit}

  def read_output(self, fd: int) -> str:
    """Reads once from `stdout` or `stderr`. Returns the state of the pipe."""
    try:
      data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
      return EMPTY
    if not data:
      return CLOSED
    taken = data[: self._left[fd]]
    if taken:
      self._output[fd].append(taken)
      self._left[fd] -= len(taken)
    self._dropped_bytes += len(data) - len(taken)
    limit = self.box.limits['output_bytes'] * _DROPPED_OUTPUT_FACTOR
    if self._dropped_bytes > limit:
      self.kill('output')
    return OPEN

  def kill(self, ended_by: str) -> None:
    """Kills the first process; records the reason of the first call."""
    if self.pid is None:
      return
    self.ended_by = self.ended_by or ended_by
    # The group includes bubblewrap's init, even before it is set to die with its
    # parent.
    for kill in (os.killpg, os.kill):
      with contextlib.suppress(ProcessLookupError):
        kill(self.pid, signal.SIGKILL)

  # The end --------------------------------------------------------------------------

  def first_ended(self, others: set[int]) -> None:
    """Reaps the first process and kills the rest of the command.

    Args:
      others: processes 1 and first processes of other commands.
    """
    self.ending = True
    self._wall_s = time.monotonic() - self._started
    self._give_up = time.monotonic() + _MAX_END_S
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.pid, signal.SIGKILL)
    self._report = b''
    with contextlib.suppress(BlockingIOError):
      self._report = os.read(self._status, _READ_BYTES)
    self._wait_status = os.waitpid(self.pid, 0)[1]
    self.pid = None
    if self.box.shared is None:
      return
    init = self._reported('child-pid')
    if init is not None:
      self.inits = {init} - others
    elif not self._report.startswith(b'!'):
      # Killed before bubblewrap reported: any orphan may be its init, and every orphan
      # is the init of some ended command.
      self.inits = set(linux.children()) - others
    for init in list(self.inits):
      if not self._is_ended(init):
        os.kill(init, signal.SIGKILL)
        self.init_fds.append(os.pidfd_open(init))

  def _is_ended(self, init: int) -> bool:
    """Whether a process is no longer a child; reaps it if it has ended."""
    with contextlib.suppress(ChildProcessError):
      if os.waitpid(init, os.WNOHANG)[0] == 0:
        return False
    self.inits.discard(init)
    return True

  def ended(self) -> bool:
    """Whether all processes of the command have ended; kills those that have not.

    Raises:
      TimeoutError: they have not ended within `_MAX_END_S`.
    """
    alive = [init for init in list(self.inits) if not self._is_ended(init)]
    if not alive:
      survivors = self.box.survivors()
      if not survivors:
        return True
      for pid in survivors:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
    if time.monotonic() > self._give_up:
      raise TimeoutError('killed processes of the command did not end')
    return False

  def result(self) -> tuple[str | None, tuple | None]:
    """The result to reply with; call it once.

    Returns:
      `(error, None)` if the sandbox failed, or `(None, (exit code, stdout, stderr,
      dropped bytes, elapsed seconds, ended by, killed for memory))`.
    """
    for fd in (self.stdout, self.stderr):
      for _ in range(_MAX_PIPE_BYTES // _READ_BYTES + 1):
        if self.read_output(fd) != OPEN:
          break
    code, failure = self._outcome()
    group = self.box.group
    oom = group is not None and group.oom_kills() > self._oom_kills
    if self.ended_by == 'wall':
      code, failure = 124, ''
    elif self.ended_by or (oom and failure):
      code, failure = 137, ''
    stdout, stderr = (b''.join(pieces) for pieces in self._output.values())
    if failure:
      return f'{failure} {stderr.decode(errors="replace")}', None
    numbers = (self._dropped_bytes, self._wall_s, self.ended_by, oom)
    return None, (code, stdout, stderr, *numbers)

  def close(self) -> None:
    """Closes the descriptors."""
    for fd in (self.stdout, self.stderr, self._status, self.pidfd, *self.init_fds):
      os.close(fd)

  def _outcome(self) -> tuple[int, str]:
    """Returns (exit code, '') of the command, or (code, why it did not run)."""
    code = os.waitstatus_to_exitcode(self._wait_status)
    code = 128 - code if code < 0 else code
    if self._report.startswith(b'!'):
      return code, self._report[1:].decode(errors='replace').strip()
    if self.box.shared is None:
      return code, ''
    exit_code = self._reported('exit-code')
    if exit_code is not None:
      return exit_code, ''
    return code, f'bubblewrap exited with {code} before the command:'

  def _reported(self, key: str) -> int | None:
    """A number in bubblewrap's report (`--json-status-fd`)."""
    for line in self._report.splitlines():
      with contextlib.suppress(ValueError):
        value = json.loads(line).get(key)
        if value is not None:
          return value
    return None
