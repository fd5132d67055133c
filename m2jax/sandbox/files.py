"""Reads and writes files in a directory that untrusted commands can modify.

A command may leave symbolic links to host files, pipes that block their reader, or
directories replaced by links. Each component of a path is therefore opened separately,
relative to the previous one, without following links (open(2): O_NOFOLLOW,
O_NONBLOCK).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import PurePosixPath

from m2jax.sandbox import api

_MOUNT = PurePosixPath('/workspace')
OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | OPEN


class Tree:
  """Access to a workspace by a file descriptor of its root.

  Args:
    root_fd: open directory; the caller closes it.
    owner: uid of new files; None is the caller's.
    group: their gid; None is the number of the owner.
  """

  def __init__(self, root_fd: int, owner: int | None, group: int | None = None):
    self._root_fd = root_fd
    self._owner = owner
    self._group = owner if group is None else group

  def read(self, path: str | PurePosixPath, max_bytes: int) -> bytes:
    """Returns a regular file's content.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      SandboxPathError: `path` leaves the workspace, contains a link, is not a regular
        file, is unreadable, or larger than `max_bytes`.
    """
    names = parts(path)
    parent = self._parent(names, make=False)
    try:
      with explained(path):
        fd = os.open(names[-1], os.O_RDONLY | OPEN, dir_fd=parent)
    finally:
      os.close(parent)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
      os.close(fd)
      raise api.SandboxPathError(f'{path}: not a regular file')
    with open(fd, 'rb') as file:
      data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
      raise api.SandboxPathError(f'{path}: larger than {max_bytes} bytes')
    return data

  def open_directory(self, path: str | PurePosixPath, *, make: bool = False) -> int:
    """Returns a new descriptor of a directory.

    Args:
      path: relative to the root.
      make: whether to create what is missing of it.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      SandboxPathError: `path` leaves the tree, contains a link or is not a directory.
    """
    return self._parent([*parts(path), ''], make=make)

  def write(self, path: str | PurePosixPath, data: bytes, mode: int = 0o644) -> None:
    """Writes a file, replacing what is at `path`; creates missing directories.

    Raises:
      SandboxPathError: `path` leaves the workspace, contains a link, or is a directory.
      WorkspaceFull: no space is left.
    """
    names = parts(path)
    try:
      parent = self._parent(names, make=True)
      try:
        self._write_at(parent, names[-1], path, data, mode)
      finally:
        os.close(parent)
    except OSError as error:
      if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        raise
      raise api.WorkspaceFull(error.errno, error.strerror, str(path)) from error

  def _write_at(self, parent: int, name: str, path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN
    with explained(path):
      try:
        fd = os.open(name, flags, mode, dir_fd=parent)
      except FileExistsError:
        os.unlink(name, dir_fd=parent)  # the link or pipe itself, never its target
        fd = os.open(name, flags, mode, dir_fd=parent)
    with open(fd, 'wb', buffering=0) as file:
      self._own(fd)
      os.fchmod(fd, mode)
      view = memoryview(data)
      while view:
        view = view[file.write(view) :]

  def _parent(self, names: list[str], *, make: bool) -> int:
    """Returns a new descriptor of the directory that contains the last of `names`."""
    fd = os.dup(self._root_fd)
    for number, name in enumerate(names[:-1], start=1):
      try:
        with explained('/'.join(names[:number])):
          try:
            inner = os.open(name, DIRECTORY, dir_fd=fd)
          except FileNotFoundError:
            if not make:
              raise
            os.mkdir(name, 0o755, dir_fd=fd)
            self._own(name, fd)
            inner = os.open(name, DIRECTORY, dir_fd=fd)
      finally:
        os.close(fd)
      fd = inner
    return fd

  def _own(self, what: int | str, directory: int | None = None) -> None:
    if self._owner is None:
      return
    if isinstance(what, int):
      os.fchown(what, self._owner, self._group)
    else:
      os.chown(what, self._owner, self._group, dir_fd=directory, follow_symlinks=False)


def parts(path: str | PurePosixPath) -> list[str]:
  """Splits a path relative to the workspace, or below /workspace."""
  pure = PurePosixPath(path)
  if pure.is_absolute():
    if not pure.is_relative_to(_MOUNT):
      raise api.SandboxPathError(f'{path}: not below {_MOUNT}')
    pure = pure.relative_to(_MOUNT)
  if not pure.parts or '..' in pure.parts or '\0' in str(pure):
    raise api.SandboxPathError(f'{path!r}: must be a file path in the workspace')
  return list(pure.parts)


class explained:
  """Converts errors of the kernel that an agent can cause to SandboxPathError."""

  _WORDS = {
    errno.ELOOP: 'a symbolic link, not followed',
    errno.ENOTDIR: 'contains something that is not a directory',
    errno.EISDIR: 'a directory',
    errno.ENXIO: 'not a regular file',
    errno.EACCES: 'permission denied',
    errno.EPERM: 'permission denied',
    errno.ENAMETOOLONG: 'name too long',
  }

  def __init__(self, path):
    self._path = path

  def __enter__(self):
    return self

  def __exit__(self, kind, error, traceback):
    if isinstance(error, OSError) and error.errno in self._WORDS:
      words = self._WORDS[error.errno]
      raise api.SandboxPathError(f'{self._path}: {words}') from error
    return False
