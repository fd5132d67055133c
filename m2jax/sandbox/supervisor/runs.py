"""A command in progress: its pipes, its output and its end.

Process 1 of the sandbox (`init.py`) starts the command, and reports when it and all
that it started have ended.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import socket
import time

import init

OPEN, EMPTY, CLOSED = 'open', 'empty', 'closed'
_READ_BYTES = 65536
# Output above the limit is read and dropped; a command that prints this many times the
# limit is killed.
_DROPPED_OUTPUT_FACTOR = 64
_MAX_PIPE_BYTES = 1 << 20  # maximum of fcntl F_SETPIPE_SZ
_MAX_END_S = 10.0  # for killed processes to end


class Run:
  """A started command. The caller polls `stdout`, `stderr` and the box's connection.

  When the connection is readable, or at `deadline`, call `ended`; when that is True,
  call `result` and `close`.

  Raises:
    OSError: the command could not be started.
  """

  def __init__(self, request: int, box, command: bytes, wall_s: float):
    self.request = request
    self.box = box
    self.ended_by = ''  # 'wall', 'output' or 'cancel', if it was killed
    self._dropped_bytes = 0
    self._oom_kills = box.group.oom_kills() if box.group else 0
    self._started = time.monotonic()
    self.deadline = self._started + wall_s
    self._end = None  # what process 1 reported
    pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(2)]
    try:
      for _, end in pipes:
        if box.uid is not None:
          os.fchown(end, box.uid, box.uid)
      message = marshal.dumps(('run', command))
      socket.send_fds(box.connection, [message], [end for _, end in pipes])
    except OSError:
      for read_end, _ in pipes:
        os.close(read_end)
      raise
    finally:
      for _, write_end in pipes:
        os.close(write_end)
    self.stdout, self.stderr = (read_end for read_end, _ in pipes)
    limit = box.limits['output_bytes']
    self._output, self._left = {}, {}
    for fd in (self.stdout, self.stderr):
      os.set_blocking(fd, False)  # the write end blocks: programs do not expect EAGAIN
      self._output[fd], self._left[fd] = [], limit

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
    """Has the command killed; records the reason of the first call."""
    if self.ended_by:
      return
    self.ended_by = ended_by
    self._wall_s = time.monotonic() - self._started
    self.deadline = time.monotonic() + _MAX_END_S
    with contextlib.suppress(OSError):
      self.box.connection.send(marshal.dumps(('kill',)))

  def ended(self) -> bool:
    """Whether all processes of the command have ended.

    Raises:
      OSError: process 1 has ended, or those that were killed did not end in time.
    """
    try:
      data = self.box.connection.recv(init.MESSAGE_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
      if self.ended_by and time.monotonic() > self.deadline:
        raise TimeoutError('killed processes of the command did not end') from None
      return False
    if not data:
      raise OSError('process 1 of the sandbox has ended')
    self._end = marshal.loads(data)
    if not self.ended_by:
      self._wall_s = time.monotonic() - self._started
    return True

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
    failure, status = self._end
    code = os.waitstatus_to_exitcode(status)
    code = 128 - code if code < 0 else code
    group = self.box.group
    oom = group is not None and group.oom_kills() > self._oom_kills
    if self.ended_by == 'wall':
      code, failure = 124, ''
    elif self.ended_by or (oom and (failure or code == 128 + signal.SIGKILL)):
      code, failure = 137, ''
    if failure:
      return failure, None
    stdout, stderr = (b''.join(pieces) for pieces in self._output.values())
    numbers = (self._dropped_bytes, self._wall_s, self.ended_by, oom)
    return None, (code, stdout, stderr, *numbers)

  def close(self) -> None:
    """Closes the descriptors."""
    for fd in (self.stdout, self.stderr):
      os.close(fd)
