"""A sandbox in use: `exec`, `read`, `write`, `snapshot`, `restore`, `destroy`.

Backend 'bubblewrap': every command is one bubblewrap run with its own namespaces and
no network, under a uid that is not root, in a workspace that persists between commands.
The workspace is an in-memory file system of limited size, mounted where only the
supervisor sees it: it cannot fill the host's disk, and goes with the job, however that
ends.
Backend 'rlimit_only' is weaker and has to be asked for by name: the command sees the
host's files and network; it has rlimits, and its process group is killed at the end.
Source: DESIGN §6, facts/pipelines.md §1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from m2jax.sandbox import api, archive, files

_ARCHIVE_OVERHEAD_BYTES = 64 << 20  # headers, long names
_MAX_COMMAND_BYTES = 120_000  # the kernel takes 131,072 in one argument


class Sandbox:
  """A workspace and the right to run commands in it. Made by `create`."""

  def __init__(self, supervisor, backend, limits, number, path, uid):
    self._supervisor = supervisor
    self._number = number
    self._busy = asyncio.Lock()
    self._ending = None
    self._workspace = path
    self._uid = uid
    self._root_fd = _open_directory(path)
    self._tree = files.Tree(self._root_fd, uid)
    self.backend = backend
    self.limits = limits

  @property
  def supervisor_facts(self) -> Mapping:
    """What the supervisor found: `root`, `cgroups` ('v1', 'v2', 'none'), the reason."""
    return self._supervisor.found

  @property
  def supervisor_pid(self) -> int:
    """Process that starts the commands; its children's times are theirs."""
    return self._supervisor.pid

  @property
  def workspace(self) -> Path:
    """Directory through which this machine's code may look at the workspace.

    Do not trust what a command left there: `read` follows no links, `open` does.
    """
    self._check_open()
    return self._workspace

  async def exec(self, command: str, timeout_s: float | None = None) -> api.ExecResult:
    """Runs a bash command; commands of one sandbox run one after another.

    Nothing of a command lives on but the files in the workspace: the result is there
    when every process of it has ended. Cancelling kills it; the sandbox's next call
    waits until that is done.

    Args:
      command: text for `bash -c`, in the workspace directory, without input.
      timeout_s: elapsed time after which it is killed, if below `limits.wall_s`.

    Raises:
      ValueError: `timeout_s` is not a positive number.
      SandboxError: the sandbox failed; says nothing about the command.
    """
    wall_s = self._wall_s(timeout_s)
    text = command.encode(errors='replace')
    if b'\0' in text:
      return api.ExecResult(126, '', 'bash: the command contains a NUL byte\n')
    if len(text) > _MAX_COMMAND_BYTES:
      return api.ExecResult(
        126, '', f'bash: the command is longer than {_MAX_COMMAND_BYTES} bytes\n'
      )
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

  def _wall_s(self, timeout_s: float | None) -> float:
    if timeout_s is None:
      return float(self.limits.wall_s)
    if not timeout_s > 0:  # nan is not
      raise ValueError(f'timeout_s: want a positive number, got {timeout_s!r}')
    return float(min(timeout_s, self.limits.wall_s))

  async def _exec(self, command: bytes, wall_s: float) -> tuple:
    await self._busy.acquire()
    try:
      self._check_open()
      number, reply = self._supervisor.request('exec', self._number, command, wall_s)
    except BaseException:
      self._busy.release()
      raise
    # The reply, not this coroutine, tells when the command has ended.
    reply.add_done_callback(self._over)
    try:
      return await asyncio.shield(reply)
    except asyncio.CancelledError:
      self._supervisor.tell('cancel', number)
      raise

  async def _alone(self, work: Callable):
    """Awaits `work()` to its end, even if the caller does not; nothing else runs."""
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
      done.exception()  # where the caller has gone, nobody else will ask

  async def read(
    self, path: str | PurePosixPath, max_bytes: int | None = None
  ) -> bytes:
    """Returns a file of the workspace, following no link.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      SandboxPathError: not a plain file inside the workspace, or above `max_bytes`
        (default: `limits.workspace_bytes`).
    """
    async with self._busy:
      self._check_open()
      return self._tree.read(path, max_bytes or self.limits.workspace_bytes)

  async def write(
    self, path: str | PurePosixPath, data: bytes, mode: int = 0o644
  ) -> None:
    """Puts a file in the workspace, in place of what was there, following no link.

    Raises:
      SandboxPathError: `path` leaves the workspace or passes a link.
      OSError: the workspace is full.
    """
    async with self._busy:
      self._check_open()
      self._tree.write(path, data, mode)

  async def snapshot(self) -> bytes:
    """Returns the workspace as an uncompressed tar, for `restore`.

    Pipes, sockets and extended attributes are left out.

    Raises:
      SandboxPathError: it would be larger than `limits.workspace_bytes` and 64 MiB for
        names. An agent can cause that.
    """

    async def work():
      limit = self.limits.workspace_bytes + _ARCHIVE_OVERHEAD_BYTES
      return await asyncio.to_thread(archive.pack, self._root_fd, limit)

    return await self._alone(work)

  async def restore(self, snapshot: bytes) -> None:
    """Makes the workspace what it was when `snapshot` was taken.

    Takes the memory of a second workspace until it is done. If it fails the workspace
    is as it was.

    Raises:
      SandboxError: `snapshot` is not of `Sandbox.snapshot`, or the sandbox failed.
      OSError: the files do not fit into `limits.workspace_bytes`.
    """
    await self._alone(lambda: self._restore(snapshot))

  async def _restore(self, snapshot: bytes) -> None:
    path = await self._supervisor.call('stage', self._number)
    if self.backend == 'bubblewrap':
      path = self._supervisor.root / path.lstrip('/')
    fd = None
    try:
      fd = _open_directory(path)
      await asyncio.to_thread(_unpack, fd, self._uid, snapshot)
      await self._supervisor.call('adopt', self._number)
    except BaseException:
      if fd is not None:
        await self._forget(fd, path)
      self._supervisor.tell('unstage', self._number)
      raise
    old, self._root_fd = self._root_fd, fd
    self._tree = files.Tree(fd, self._uid)
    await self._forget(old, f'{self._workspace}.old')

  async def _forget(self, fd: int, path: str | Path) -> None:
    """Removes a workspace: a file system of its own goes when nobody has it open."""
    if self.backend == 'rlimit_only':
      await asyncio.to_thread(_remove, fd, path)
    os.close(fd)

  async def destroy(self) -> None:
    """Ends the sandbox and removes its workspace. A second call does nothing.

    A running command is killed at once. On return nothing of the sandbox is alive.
    """
    if self._ending is None:
      # Not after waiting for the lock, which a command may hold.
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
      await self._forget(fd, self._workspace)

  async def fill(self, source: Path) -> None:
    """Copies a directory of the host into an empty workspace.

    Its links are copied as links, never followed; pipes and sockets are left out.

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


def _remove(fd: int, path: str | Path) -> None:
  with contextlib.suppress(OSError, api.SandboxError):
    archive.clear(fd)
    os.rmdir(path)


def _unpack(fd: int, uid: int | None, snapshot: bytes) -> None:
  try:
    archive.unpack(fd, uid, snapshot)
  except (tarfile.TarError, ValueError, KeyError) as error:
    raise api.SandboxError(f'restore: not a snapshot of a sandbox: {error}') from error
