"""The files that commands see: a separate root for each sandbox.

`/usr`, the host's other read-only trees and a prepared `/etc` are overlays, so that
each sandbox has separate inodes and shares no file locks or watches with its
neighbours. /dev has new device nodes and pseudo terminals. Only /workspace is writable,
and /tmp and /dev/shm, whose files last for one command. Where the kernel has no
overlays for this user the trees are bind mounts, and the report notes that neighbours
share locks.
"""

from __future__ import annotations

import contextlib
import os
import stat

import linux

_ETC = {
  'passwd': 'root:x:0:0::/:/bin/false\nagent:x:1000:1000::/workspace:/bin/bash\n',
  'group': 'root:x:0:\nagent:x:1000:\n',
  'hosts': '127.0.0.1 localhost\n',
  'nsswitch.conf': 'passwd: files\ngroup: files\nhosts: files\n',
  'empty': '',
}
# LibreOffice's registry is a link into /etc; without it soffice ends at its start.
_ETC_OF_HOST = ('alternatives', 'ld.so.cache', 'fonts', 'libreoffice')
_ROOT_LINKS = ('bin', 'sbin', 'lib', 'lib32', 'lib64', 'libx32')
_DEVICES = ('null', 'zero', 'full', 'random', 'urandom', 'tty')
_DEVICE_LINKS = {
  'fd': '/proc/self/fd',
  'stdin': '/proc/self/fd/0',
  'stdout': '/proc/self/fd/1',
  'stderr': '/proc/self/fd/2',
  'ptmx': 'pts/ptmx',
}
_SCRATCH_INODES = 16384


class Root:
  """What all roots of a supervisor are made from.

  Attributes:
    directory: has `top`, the root's own entries, `place`, where a root is mounted, and
      `empty`.
    trees: (source, path in the sandbox) of read-only trees.
    hidden: paths in the sandbox that are empty; those of directories end with '/'.
    overlays: whether trees are overlays.
    mounts: mount namespace that roots start from.
    nested: whether commands may make a user namespace and mount /proc there, which the
      kernel allows only if no part of this /proc is hidden.
  """

  def __init__(
    self, directory: str, trees, hidden, overlays: bool, mounts: int, nested: bool
  ):
    self.directory = directory
    self.trees = trees
    self.hidden = hidden
    self.overlays = overlays
    self.mounts = mounts
    self.nested = nested

  def path(self, name: str) -> str:
    """A file or directory of `directory`."""
    return os.path.join(self.directory, name)


def prepare(directory: str, read_only, hidden, *, nested: bool) -> Root:
  """Fills `directory`, a file system of this process's mount namespace.

  Args:
    directory: empty.
    read_only: (directory of the host, path in the sandbox), in addition to /usr.
    hidden, nested: as in `Root`.

  Raises:
    OSError: mounts are not allowed here.
  """
  trees = [('/usr', '/usr')]
  trees += [
    (f'/{name}', f'/{name}')
    for name in _ROOT_LINKS
    if os.path.isdir(f'/{name}') and not os.path.islink(f'/{name}')
  ]
  # In directories that the mount namespace of `mounts` keeps.
  for number, (source, target) in enumerate(read_only):
    place = os.path.join(directory, f'tree_{number}')
    os.mkdir(place)
    linux.bind(source, place)
    trees.append((place, target))
  for name in ('empty', 'place', 'top'):
    os.mkdir(os.path.join(directory, name))
  top = os.path.join(directory, 'top')
  for name in ('proc', 'dev', 'tmp', 'workspace'):
    os.mkdir(os.path.join(top, name))
  for name in _ROOT_LINKS:
    if os.path.islink(f'/{name}'):
      os.symlink(os.readlink(f'/{name}'), os.path.join(top, name))
  for _, target in trees:
    os.makedirs(top + target, exist_ok=True)
  _prepare_etc(os.path.join(top, 'etc'))
  overlays = _has_overlays(directory)
  kept = tuple(source for source, _ in trees) + (directory,)
  mounts = linux.new_mounts(lambda point: _is_needed(point, kept))
  return Root(directory, trees, hidden, overlays, mounts, nested)


