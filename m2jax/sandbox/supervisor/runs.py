"""One command in progress: its pipes, what is kept of its output, how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

import commands

OPEN, EMPTY, CLOSED = 'open', 'empty', 'closed'
_READ_BYTES = 65536
# Output past the limit is read and dropped; a command that prints this many times the
# limit is not worth the CPU time any more.
_DROPPED_OUTPUT_FACTOR = 64


class Box:
  """One sandbox: its directory, identity, limits and ready-made command line."""

  def __init__(self, path, uid, network, limits, argv, env, group, rlimits):
    self.path = path
    self.uid = uid
    self.network = network
    self.limits = limits
    self.argv = argv
    self.env = env
    self.group = group
    self.rlimits = rlimits
    self.run = None  # the command in progress
    self.closed = False


class Run:
  """A started command. The caller watches `stdout`, `stderr` and `pidfd`.

  Raises:
    OSError: it could not be started.
  """

  def __init__(self, request: int, box: Box, command: bytes, wall_s: float, stdin: int):
    self.request = request
    self.box = box
    self.ended_by = ''  # 'wall', 'output' or 'cancel', when we killed it
    self._dropped_bytes = 0
    self._oom_kills = box.group.oom_kills() if box.group else 0
    self._started = time.monotonic()
    self.deadline = self._started + wall_s
    pipes = []
    try:
      for _ in range(3):
        pipes.append(os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
      for _, write_end in pipes[:2]:
        os.set_blocking(write_end, True)  # programs do not expect EAGAIN
      self.pid = commands.start(
        [*box.argv, command],
        env=box.env,
        directory=box.path,
        uid=box.uid,
        network=box.network,
        join_fds=box.group.join_fds if box.group else [],
        limits=box.rlimits,
        stdin=stdin,
        stdout=pipes[0][1],
        stderr=pipes[1][1],
        status=pipes[2][1],
      )
    except OSError:
      for read_end, _ in pipes:
        os.close(read_end)
      raise
    finally:
      for _, write_end in pipes:
        os.close(write_end)
    self.stdout, self.stderr, self._status = (read_end for read_end, _ in pipes)
    self.pidfd = os.pidfd_open(self.pid)
    self._kept = {self.stdout: [], self.stderr: []}
    limit = box.limits['output_bytes']
    self._room = {self.stdout: limit, self.stderr: limit}

  def read_output(self, fd: int) -> str:
    """Reads once from `stdout` or `stderr`. Returns what the pipe then is."""
    try:
      data = os.read(fd, _READ_BYTES)
    except BlockingIOError:
      return EMPTY
    if not data:
      return CLOSED
    kept = data[: self._room[fd]]
    if kept:
      self._kept[fd].append(kept)
      self._room[fd] -= len(kept)
    self._dropped_bytes += len(data) - len(kept)
    limit = self.box.limits['output_bytes'] * _DROPPED_OUTPUT_FACTOR
    if self._dropped_bytes > limit:
      self.kill('output')
    return OPEN

  def kill(self, ended_by: str) -> None:
    """Kills the command, and remembers why if it is the first time."""
    self.ended_by = self.ended_by or ended_by
    # The group reaches bubblewrap's child before it has asked to die with its parent.
    for kill in (os.killpg, os.kill):
      with contextlib.suppress(ProcessLookupError):
        kill(self.pid, signal.SIGKILL)

  def finish(self, *, reported: bool) -> tuple[str | None, tuple | None]:
    """Collects a command whose first process has ended, and ends the others.

    Args:
      reported: bubblewrap reports the exit code; without a report it has failed.

    Returns:
      `(error, None)` where the sandbox failed, or `(None, (exit code, stdout, stderr,
      dropped bytes, elapsed seconds, ended by, killed for memory))`.
    """
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.pid, signal.SIGKILL)
    wall_s = time.monotonic() - self._started
    for fd in (self.stdout, self.stderr):
      # A pipe holds 16 pages by default; a survivor that goes on writing gets no more.
      for _ in range(16):
        if self.read_output(fd) != OPEN:
          break
    status = b''
    with contextlib.suppress(BlockingIOError):
      status = os.read(self._status, _READ_BYTES)
    for fd in (self.stdout, self.stderr, self._status, self.pidfd):
      os.close(fd)
    wait_status = self.wait()  # last: until now the pid is ours to kill
    code, failure = _outcome(wait_status, status, reported)
    group = self.box.group
    oom = group is not None and group.oom_kills() > self._oom_kills
    if self.ended_by == 'wall':
      code, failure = 124, ''
    elif self.ended_by or (oom and failure):
      code, failure = 137, ''
    stdout, stderr = (b''.join(pieces) for pieces in self._kept.values())
    if failure:
      return f'{failure} {stderr.decode(errors="replace")}', None
    result = (code, stdout, stderr, self._dropped_bytes, wall_s, self.ended_by, oom)
    return None, result

  def wait(self) -> int:
    """Waits for the first process. Returns its wait status."""
    return os.waitpid(self.pid, 0)[1]


def _outcome(wait_status: int, status: bytes, reported: bool) -> tuple[int, str]:
  """Returns (exit code, '') of the command, or what kept it from being run."""
  code = os.waitstatus_to_exitcode(wait_status)
  code = 128 - code if code < 0 else code
  if status.startswith(b'!'):
    return code, status[1:].decode(errors='replace').strip()
  if not reported:
    return code, ''
  for line in status.splitlines():
    with contextlib.suppress(ValueError):
      report = json.loads(line)
      if 'exit-code' in report:
        return report['exit-code'], ''
  return code, f'bubblewrap ended with {code} before the command did:'
