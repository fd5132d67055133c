"""The tree that a verifier judges: original files, plus only the agent's work.

    tree = archive ∖ work  ∪  the agent's files that are work  ∪  the verifier's files

A path is *work* if it matches a pattern of `collect` and none of `exclude` (fnmatch;
`*` also matches `/`). Tests, configuration and everything else that an agent changes,
adds or removes is therefore ignored. Links are never followed, only regular files are
work, and their number and size are bounded.

Only the standard library is used: the file is copied into each task, whose `test.sh`
needs it where Harbor runs the task.
"""

import fnmatch
import io
import os
import stat
import tarfile
import zlib

MAX_FILES = 4096
MAX_ENTRIES = 65536  # of the agent's workspace, work or not
MAX_BYTES = 32 << 20
MAX_UNPACKED_BYTES = 64 << 20  # of an archive
MAX_DEPTH = 64  # of directories; each that is open takes a descriptor
MAX_PATH_BYTES = 1024
_KINDS = {stat.S_IFREG: 'file', stat.S_IFDIR: 'directory', stat.S_IFLNK: 'link'}
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Rejected(Exception):
  """The agent's files exceed a bound or cannot be judged; the attempt failed."""


class BadArchive(OSError):
  """An archive cannot be read, or has too much in it."""


def is_inside(path):
  """Whether a path is relative and stays where it begins, whatever is there."""
  return '\0' not in path and not {'', '.', '..'} & set(path.split('/'))


def is_work(path, collect, exclude):
  """Whether a relative path belongs to the agent's work."""
  if any(fnmatch.fnmatchcase(path, pattern) for pattern in exclude):
    return False
  return any(fnmatch.fnmatchcase(path, pattern) for pattern in collect)


def gather(workspace, collect, exclude):
  """Returns {relative path: bytes} of the agent's work.

  Raises:
    Rejected: too many files, too large, or too deep.
    OSError: the workspace cannot be read.
  """
  found, total = {}, 0
  for prefix, _, files, fd in walk(workspace):
    for name in files:
      path = prefix + name
      if not is_work(path, collect, exclude):
        continue
      data = read(name, fd, MAX_BYTES - total)
      if data is None:
        continue
      total += len(data)
      if total > MAX_BYTES or len(found) >= MAX_FILES:
        raise Rejected(f'more than {MAX_FILES} files or {MAX_BYTES} bytes of work')
      found[path] = data
  return found


def walk(workspace):
  """Yields (path with '/' or '', directories, files, descriptor); follows no link.

  Raises Rejected for too many entries, or too deep ones.
  """
  entries = 0
  for directory, names, files, fd in os.fwalk(workspace, follow_symlinks=False):
    prefix = os.path.relpath(directory, workspace) + '/'
    prefix = '' if prefix == './' else prefix
    deep = prefix.count('/') > MAX_DEPTH or len(os.fsencode(prefix)) > MAX_PATH_BYTES
    if deep:
      raise Rejected(f'there is a directory of more than {MAX_DEPTH} levels '
        f'or {MAX_PATH_BYTES} bytes')  # fmt: skip
    entries += len(names) + len(files)
    if entries > MAX_ENTRIES:
      raise Rejected(f'there are more than {MAX_ENTRIES} entries')
    yield prefix, names, files, fd


def read(name, directory_fd, limit_bytes):
  """A regular file's content, up to a byte above the limit; None for anything else."""
  try:
    fd = os.open(name, _FILE, dir_fd=directory_fd)
  except OSError:  # a link, a pipe, or not readable: not a file of the agent's work
    return None
  with open(fd, 'rb') as file:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
      return None
    return file.read(limit_bytes + 1)


