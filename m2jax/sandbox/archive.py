"""Packs an untrusted workspace as a tar archive, and unpacks it.

A command may leave directories thousands of levels deep, sparse files larger than
memory, invalid times, and files that their owner cannot read. A walk therefore holds a
single descriptor at any depth and follows no links, the size of the archive is limited,
and holes stay holes (the sparse format 1.0 of GNU tar, in PAX headers). Pipes, sockets
and extended attributes are omitted. Use it only while nothing runs in the tree.
"""

from __future__ import annotations

import contextlib
import decimal
import io
import os
import stat
import tarfile

from m2jax.sandbox import api, files

_BLOCK_BYTES = 512
_COPY_BYTES = 1 << 20
_MAX_HEADER_MTIME_S = 8**11 - 1  # maximum of the octal field in a tar header
_CODEC = {'encoding': 'utf-8', 'errors': 'surrogateescape'}


class _Walk:
  """A position in a tree, moved one step at a time.

  Args:
    root_fd: open directory; the caller closes it.
    force: temporarily permit the owner to enter directories and read files.
  """

  def __init__(self, root_fd: int, *, force: bool = False):
    self.fd = os.open('.', files.DIRECTORY, dir_fd=root_fd)
    self.names = []
    self._force = force
    self._above = []  # (device, inode) of the parent directories
    self._modes = []  # to restore when leaving, or None

  def path(self, name: str) -> str:
    """Path of an entry of the current directory, from the root."""
    return '/'.join([*self.names, name])

  def down(self, name: str) -> None:
    """Enters a directory."""
    info = os.fstat(self.fd)
    with files.explained(self.path(name)):
      mode = _permit(name, self.fd, 0o700) if self._force else None
      fd = os.open(name, files.DIRECTORY, dir_fd=self.fd)
    os.close(self.fd)
    self.fd = fd
    self.names.append(name)
    self._above.append((info.st_dev, info.st_ino))
    self._modes.append(mode)

  def up(self) -> None:
    """Moves to the parent directory."""
    fd = os.open('..', files.DIRECTORY, dir_fd=self.fd)
    mode = self._modes.pop()
    if mode is not None:
      os.fchmod(self.fd, mode)
    os.close(self.fd)
    self.fd = fd
    name = self.names.pop()
    info = os.fstat(fd)
    if (info.st_dev, info.st_ino) != self._above.pop():
      raise api.SandboxPathError(f'{self.path(name)}: was moved')

  def go(self, names: list[str]) -> None:
    """Moves to a directory of the tree."""
    common = 0
    while common < min(len(names), len(self.names)):
      if names[common] != self.names[common]:
        break
      common += 1
    while len(self.names) > common:
      self.up()
    for name in names[common:]:
      self.down(name)

  def close(self) -> None:
    """Closes the descriptor and restores the modes where possible."""
    with contextlib.suppress(OSError, api.SandboxPathError):
      while self.names:
        self.up()
    os.close(self.fd)