def _prepare_etc(directory: str) -> None:
  os.mkdir(directory)
  for name, text in _ETC.items():
    with open(os.path.join(directory, name), 'w') as f:
      f.write(text)
  for name in _ETC_OF_HOST:
    with contextlib.suppress(OSError):  # absent, or not for this user
      _copy(os.path.join('/etc', name), os.path.join(directory, name))


def _copy(source: str, target: str) -> None:
  # Not shutil's: every fork copies what this process has loaded.
  if os.path.islink(source):
    os.symlink(os.readlink(source), target)
  elif os.path.isdir(source):
    os.mkdir(target)
    for name in os.listdir(source):
      _copy(os.path.join(source, name), os.path.join(target, name))
  else:
    with open(source, 'rb') as f, open(target, 'wb') as g:
      g.write(f.read())


def _has_overlays(directory: str) -> bool:
  place = os.path.join(directory, 'place')
  try:
    linux.mount_overlay('/usr', place, os.path.join(directory, 'empty'))
  except OSError:
    return False
  linux.unmount(place)
  return True


def _is_needed(point: str, trees: tuple[str, ...]) -> bool:
  """Whether a root needs the mount at `point`."""
  above = (*trees, '/proc', '/dev')
  return any(_is_below(tree, point) for tree in above) or any(
    _is_below(point, tree) for tree in trees
  )


def _is_below(path: str, directory: str) -> bool:
  return os.path.commonpath([path, directory]) == directory


def enter(root: Root, scratch_bytes: int) -> None:
  """Makes a root for this process and enters it. It must be process 1.

  Raises:
    OSError: mounts are not allowed here.
  """
  linux.enter_mounts(root.mounts)
  place = root.path('place')
  _mount_tree(root, root.path('top'), place)
  for source, target in root.trees:
    _mount_tree(root, source, place + target)
  empty = f'{place}/workspace'  # nothing is mounted there yet
  linux.mount_proc(f'{place}/proc')
  if not root.nested:
    linux.bind(f'{place}/etc/empty', f'{place}/proc/locks')  # slow, and all sandboxes'
    linux.bind(f'{place}/proc/sys', f'{place}/proc/sys')
    linux.make_read_only(f'{place}/proc/sys')
    linux.bind(empty, f'{place}/proc/1')  # this process
  _mount_devices(f'{place}/dev')
  mount_scratch(place, scratch_bytes)
  linux.change_root(place)
  for path in root.hidden:  # now, because a link leads elsewhere below another root
    if os.path.lexists(path):
      linux.bind('/workspace' if path.endswith('/') else '/etc/empty', path)


def _mount_tree(root: Root, source: str, target: str) -> None:
  if root.overlays:
    linux.mount_overlay(source, target, root.path('empty'))
  else:
    linux.bind(source, target)
    linux.make_read_only(target)


def _mount_devices(directory: str) -> None:
  linux.mount_tmpfs(directory, 1 << 16, 64, 0o755, 0, devices=True)
  for name in _DEVICES:
    path, device = os.path.join(directory, name), f'/dev/{name}'
    try:
      os.mknod(path, stat.S_IFCHR, os.stat(device).st_rdev)
      os.chmod(path, 0o666)
    except PermissionError:  # in a user namespace
      open(path, 'w').close()
      linux.bind(device, path)
      linux.make_read_only(path)
  for name, target in _DEVICE_LINKS.items():
    os.symlink(target, os.path.join(directory, name))
  for name in ('shm', 'pts'):
    os.mkdir(os.path.join(directory, name))
  linux.mount_terminals(os.path.join(directory, 'pts'))
  linux.make_read_only(os.path.join(directory, 'pts'))
  linux.make_read_only(directory)


def mount_scratch(place: str, size_bytes: int) -> None:
  """Mounts new /tmp and /dev/shm below `place`, of `size_bytes` together."""
  tmp = f'{place}/tmp'
  linux.mount_tmpfs(tmp, size_bytes, _SCRATCH_INODES, 0o755, 0)
  for name, target in (('shm', f'{place}/dev/shm'), ('tmp', tmp)):
    path = f'{tmp}/{name}'
    os.mkdir(path)
    os.chmod(path, 0o1777)
    linux.bind(path, target)


def remove_scratch() -> None:
  """Unmounts what `mount_scratch` mounted."""
  for path in ('/dev/shm', '/tmp', '/tmp'):
    linux.unmount(path)
