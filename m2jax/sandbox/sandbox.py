"""A sandbox: `exec`, `read`, `write`, `listen`, `snapshot`, `restore`, `destroy`.

Backend 'namespaces': every sandbox has namespaces of its own, without a network, in
which process 1 runs one command after another (`supervisor/init.py`), under a uid that
is not root, in a workspace that persists between them. The workspace is an in-memory
file system of limited size in the supervisor's mount namespace: it cannot fill the
host's disk, and disappears with the job, however that ends.
Backend 'gvisor' is the same, but commands run in gVisor (`supervisor/gvisor.py`).
Backend 'rlimit_only' is weaker and must be chosen explicitly: the command sees the
host's files and network; it has rlimits, and its process group is killed at the end.
Source: DESIGN §6, facts/pipelines.md §1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from m2jax.sandbox import api, archive, files

_ARCHIVE_OVERHEAD_BYTES = 64 << 20  # headers, long names


class Sandbox:
  """A workspace, and commands in it. Use `create` to make one."""

  def __init__(self, supervisor, backend, limits, number, path, uid):
    self._supervisor = supervisor
    self._number = number
    self._busy = asyncio.Lock()
    self._ending = None
    self._workspace = path
    self._uid = uid
    self._root_fd = _open_directory(path)
    self._tree = files.Tree(self._root_fd, uid)
    self._listeners = []
    self.backend = backend
    self.limits = limits

  @property
  def supervisor_facts(self) -> Mapping:
    """Facts from the supervisor: `root`, `cgroups` ('v1', 'v2', 'none'), the reason."""
    return self._supervisor.found

  @property
  def supervisor_pid(self) -> int:
    """The process that starts the commands; its children's times are theirs."""
    return self._supervisor.pid

  @property
  def workspace(self) -> Path:
    """The workspace directory, for code on this machine.

    Its contents are untrusted: `read` follows no links, but `open` does.
    """
    self._check_open()
    return self._workspace

  async def exec(self, command: str, timeout_s: float | None = None) -> api.ExecResult:
    """Runs a bash command; commands of a sandbox run sequentially.

    Only files in the workspace outlast a command: the result is available when all its
    processes have ended. Cancellation kills the command; the next call waits for this.

    Args:
      command: text for `bash -c`, in the workspace directory, without input.
      timeout_s: elapsed time until it is killed, if below `limits.wall_s`.

    Raises:
      ValueError: `timeout_s` is not a positive number.
      SandboxError: the sandbox failed, not the command.
    """
    wall_s = api.wall_s(self.limits, timeout_s)
    if (refused := api.impossible(command)) is not None:
      return refused
    text = command.encode(errors='replace')
    (
      returncode,
      stdout,
      stderr,
      dropped_bytes,
      elapsed_s,
      ended_by,
      oom,
    ) = await self._exec(text, wall_s)
    return api.ExecResult(
      returncode=returncode,
      stdout=stdout.decode(errors='replace'),
      stderr=stderr.decode(errors='replace'),
      truncated=dropped_bytes > 0,
      wall_s=elapsed_s,
      timed_out=ended_by == 'wall',
      oom=oom,
    )

  async def _exec(self, command: bytes, wall_s: float) -> tuple:
    await self._busy.acquire()
    try:
      self._check_open()
      number, reply = self._supervisor.request('exec', self._number, command, wall_s)
    except BaseException:
      self._busy.release()
      raise
    # The command has ended when the reply comes, even if this coroutine is cancelled.
    reply.add_done_callback(self._over)
    try:
      return await asyncio.shield(reply)
    except asyncio.CancelledError:
      self._supervisor.notify('cancel', number)
      raise

  async def _alone(self, work: Callable):
    """Runs `work()` exclusively and to its end, even if the caller is cancelled."""
    await self._busy.acquire()
    try:
      self._check_open()
      task = asyncio.ensure_future(work())
    except BaseException:
      self._busy.release()
      raise
    task.add_done_callback(self._over)
    return await asyncio.shield(task)

  def _over(self, done: asyncio.Future) -> None:
    self._busy.release()
    if not done.cancelled():
      done.exception()  # mark it as retrieved if the caller was cancelled

  async def read(
    self, path: str | PurePosixPath, max_bytes: int | None = None
  ) -> bytes:
    """Returns the content of a file of the workspace, without following links.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      SandboxPathError: not a regular file in the workspace, or above `max_bytes`
        (default: `limits.workspace_bytes`).
    """
    async with self._busy:
      self._check_open()
      return self._tree.read(path, max_bytes or self.limits.workspace_bytes)

  async def write(
    self, path: str | PurePosixPath, data: bytes, mode: int = 0o644
  ) -> None:
    """Writes a file in the workspace, replacing what was there; follows no links.

    Raises:
      SandboxPathError: `path` leaves the workspace or contains a link.
      OSError: the workspace is full.
    """
    async with self._busy:
      self._check_open()
      self._tree.write(path, data, mode)

  async def listen(self, port: int) -> socket.socket:
    """Listens on 127.0.0.1:`port` of the sandbox's own network.

    Only commands of this sandbox can connect, so a connection proves who its client is.
    The socket stops listening when the sandbox is destroyed; the caller closes it.
    'rlimit_only' has no network of its own: there the socket is on a free port of this
    machine, and everybody on it can connect.

    Raises:
      SandboxError: the port is in use.
    """
    self._check_open()
    if self.backend == 'rlimit_only':
      listener = socket.create_server(('127.0.0.1', 0))
    else:
      asked = asyncio.ensure_future(self._supervisor.listener(self._number, port))
      try:
        listener = await asyncio.shield(asked)
      except asyncio.CancelledError:
        asked.add_done_callback(_close_unwanted)
        raise
    if self._ending is not None:
      listener.close()
    self._check_open()
    self._listeners.append(listener.dup())
    return listener

  def _stop_listening(self) -> None:
    """Ends the caller's listeners: the network goes with the sandbox."""
    for listener in self._listeners:
      with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # also ends that of the caller
      listener.close()
    self._listeners.clear()

  async def snapshot(self) -> bytes:
    """Returns the workspace as an uncompressed tar, for `restore`.

    Pipes, sockets and extended attributes are omitted.

    Raises:
      SandboxPathError: it would be larger than `limits.workspace_bytes` plus 64 MiB for
        names. An agent can cause this.
    """

    async def work():
      limit = self.limits.workspace_bytes + _ARCHIVE_OVERHEAD_BYTES
      return await asyncio.to_thread(archive.pack, self._root_fd, limit)

    return await self._alone(work)

  async def restore(self, snapshot: bytes) -> None:
    """Restores the workspace from a snapshot.

    Needs the memory of a second workspace in the meantime. If it fails, the workspace
    is unchanged.

    Raises:
      SandboxError: `snapshot` is not from `Sandbox.snapshot`, or the sandbox failed.
      OSError: the files do not fit into `limits.workspace_bytes`.
    """
    await self._alone(lambda: self._restore(snapshot))

  async def _restore(self, snapshot: bytes) -> None:
    path = await self._supervisor.call('stage', self._number)
    if self.backend != 'rlimit_only':
      path = self._supervisor.root / path.lstrip('/')
    fd = None
    try:
      fd = _open_directory(path)
      await asyncio.to_thread(_unpack, fd, self._uid, snapshot)
      await self._supervisor.call('adopt', self._number)
    except BaseException:
      if fd is not None:
        await self._remove(fd, path)
      self._supervisor.notify('unstage', self._number)
      raise
    old, self._root_fd = self._root_fd, fd
    self._tree = files.Tree(fd, self._uid)
    await self._remove(old, f'{self._workspace}.old')

  async def _remove(self, fd: int, path: str | Path) -> None:
    """Removes a workspace; closing the last descriptor removes a mounted one."""
    if self.backend == 'rlimit_only':
      await asyncio.to_thread(_clear, fd, path)
    os.close(fd)

  async def destroy(self) -> None:
    """Ends the sandbox and removes its workspace. Idempotent.

    Kills a running command at once. On return no process of the sandbox is alive.
    """
    if self._ending is None:
      self._stop_listening()
      # Before waiting for the lock, which a command may hold.
      reply = None
      with contextlib.suppress(api.SandboxError):
        _, reply = self._supervisor.request('close', self._number)
      self._ending = asyncio.ensure_future(self._end(reply))
    await asyncio.shield(self._ending)

  async def _end(self, reply: asyncio.Future | None) -> None:
    if reply is not None:
      with contextlib.suppress(api.SandboxError):
        await reply
    async with self._busy:
      fd, self._root_fd = self._root_fd, None
      await self._remove(fd, self._workspace)

  async def fill(self, source: Path) -> None:
    """Copies a directory of the host into an empty workspace.

    Links are copied as links, never followed; pipes and sockets are omitted.

    Raises:
      SandboxPathError: a file cannot be read.
      OSError: the files do not fit.
    """
    await self._alone(lambda: asyncio.to_thread(self._fill, source))

  def _fill(self, source: Path) -> None:
    limit = self.limits.workspace_bytes + _ARCHIVE_OVERHEAD_BYTES
    fd = _open_directory(source)
    try:
      archive.unpack(self._root_fd, self._uid, archive.pack(fd, limit, force=False))
    finally:
      os.close(fd)

  async def __aenter__(self) -> Sandbox:
    return self

  async def __aexit__(self, *unused) -> None:
    await self.destroy()

  def _check_open(self) -> None:
    if self._ending is not None:
      raise api.SandboxError('the sandbox was destroyed')


def _open_directory(path: str | Path) -> int:
  return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _close_unwanted(asked: asyncio.Future) -> None:
  """Closes a socket whose caller has stopped waiting for it."""
  if not asked.cancelled() and asked.exception() is None:
    asked.result().close()


def _clear(fd: int, path: str | Path) -> None:
  with contextlib.suppress(OSError, api.SandboxError):
    archive.clear(fd)
    os.rmdir(path)


def _unpack(fd: int, uid: int | None, snapshot: bytes) -> None:
  try:
    archive.unpack(fd, uid, snapshot)
  except (tarfile.TarError, ValueError, KeyError) as error:
    raise api.SandboxError(f'restore: not a snapshot of a sandbox: {error}') from error
