"""Reading and writing a directory that an untrusted command has had its hands in.

A command may leave symbolic links to host files, pipes that block their reader, or
directories swapped for links. So each step of a path is opened on its own, relative to
the one before it, and no link is ever followed (open(2): O_NOFOLLOW, O_NONBLOCK).
"""

from __future__ import annotations

import errno
import io
import os
import stat
import tarfile
from pathlib import PurePosixPath

from m2jax.sandbox import api

_MOUNT = PurePosixPath('/workspace')
_OPEN = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | _OPEN


class Tree:
  """A workspace seen through a file descriptor of its root.

  Args:
    root_fd: open directory; stays the caller's.
    owner: uid and gid that new files get; None leaves them the caller's.
  """

  def __init__(self, root_fd: int, owner: int | None):
    self._root_fd = root_fd
    self._owner = owner

  def read(self, path: str | PurePosixPath, max_bytes: int) -> bytes:
    """Returns a regular file's content.

    Raises:
      FileNotFoundError: there is nothing at `path`.
      SandboxPathError: `path` leaves the workspace, passes a link, is not a regular
        file, is unreadable, or holds more than `max_bytes`.
    """
    parts = _parts(path)
    parent = self._parent(parts, make=False)
    try:
      with _explained(path):
        fd = os.open(parts[-1], os.O_RDONLY | _OPEN, dir_fd=parent)
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

  def write(self, path: str | PurePosixPath, data: bytes, mode: int = 0o644) -> None:
    """Puts a file in place of whatever is at `path`; makes missing directories.

    Raises:
      SandboxPathError: `path` leaves the workspace, passes a link, or is a directory.
      OSError: the workspace is full.
    """
    parts = _parts(path)
    parent = self._parent(parts, make=True)
    try:
      self._write_at(parent, parts[-1], path, data, mode)
    finally:
      os.close(parent)

  def _write_at(self, parent: int, name: str, path, data: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
    with _explained(path):
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

  def snapshot(self) -> bytes:
    """Returns the tree as an uncompressed tar; links as links, pipes left out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w', format=tarfile.PAX_FORMAT) as tar:
      self._add(tar, self._root_fd, '')
    return buffer.getvalue()

  def _add(self, tar: tarfile.TarFile, directory: int, prefix: str) -> None:
    for name in sorted(os.listdir(directory)):
      info = os.stat(name, dir_fd=directory, follow_symlinks=False)
      entry = tarfile.TarInfo(prefix + name)
      entry.mode = stat.S_IMODE(info.st_mode)
      entry.mtime = info.st_mtime
      if stat.S_ISDIR(info.st_mode):
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
        with _explained(prefix + name):
          fd = os.open(name, _DIRECTORY, dir_fd=directory)
        try:
          self._add(tar, fd, f'{prefix}{name}/')
        finally:
          os.close(fd)
      elif stat.S_ISLNK(info.st_mode):
        entry.type = tarfile.SYMTYPE
        entry.linkname = os.readlink(name, dir_fd=directory)
        tar.addfile(entry)
      elif stat.S_ISREG(info.st_mode):
        with _explained(prefix + name):
          fd = os.open(name, os.O_RDONLY | _OPEN, dir_fd=directory)
        with open(fd, 'rb') as file:
          entry.size = os.fstat(fd).st_size
          tar.addfile(entry, file)

  def restore(self, snapshot: bytes) -> None:
    """Makes the tree what it was when `snapshot` was taken."""
    self.clear()
    directories = []
    with tarfile.open(fileobj=io.BytesIO(snapshot), mode='r') as tar:
      for entry in tar:
        parts = _parts(entry.name)
        parent = self._parent(parts, make=True)
        name = parts[-1]
        try:
          if entry.isdir():
            os.mkdir(name, 0o700, dir_fd=parent)
            self._own(name, parent)
            directories.append((parts, entry.mode))
          elif entry.issym():
            os.symlink(entry.linkname, name, dir_fd=parent)
            self._own(name, parent)
          else:
            data = tar.extractfile(entry).read()
            self._write_at(parent, name, entry.name, data, entry.mode)
            times = (entry.mtime, entry.mtime)
            os.utime(name, times, dir_fd=parent, follow_symlinks=False)
        finally:
          os.close(parent)
    for parts, mode in reversed(directories):  # last: one may forbid writing in it
      fd = self._parent([*parts, ''], make=False)
      os.fchmod(fd, mode)
      os.close(fd)

  def clear(self) -> None:
    """Removes everything below the root."""
    self._clear(self._root_fd)

  def _clear(self, directory: int) -> None:
    for name in os.listdir(directory):
      info = os.stat(name, dir_fd=directory, follow_symlinks=False)
      if not stat.S_ISDIR(info.st_mode):
        os.unlink(name, dir_fd=directory)
        continue
      fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
      try:
        # A caller who is not root may have been locked out of its own directory.
        os.chmod(f'/proc/self/fd/{fd}', 0o700)
        inner = os.open('.', _DIRECTORY, dir_fd=fd)
        try:
          self._clear(inner)
        finally:
          os.close(inner)
      finally:
        os.close(fd)
      os.rmdir(name, dir_fd=directory)

  def _parent(self, parts: list[str], *, make: bool) -> int:
    """Returns a new descriptor of the directory that holds the last of `parts`."""
    fd = os.dup(self._root_fd)
    for number, name in enumerate(parts[:-1], start=1):
      try:
        with _explained('/'.join(parts[:number])):
          try:
            inner = os.open(name, _DIRECTORY, dir_fd=fd)
          except FileNotFoundError:
            if not make:
              raise
            os.mkdir(name, 0o755, dir_fd=fd)
            self._own(name, fd)
            inner = os.open(name, _DIRECTORY, dir_fd=fd)
      finally:
        os.close(fd)
      fd = inner
    return fd

  def _own(self, what: int | str, directory: int | None = None) -> None:
    if self._owner is None:
      return
    if isinstance(what, int):
      os.fchown(what, self._owner, self._owner)
    else:
      os.chown(what, self._owner, self._owner, dir_fd=directory, follow_symlinks=False)


def _parts(path: str | PurePosixPath) -> list[str]:
  """Splits a path relative to the workspace, or below /workspace."""
  pure = PurePosixPath(path)
  if pure.is_absolute():
    if not pure.is_relative_to(_MOUNT):
      raise api.SandboxPathError(f'{path}: not below {_MOUNT}')
    pure = pure.relative_to(_MOUNT)
  if not pure.parts or '..' in pure.parts or '\0' in str(pure):
    raise api.SandboxPathError(f'{path!r}: want a file path inside the workspace')
  return list(pure.parts)


class _explained:
  """Turns what an agent's tricks make the kernel say into SandboxPathError."""

  _WORDS = {
    errno.ELOOP: 'a symbolic link, not followed',
    errno.ENOTDIR: 'passes something that is not a directory',
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
