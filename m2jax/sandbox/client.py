"""The client of the supervisor: a socket, and a callback per reply.

The supervisor (`supervisor/`) starts once per event loop and kind of sandbox, by a
spawn that does not copy this process. A command costs the caller one send and one
receive.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from m2jax.sandbox import api, seccomp, temporary, unavailable

_HEADER_BYTES = 4
_REQUEST_BYTES = 8  # of a request's id beside a socket
_SCRIPT = Path(__file__).parent / 'supervisor'
_END_S = 5.0  # time for the supervisor to end all commands


def _environment() -> dict[str, str]:
  # No secrets, and no GLIBC_TUNABLES: huge pages would make each fork slow.
  names = ('LD_LIBRARY_PATH',)
  return {name: os.environ[name] for name in names if name in os.environ}


class Supervisor(asyncio.Protocol):
  """A running supervisor process."""

  def __init__(self):
    self.found = {}  # reported by its start
    self._received = bytearray()
    self._replies = {}  # request id -> Future
    self._next_request = 0
    self._transport = None
    self._socket = None
    self._descriptors = None  # over which sockets come
    self._listeners = {}  # that have come, by request
    self._process = None
    self._directory = None

  async def start(self, backend: str, host: api.Host) -> None:
    """Starts the process, which prepares the machine.

    Raises:
      SandboxError: this failed; the message has the reason.
    """
    # Not $TMPDIR for root: unprivileged uids must be able to enter the directory.
    place = '/tmp' if os.geteuid() == 0 else None
    self._directory, self._held = temporary.directory('m2jax-sandbox-', place)
    self._socket, theirs = socket.socketpair()
    self._descriptors, sender = socket.socketpair(type=socket.SOCK_SEQPACKET)
    self._descriptors.setblocking(False)
    given = theirs.fileno(), sender.fileno()
    try:
      self._process = subprocess.Popen(
        [sys.executable, '-I', '-S', _SCRIPT, *map(str, (*given, os.getpid()))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=given,
        env=_environment(),
        start_new_session=True,  # the caller handles Ctrl-C
      )
    finally:
      theirs.close()
      sender.close()
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: self, sock=self._socket)
    config = {
      'backend': backend,
      'directory': self._directory,
      'uids': host.uids or api.default_uids(),
      'read_only': host.read_only,
      'hidden': host.hidden,
      'parallel': host.parallel_execs,
      'cgroups': host.cgroups and backend != 'rlimit_only',
      'filters': (),
      'runsc': unavailable.runsc() if backend == 'gvisor' else '',
    }
    reason = 'not in this mode'
    if backend == 'namespaces':
      config['filters'], reason = seccomp.programs()
    self.found = await self.call('start', config)
    self.found['filter'] = bool(config['filters'])
    self.found['filter_reason'] = reason

  @property
  def alive(self) -> bool:
    """Whether it accepts requests."""
    return self._transport is not None and not self._transport.is_closing()

  @property
  def pid(self) -> int:
    """The process id."""
    return self._process.pid

  @property
  def root(self) -> Path:
    """The root directory of the supervisor's mount namespace."""
    return Path(f'/proc/{self._process.pid}/root')

  async def call(self, operation: str, *arguments):
    """Sends a request and waits for its reply.

    Raises:
      SandboxError: the request failed, or the supervisor has exited.
    """
    _, reply = self.request(operation, *arguments)
    return await reply

  def request(self, operation: str, *arguments) -> tuple[int, asyncio.Future]:
    """Sends a request. Returns its number and the future of its reply.

    Raises:
      SandboxError: the supervisor has exited.
    """
    if not self.alive:
      raise api.SandboxError('the sandbox supervisor has exited')
    number = self._next_request
    self._next_request += 1
    record = marshal.dumps((number, operation, arguments))
    self._transport.write(len(record).to_bytes(_HEADER_BYTES, 'little') + record)
    self._replies[number] = reply = asyncio.get_running_loop().create_future()
    return number, reply

  async def listener(self, number: int, port: int) -> socket.socket:
    """A socket that listens on a loopback port of a sandbox's network.

    Raises:
      SandboxError: the port is in use, or the supervisor has exited.
    """
    request, reply = self.request('listen', number, port)
    await reply  # the socket is sent before it
    with contextlib.suppress(BlockingIOError):
      while True:
        sent, fds, _, _ = socket.recv_fds(self._descriptors, _REQUEST_BYTES, 1)
        owner = int.from_bytes(sent, 'little')
        os.set_inheritable(fds[0], False)
        self._listeners[owner] = socket.socket(fileno=fds[0])
        if owner == request:
          break
    return self._listeners.pop(request)

  def notify(self, operation: str, *arguments) -> None:
    """Sends a request and ignores its reply; no effect if the process has exited."""
    if self.alive:
      number, _ = self.request(operation, *arguments)
      del self._replies[number]

  async def close(self) -> None:
    """Ends the process, and with it all commands, mounts and control groups."""
    if self._transport is not None:
      self._transport.close()
    await asyncio.to_thread(self._wait)

  def abandon(self) -> None:
    """Like `close`, if the event loop is already closed."""
    if self._socket is not None:
      with contextlib.suppress(OSError):
        self._socket.shutdown(socket.SHUT_RDWR)
    self._wait()

  def _wait(self) -> None:
    for listener in self._listeners.values():  # whose callers were cancelled
      listener.close()
    if self._descriptors is not None:
      self._descriptors.close()
    if self._process is not None:
      try:
        self._process.wait(_END_S)
      except subprocess.TimeoutExpired:
        self._process.kill()  # its children die with it
        self._process.wait()
    self._remove_directory()

  def _remove_directory(self) -> None:
    if self._directory:
      shutil.rmtree(self._directory, ignore_errors=True)
      os.close(self._held)
      self._directory = None

  # asyncio.Protocol -----------------------------------------------------------------

  def connection_made(self, transport) -> None:
    self._transport = transport

  def data_received(self, data: bytes) -> None:
    self._received += data
    while len(self._received) >= _HEADER_BYTES:
      end = _HEADER_BYTES + int.from_bytes(self._received[:_HEADER_BYTES], 'little')
      if len(self._received) < end:
        return
      number, error, result = marshal.loads(self._received[_HEADER_BYTES:end])
      del self._received[:end]
      reply = self._replies.pop(number, None)
      if reply is None or reply.done():
        continue
      if error is None:
        reply.set_result(result)
      else:
        reply.set_exception(api.SandboxError(error))

  def connection_lost(self, error) -> None:
    for reply in self._replies.values():
      if not reply.done():
        reply.set_exception(api.SandboxError('the sandbox supervisor has exited'))
    self._replies.clear()
    self._remove_directory()  # the supervisor has done this, unless it was killed
