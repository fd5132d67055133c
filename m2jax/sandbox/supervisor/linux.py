"""The system calls that Python lacks: namespaces and mounts (unshare(2), mount(2))."""

from __future__ import annotations

import ctypes
import os

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
  if result:
    number = ctypes.get_errno()
    raise OSError(number, f'{what}: {os.strerror(number)}')


def _mount(source: str, target: str, kind: str | None, flags: int, data: str) -> None:
  result = _libc.mount(
    source.encode(),
    target.encode(),
    kind.encode() if kind else None,
    ctypes.c_ulong(flags),
    data.encode(),
  )
  _check(result, f'mount {kind or source} on {target}')


def enter_private_mounts() -> None:
  """Moves this process into a mount namespace of its own, which dies with it.

  Root gets just that; anyone else gets it through a user namespace that maps only the
  own uid. No mount made afterwards is seen outside or outlives the process.

  Raises:
    OSError: namespaces are not allowed here.
  """
  uid, gid = os.geteuid(), os.getegid()
  if uid == 0:
    _check(_libc.unshare(_CLONE_NEWNS), 'unshare the mount namespace')
  else:
    _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), 'unshare the user namespace')
    for name, text in (
      ('setgroups', 'deny'),
      ('uid_map', f'{uid} {uid} 1'),
      ('gid_map', f'{gid} {gid} 1'),
    ):
      with open(f'/proc/self/{name}', 'w') as f:
        f.write(text)
  _mount('none', '/', None, _MS_REC | _MS_PRIVATE, '')


def mount_tmpfs(target: str, size_bytes: int, inodes: int, mode: int, uid: int) -> None:
  """Mounts a private in-memory file system of at most `size_bytes` and `inodes`."""
  options = f'size={size_bytes},nr_inodes={inodes},mode={mode:o},uid={uid},gid={uid}'
  if uid == 0 or os.geteuid() != 0:
    # The creator's own ids: no others are mapped in a user namespace of one.
    options = f'size={size_bytes},nr_inodes={inodes},mode={mode:o}'
  _mount('tmpfs', target, 'tmpfs', _MS_NOSUID | _MS_NODEV, options)


def bind(source: str, target: str) -> None:
  """Makes `source`, with what is mounted below it, visible at `target` too."""
  _mount(source, target, None, _MS_BIND | _MS_REC, '')


def unmount(target: str) -> None:
  """Detaches the file system at `target`; open files keep it until they close."""
  _check(_libc.umount2(target.encode(), _MNT_DETACH), f'unmount {target}')
