"""The caller's side of the supervisor: one socket, one callback per reply.

The supervisor (`supervisor/`) is started once per event loop and kind of sandbox, by
a spawn that does not copy this process. Costs the caller one send and one receive per
command.
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
import tempfile
from pathlib import Path

from m2jax.sandbox import api, seccomp

_HEADER_BYTES = 4
_SCRIPT = Path(__file__).parent / 'supervisor'
_END_S = 5.0  # for the supervisor to end every command


def _kept_environment() -> dict[str, str]:
  # No secrets, and no GLIBC_TUNABLES: huge pages would make each fork slow.
  names = ('LD_LIBRARY_PATH',)
  return {name: os.environ[name] for name in names if name in os.environ}


class Supervisor(asyncio.Protocol):
  """A running supervisor process."""

  def __init__(self):
    self.found = {}  # what its start reported
    self._received = bytearray()
    self._replies = {}  # request id -> Future
    self._next_request = 0
    self._transport = None
    self._socket = None
    self._process = None
    self._directory = None

  async def start(self, backend: str, host: api.Host) -> None:
    """Starts the process and has it prepare the machine.

    Raises:
      SandboxError: it could not; the text says why.
    """
    # Not $TMPDIR for root: a uid that owns nothing must be able to walk there.
    place = '/tmp' if os.geteuid() == 0 else None
    self._directory = tempfile.mkdtemp(prefix='m2jax-sandbox-', dir=place)
    self._socket, theirs = socket.socketpair()
    try:
      self._process = subprocess.Popen(
        [sys.executable, '-I', '-S', _SCRIPT, str(theirs.fileno()), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        env=_kept_environment(),
        start_new_session=True,  # Ctrl-C is the caller's to handle
      )
    finally:
      theirs.close()
    loop = asyncio.get_running_loop()
    await loop.create_connection(lambda: self, sock=self._socket)
    config = {
      'backend': backend,
      'bwrap': shutil.which('bwrap'),
      'directory': self._directory,
      'uids': host.uids or api.default_uids(),
      'read_only': host.read_only,
      'parallel': host.parallel_execs,
      'cgroups': host.cgroups and backend == 'bubblewrap',
      'filter': None,
    }
    reason = 'not in this mode'
    if backend == 'bubblewrap':
      config['filter'], reason = seccomp.program()
    self.found = await self.call('start', config)
    self.found['filter'] = config['filter'] is not None
    self.found['filter_reason'] = reason

  @property
  def alive(self) -> bool:
    """Whether requests can still be made."""
    return self._transport is not None and not self._transport.is_closing()

  @property
  def pid(self) -> int:
    """Its process id."""
    return self._process.pid

  @property
  def root(self) -> Path:
    """This machine's file tree as the supervisor sees it, with its own mounts."""
    return Path(f'/proc/{self._process.pid}/root')

  async def call(self, operation: str, *arguments):
    """Makes a request and waits for its reply.

    Raises:
      SandboxError: the supervisor could not do it, or has ended.
    """
    _, reply = self.request(operation, *arguments)
    return await reply

  def request(self, operation: str, *arguments) -> tuple[int, asyncio.Future]:
    """Makes a request. Returns its number and its reply to come.

    Raises:
      SandboxError: the supervisor has ended.
    """
    if not self.alive:
      raise api.SandboxError('the sandbox supervisor has ended')
    number = self._next_request
    self._next_request += 1
    record = marshal.dumps((number, operation, arguments))
    self._transport.write(len(record).to_bytes(_HEADER_BYTES, 'little') + record)
    self._replies[number] = reply = asyncio.get_running_loop().create_future()
    return number, reply

  def tell(self, operation: str, *arguments) -> None:
    """Makes a request whose reply does not matter; nothing if the process is gone."""
    if self.alive:
      number, _ = self.request(operation, *arguments)
      del self._replies[number]

  async def close(self) -> None:
    """Ends the process and with it every command, mount and control group."""
    if self._transport is not None:
      self._transport.close()
    await asyncio.to_thread(self._wait)

  def abandon(self) -> None:
    """Like `close`, for when the event loop is already closed."""
    if self._socket is not None:
      with contextlib.suppress(OSError):
        self._socket.shutdown(socket.SHUT_RDWR)
    self._wait()

  def _wait(self) -> None:
    if self._process is not None:
      try:
        self._process.wait(_END_S)
      except subprocess.TimeoutExpired:
        self._process.kill()  # what it started dies with it
        self._process.wait()
    self._remove_directory()

  def _remove_directory(self) -> None:
    if self._directory:
      shutil.rmtree(self._directory, ignore_errors=True)

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
        reply.set_exception(api.SandboxError('the sandbox supervisor has ended'))
    self._replies.clear()
    self._remove_directory()  # the supervisor does, unless it was killed