def listing(workspace):
  """Returns {relative path: facts} of all entries, as lstat sees them.

  Facts are `kind` ('file', 'directory', 'link', or 'other' for pipes and devices),
  `mode` (permission bits), `size` in bytes, and `target` of a link.

  Raises:
    Rejected: too many entries.
    OSError: the workspace cannot be read.
  """
  found = {}
  for prefix, names, files, fd in walk(workspace):
    for name in (*names, *files):
      status = os.stat(name, dir_fd=fd, follow_symlinks=False)
      kind = _KINDS.get(stat.S_IFMT(status.st_mode), 'other')
      facts = {'kind': kind, 'mode': stat.S_IMODE(status.st_mode)}
      facts['size'] = status.st_size
      if kind == 'link':
        facts['target'] = os.readlink(name, dir_fd=fd)
      found[prefix + name] = facts
  return found


def unchanged(workspace, files):
  """Whether a workspace has these files and their directories, and nothing else."""
  try:
    entries = listing(workspace)
    found = gather(workspace, ('*',), ())
  except (Rejected, OSError):  # a process that is left may still remove files
    return False
  parents = {os.path.dirname(path) for path in files}
  while above := {os.path.dirname(path) for path in parents} - parents:
    parents |= above
  known = all(
    path in files or path in parents and facts['kind'] == 'directory'
    for path, facts in entries.items()
  )
  return known and found == dict(files)


def unpack(archive):
  """Returns {relative path: bytes} of the regular files of a tar.gz in bytes.

  Raises:
    BadArchive: it is none, or has too much in it.
  """
  found, total = {}, 0
  try:
    data = _decompressed(archive)
    with tarfile.open(fileobj=io.BytesIO(data), mode='r:') as tar:
      for number, entry in enumerate(tar):
        if number >= MAX_ENTRIES:
          raise BadArchive(f'the archive has more than {MAX_ENTRIES} entries')
        path = os.path.normpath(entry.name)
        if entry.isfile() and is_inside(path):
          total += entry.size  # a sparse file is larger than what is in the archive
          if total > MAX_UNPACKED_BYTES:
            raise BadArchive(f'the files have more than {MAX_UNPACKED_BYTES} bytes')
          found[path] = tar.extractfile(entry).read()
  except (tarfile.TarError, zlib.error, EOFError, ValueError) as error:
    raise BadArchive(f'not a tar.gz: {error}') from None
  return found


def _decompressed(data):
  """Raises BadArchive above a bound, whatever follows."""
  parts, left = [], MAX_UNPACKED_BYTES
  while data:
    stream = zlib.decompressobj(wbits=31)
    parts.append(stream.decompress(data, left + 1))
    left -= len(parts[-1])
    if left < 0:
      raise BadArchive(f'the archive has more than {MAX_UNPACKED_BYTES} bytes')
    if not stream.eof:
      raise BadArchive('the archive is cut off')
    data = stream.unused_data.lstrip(b'\0')
  return b''.join(parts)


def compose(original, work, ours, collect, exclude):
  """Returns {relative path: bytes}: the tree to judge.

  Args:
    original: the archive's files.
    work: the result of `gather`.
    ours: the verifier's files; they win.
    collect, exclude: patterns.

  Raises:
    Rejected: the agent has a directory where another file is, or the reverse.
  """
  kept = {p: d for p, d in original.items() if not is_work(p, collect, exclude)}
  tree = {**kept, **work, **ours}
  for path, above in conflicts(tree):
    if path in work or above in work:
      raise Rejected(f'{path!a}: there is a file {above!a}')
  return tree


def conflicts(paths):
  """Yields (path, path above it) where a file is also a directory."""
  for path in paths:
    parts = path.split('/')
    for end in range(1, len(parts)):
      if (above := '/'.join(parts[:end])) in paths:
        yield path, above


def write(files, target):
  """Writes files below the new directory `target`, in order of their paths.

  Raises:
    ValueError: a path leads out of it; nothing is written.
  """
  made = set()
  if outside := [path for path in files if not is_inside(path)]:
    raise ValueError(f'{min(outside)!a}: a path that leads out')
  for path in sorted(files):
    full = os.path.join(target, path)
    parent = os.path.dirname(full)
    if parent not in made:
      os.makedirs(parent, exist_ok=True)
      made.add(parent)
    with open(full, 'xb') as file:
      file.write(files[path])