def _permit(name: str, directory: int, bits: int) -> int | None:
  """Adds permission bits. Returns the previous mode, or None if it had them."""
  mode = stat.S_IMODE(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
  if mode & bits == bits:
    return None
  _change_mode(name, directory, mode | bits)
  return mode


def _change_mode(name: str, directory: int, mode: int) -> None:
  fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
  try:
    os.chmod(f'/proc/self/fd/{fd}', mode)  # of the opened file, never a link's target
  finally:
    os.close(fd)


# Packing ----------------------------------------------------------------------------


class _Bounded(io.BytesIO):
  """An in-memory file of bounded size."""

  def __init__(self, max_bytes: int):
    super().__init__()
    self._max_bytes = max_bytes

  def write(self, data) -> int:
    if self.tell() + len(data) > self._max_bytes:
      raise api.SandboxPathError(f'the archive is larger than {self._max_bytes} bytes')
    return super().write(data)


def pack(root_fd: int, max_bytes: int, *, force: bool = True) -> bytes:
  """Returns a tree as an uncompressed tar.

  Args:
    root_fd: open directory.
    max_bytes: largest size of the archive.
    force: temporarily change modes to read files that the owner cannot read.

  Raises:
    SandboxPathError: the archive is too large, or something cannot be read.
  """
  buffer = _Bounded(max_bytes)
  walk = _Walk(root_fd, force=force)
  try:
    with tarfile.open(
      fileobj=buffer, mode='w', format=tarfile.PAX_FORMAT, **_CODEC
    ) as tar:
      _pack(tar, walk, force)
  finally:
    walk.close()
  return buffer.getvalue()


def _pack(tar: tarfile.TarFile, walk: _Walk, force: bool) -> None:
  first_paths = {}  # (device, inode) of a file with several names -> the first
  left = [iter(sorted(os.listdir(walk.fd)))]
  while left:
    name = next(left[-1], None)
    if name is None:
      left.pop()
      if left:
        walk.up()
      continue
    info = os.stat(name, dir_fd=walk.fd, follow_symlinks=False)
    entry = _entry(walk.path(name), info)
    tar.members.clear()  # only `getmember` needs them; each holds a whole path
    if stat.S_ISDIR(info.st_mode):
      entry.type = tarfile.DIRTYPE
      tar.addfile(entry)
      walk.down(name)
      left.append(iter(sorted(os.listdir(walk.fd))))
    elif stat.S_ISLNK(info.st_mode):
      entry.type = tarfile.SYMTYPE
      entry.linkname = os.readlink(name, dir_fd=walk.fd)
      tar.addfile(entry)
    elif stat.S_ISREG(info.st_mode):
      first = first_paths.setdefault((info.st_dev, info.st_ino), entry.name)
      if first != entry.name:
        entry.type = tarfile.LNKTYPE
        entry.linkname = first
        tar.addfile(entry)
      else:
        _pack_file(tar, walk, name, entry, force)


def _entry(path: str, info: os.stat_result) -> tarfile.TarInfo:
  entry = tarfile.TarInfo(path)
  entry.mode = stat.S_IMODE(info.st_mode)
  entry.mtime = min(max(info.st_mtime_ns // 10**9, 0), _MAX_HEADER_MTIME_S)
  entry.pax_headers['mtime'] = f'{decimal.Decimal(info.st_mtime_ns).scaleb(-9):f}'
  return entry


def _pack_file(tar, walk: _Walk, name: str, entry: tarfile.TarInfo, force: bool):
  with files.explained(entry.name):
    mode = _permit(name, walk.fd, 0o400) if force else None
    fd = os.open(name, os.O_RDONLY | files.OPEN, dir_fd=walk.fd)
  try:
    with open(fd, 'rb') as file:
      size = os.fstat(fd).st_size
      segments = _segments(fd, size)
      if segments == [(0, size)] or not size:
        entry.size = size
        tar.addfile(entry, file)
      else:
        _pack_sparse(tar, file, entry, segments, size)
  finally:
    if mode is not None:
      _change_mode(name, walk.fd, mode)


def _segments(fd: int, size: int) -> list[tuple[int, int]]:
  """`(offset, length)` of the data between holes."""
  found, end = [], 0
  while end < size:
    try:
      start = os.lseek(fd, end, os.SEEK_DATA)
    except OSError:  # ENXIO: the rest is a hole
      break
    end = os.lseek(fd, start, os.SEEK_HOLE)
    found.append((start, end - start))
  os.lseek(fd, 0, os.SEEK_SET)
  return found


def _pack_sparse(tar, file, entry: tarfile.TarInfo, segments, size: int) -> None:
  segments = [*segments, (size, 0)]
  lines = [len(segments), *(number for segment in segments for number in segment)]
  table = ''.join(f'{line}\n' for line in lines).encode()
  data = io.BytesIO()
  data.write(table.ljust(-(-len(table) // _BLOCK_BYTES) * _BLOCK_BYTES, b'\0'))
  for offset, length in segments:
    file.seek(offset)
    data.write(file.read(length))
  entry.size = data.tell()
  data.seek(0)
  entry.pax_headers.update(
    {
      'GNU.sparse.major': '1',
      'GNU.sparse.minor': '0',
      'GNU.sparse.name': entry.name,
      'GNU.sparse.realsize': str(size),
    }
  )
  tar.addfile(entry, data)


# Unpacking --------------------------------------------------------------------------


def unpack(root_fd: int, owner: int | None, archive: bytes) -> None:
  """Fills an empty directory from an archive.

  Args:
    root_fd: open directory that nothing else uses yet.
    owner: uid and gid of all files; None is the caller's.
    archive: the result of `pack`.

  Raises:
    OSError: there is not enough space.
    tarfile.TarError, SandboxPathError: the archive is not from `pack`.
  """
  directories = []
  walk, sources = _Walk(root_fd), _Walk(root_fd)
  try:
    with tarfile.open(fileobj=io.BytesIO(archive), mode='r:', **_CODEC) as tar:
      while (entry := tar.next()) is not None:
        tar.members.clear()
        *above, name = files.parts(entry.name)
        walk.go(above)
        if entry.isdir():
          os.mkdir(name, 0o700, dir_fd=walk.fd)
          directories.append((above, name, entry))
        elif entry.issym():
          os.symlink(entry.linkname, name, dir_fd=walk.fd)
        elif entry.islnk():
          *above, first = files.parts(entry.linkname)
          sources.go(above)
          places = {'src_dir_fd': sources.fd, 'dst_dir_fd': walk.fd}
          os.link(first, name, **places, follow_symlinks=False)
          continue
        elif entry.isfile():
          _unpack_file(tar, entry, name, walk.fd)
        else:
          continue
        _finish(name, walk.fd, owner, entry)
      if archive[tar.offset : tar.offset + _BLOCK_BYTES] != bytes(_BLOCK_BYTES):
        raise tarfile.ReadError('the archive is truncated')
    # Children first: a mode may exclude the owner, and adding entries changes times.
    for above, name, entry in reversed(directories):
      walk.go(above)
      os.chmod(name, entry.mode, dir_fd=walk.fd)
      _set_time(name, walk.fd, entry)
  finally:
    walk.close()
    sources.close()


def _unpack_file(tar, entry: tarfile.TarInfo, name: str, directory: int) -> None:
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | files.OPEN
  fd = os.open(name, flags, 0o600, dir_fd=directory)
  segments = entry.sparse if entry.issparse() else [(0, entry.size)]
  with open(fd, 'wb', buffering=0) as target, tar.extractfile(entry) as source:
    for offset, length in segments:
      source.seek(offset)
      target.seek(offset)
      while length > 0 and (data := source.read(min(length, _COPY_BYTES))):
        length -= len(data)
        view = memoryview(data)
        while view:
          view = view[target.write(view) :]
      if length > 0:
        raise tarfile.ReadError('the archive is truncated')
    target.truncate(entry.size)


def _finish(name: str, directory: int, owner: int | None, entry) -> None:
  if owner is not None:
    os.chown(name, owner, owner, dir_fd=directory, follow_symlinks=False)
  if entry.isfile():
    os.chmod(name, entry.mode, dir_fd=directory)  # after chown, which clears set-uid
  _set_time(name, directory, entry)


def _set_time(name: str, directory: int, entry) -> None:
  text = entry.pax_headers.get('mtime', entry.mtime)
  time_ns = int(decimal.Decimal(text).scaleb(9))
  times = (time_ns, time_ns)
  os.utime(name, ns=times, dir_fd=directory, follow_symlinks=False)


def clear(root_fd: int) -> None:
  """Removes the contents of a directory, at any depth."""
  walk = _Walk(root_fd, force=True)
  try:
    while True:
      inner = None
      for name in os.listdir(walk.fd):
        info = os.stat(name, dir_fd=walk.fd, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
          try:
            os.rmdir(name, dir_fd=walk.fd)
          except OSError:  # not empty
            inner = name
            break
        else:
          os.unlink(name, dir_fd=walk.fd)
      if inner is not None:
        walk.down(inner)
      elif walk.names:
        name = walk.names[-1]
        walk.up()
        os.rmdir(name, dir_fd=walk.fd)
      else:
        return
  finally:
    walk.close()
