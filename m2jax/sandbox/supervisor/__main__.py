"""The supervisor: a small process that starts, limits, watches and ends commands.

A fork of the caller (a large, multi-threaded JAX process) would be slow and unsafe, so
this process forks instead: one thread, the standard library, a few MB. It runs as
`python -I -S m2jax/sandbox/supervisor SOCKET_FD DESCRIPTORS_FD CALLER_PID`. Requests
and replies are length-prefixed `marshal` records `(id, operation, arguments)` -> `(id,
error or None, result)` over a socket pair (both ends are the same interpreter); open
sockets for the caller go over a second pair, each in a message with the request's id.
It exits with its caller: at end of file it kills all commands and removes mounts and
control groups.
"""

from __future__ import annotations

import collections
import contextlib
import marshal
import os
import select
import signal
import socket
import sys
import time

import boxes
import runs

_HEADER_BYTES = 4
_REQUEST_BYTES = 8  # of a request's id beside a socket
_WATCH_CALLER_S = 5.0
_END_S = 4.0  # less than the caller waits for this process


class Supervisor:
  """Serves one caller until it exits."""

  def __init__(
    self, connection: socket.socket, descriptors: socket.socket, caller: int
  ):
    self._connection = connection
    self._descriptors = descriptors
    self._caller = caller
    self._received = bytearray()
    self._to_send = bytearray()
    self._epoll = select.epoll()
    self._on_event = {}  # fd -> function()
    self._boxes = {}
    self._ending = set()  # boxes whose process 1 was killed
    self._runs = {}  # request id -> Run
    self._waiting = collections.deque()  # (request id, box number, command, wall_s)
    self._machine = None

  # Requests -------------------------------------------------------------------------

  def _start(self, config: dict) -> dict:
    """Prepares the machine once. Returns facts for the caller's report."""
    self._machine = boxes.Machine(config)
    return self._machine.found()

  def _open(self, limits: dict, env: dict) -> tuple[int, str, int | None]:
    """Creates a sandbox. Returns its number, directory and uid (None: this one)."""
    box = self._machine.open(limits, env)
    self._boxes[box.number] = box
    return box.number, box.path, box.uid

  def _stage(self, number: int) -> str:
    return self._machine.stage(self._idle(number))

  def _adopt(self, number: int) -> None:
    self._machine.adopt(self._idle(number))

  def _unstage(self, number: int) -> None:
    self._machine.unstage(self._idle(number))

  def _listen(self, request: int, number: int, port: int) -> None:
    """Sends the caller a socket that listens in the sandbox's network."""
    with self._machine.listen(self._open_box(number), port) as listener:
      message = request.to_bytes(_REQUEST_BYTES, 'little')
      socket.send_fds(self._descriptors, [message], [listener.fileno()])

  def _open_box(self, number: int) -> boxes.Box:
    box = self._boxes.get(number)
    if box is None:
      raise OSError('the sandbox was destroyed')
    return box

  def _idle(self, number: int) -> boxes.Box:
    box = self._open_box(number)
    if box.run is not None:
      raise OSError('a command is running')
    return box

  def _close(self, request: int, number: int) -> None:
    """Ends a sandbox. Replies when nothing of it is left."""
    box = self._boxes.pop(number, None)
    if box is None:
      self._reply(request, None, None)
    else:
      box.closing.append(request)
      if box.run is not None:
        box.run.kill('cancel')  # `_finish` does the rest
      else:
        self._end_box(box)

  def _end_box(self, box: boxes.Box) -> None:
    """Ends process 1, and discards the sandbox when it has ended.

    It may take long: the kernel removes what the commands filled.
    """
    self._ending.add(box)
    process_1 = os.pidfd_open(box.init)
    os.kill(box.init, signal.SIGKILL)
    if box.broken:  # it may never end
      self._box_ended(box, process_1)
    else:
      self._watch(process_1, lambda: self._box_ended(box, process_1))

  def _box_ended(self, box: boxes.Box, process_1: int) -> None:
    self._unwatch(process_1)
    os.close(process_1)
    self._ending.discard(box)
    self._machine.discard(box)
    for request in box.closing:
      self._reply(request, None, None)

  # Commands -------------------------------------------------------------------------

  def _launch_waiting(self) -> None:
    """Starts waiting commands: one per sandbox, `parallel` in total."""
    waiting, self._waiting = self._waiting, collections.deque()
    for item in waiting:
      request, number, command, wall_s = item
      box = self._boxes.get(number)
      if box is None:
        self._reply(request, 'the sandbox was destroyed', None)
      elif box.run is not None or len(self._runs) >= self._machine.parallel:
        self._waiting.append(item)
      else:
        self._launch(request, box, command, wall_s)

  def _launch(self, request: int, box: boxes.Box, command: bytes, wall_s: float):
    try:
      run = runs.Run(request, box, command, wall_s)
    except Exception as error:  # noqa: BLE001 - affects this sandbox only
      self._reply(request, f'cannot start a command: {error}', None)
      return
    self._runs[request] = run
    box.run = run
    for fd in (run.stdout, run.stderr):
      self._watch(fd, lambda fd=fd: self._read_output(run, fd))
    self._watch(box.connection.fileno(), lambda: self._finish_if_ended(run))

  def _read_output(self, run: runs.Run, fd: int) -> None:
    if run.read_output(fd) == runs.CLOSED:
      self._unwatch(fd)

  def _finish_if_ended(self, run: runs.Run) -> None:
    try:
      if not run.ended():
        return
      error, result = run.result()
      run.box.unlock()
    except Exception as error:  # noqa: BLE001 - affects this sandbox only
      # The command may still be alive: its sandbox runs nothing more.
      run.box.broken = True
      self._boxes.pop(run.box.number, None)
      self._finish(run, f'a command did not end: {error}', None)
      return
    self._finish(run, error, result)

  def _finish(self, run: runs.Run, error: str | None, result) -> None:
    """Replies when no process of the command is left; discards a closing sandbox."""
    box = run.box
    for fd in (run.stdout, run.stderr, box.connection.fileno()):
      self._unwatch(fd)
    run.close()
    del self._runs[run.request]
    box.run = None
    self._reply(run.request, error, result)
    if box.number not in self._boxes:
      self._end_box(box)

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
      return
    if operation == 'cancel':
      self._cancel(*arguments)
      return
    handlers = {
      'start': self._start,
      'open': self._open,
      'stage': self._stage,
      'adopt': self._adopt,
      'unstage': self._unstage,
    }
    try:
      if operation == 'close':
        self._close(request, *arguments)
      elif operation == 'listen':
        self._reply(request, None, self._listen(request, *arguments))
      else:
        self._reply(request, None, handlers[operation](*arguments))
    except Exception as error:  # noqa: BLE001 - affects this request only
      self._reply(request, f'{operation}: {error}', None)

  def _cancel(self, cancelled: int) -> None:
    """Kills a command, or removes it if it is waiting. Both get a reply."""
    if cancelled in self._runs:
      self._runs[cancelled].kill('cancel')
    for item in [item for item in self._waiting if item[0] == cancelled]:
      self._waiting.remove(item)
      self._reply(cancelled, 'the command was cancelled', None)

  def run(self) -> None:
    """Serves until the caller exits, then ends all commands."""
    self._connection.setblocking(False)
    self._descriptors.setblocking(False)
    self._watch(self._connection.fileno(), self._serve_connection)
    try:
      while os.getppid() == self._caller:
        for fd, _ in self._epoll.poll(self._timeout_s()):
          function = self._on_event.get(fd)
          if function is not None:
            function()
        # Afterwards: a new file must not get the number of one with a pending event.
        self._launch_waiting()
        now = time.monotonic()
        for run in list(self._runs.values()):
          if run.deadline <= now:
            run.kill('wall')
            self._finish_if_ended(run)
    except (EOFError, ConnectionError):
      pass
    finally:
      self._end()

  def _timeout_s(self) -> float:
    now = time.monotonic()
    left = [run.deadline - now for run in self._runs.values()]
    return max(min([_WATCH_CALLER_S, *left]), 0.0)

  def _end(self) -> None:
    if self._machine is None:
      return
    deadline = time.monotonic() + _END_S
    for run in self._runs.values():
      run.kill('cancel')
    for run in self._runs.values():
      run.box.broken = True
      with contextlib.suppress(OSError):
        while run.box.broken and time.monotonic() < deadline:
          run.box.broken = not run.ended()
          time.sleep(0.001)
    running = [run.box for run in self._runs.values()]
    for box in {*self._boxes.values(), *running, *self._ending}:
      self._machine.discard(box)
    while not self._machine.remove() and time.monotonic() < deadline:
      time.sleep(0.01)


def main() -> None:
  connection, descriptors = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:3])
  connection.set_inheritable(False)
  descriptors.set_inheritable(False)
  os.umask(0o022)
  Supervisor(connection, descriptors, int(sys.argv[3])).run()


if __name__ == '__main__':
  main()
