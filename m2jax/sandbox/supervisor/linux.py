"""System calls that Python lacks: namespaces, mounts, orphans, keyrings."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import signal
import socket
import struct

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KEYCTL = {'x86_64': 250, 'aarch64': 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_IFREQ = '16sh14x'  # netdevice(7): name and flags
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_BIND = 4096
_MS_MOVE = 8192
_MS_REC = 16384
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2
# The same numbers on every architecture; Linux 5.2.
_OPEN_TREE = 428
_MOVE_MOUNT = 429
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_EMPTY_PATH = 4
_AT_FDCWD = -100
_OWN_NETWORK = '/proc/self/ns/net'

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
  """Moves this process into a new mount namespace, which ends with it.

  Without root this uses a user namespace that maps only the current uid. Later mounts
  are not visible outside and do not outlive the process.

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


def new_mounts(keep) -> int:
  """Creates a second mount namespace with few mounts, without entering it.

  A command copies all mounts of the namespace that it starts from, and bubblewrap reads
  their list repeatedly.

  Args:
    keep: function of a mount point: whether to keep it.

  Returns:
    A descriptor for `enter_mounts`.
  """
  own = os.open('/proc/self/ns/mnt', os.O_RDONLY | os.O_CLOEXEC)
  try:
    _check(_libc.unshare(_CLONE_NEWNS), 'unshare the mount namespace')
    with open('/proc/self/mountinfo') as f:
      points = [line.split()[4] for line in f]
    for point in reversed(points):
      point = point.encode().decode('unicode_escape')  # a space is \\040
      if not keep(point):
        with contextlib.suppress(
          OSError
        ):  # a mount that only a parent namespace may change
          unmount(point)
    made = os.open('/proc/self/ns/mnt', os.O_RDONLY | os.O_CLOEXEC)
    _check(_libc.setns(own, _CLONE_NEWNS), 'return to the mount namespace')
    return made
  finally:
    os.close(own)


def enter_mounts(namespace: int, trees: dict[str, str]) -> None:
  """Moves this process into a private copy of a namespace of `new_mounts`.

  Args:
    namespace: descriptor.
    trees: path in the copy -> current directory whose file system is mounted there.

  Raises:
    OSError: not allowed here.
  """
  clones = {
    place: _syscall(
      'open_tree', _OPEN_TREE, _AT_FDCWD, path.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC
    )
    for place, path in trees.items()
  }
  _check(_libc.setns(namespace, _CLONE_NEWNS), 'enter the mount namespace')
  _check(_libc.unshare(_CLONE_NEWNS), 'unshare the mount namespace')
  for place, clone in clones.items():
    target = place.encode()
    flags = _MOVE_MOUNT_EMPTY_PATH
    _syscall('move_mount', _MOVE_MOUNT, clone, b'', _AT_FDCWD, target, flags)
    os.close(clone)


def _syscall(what: str, *arguments) -> int:
  result = _libc.syscall(*arguments)
  if result < 0:
    _check(result, what)
  return result


def new_network() -> int:
  """Moves this process into a new network namespace with only a loopback interface.

  Returns:
    A descriptor for `enter_network`.

  Raises:
    OSError: namespaces are not allowed here.
  """
  _check(_libc.unshare(_CLONE_NEWNET), 'unshare the network namespace')
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    request = fcntl.ioctl(s, _SIOCGIFFLAGS, struct.pack(_IFREQ, b'lo', 0))
    flags = struct.unpack(_IFREQ, request)[1] | _IFF_UP
    fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack(_IFREQ, b'lo', flags))
  return own_network()


def own_network() -> int:
  """A descriptor for `enter_network` of the namespace that this process is in."""
  return os.open(_OWN_NETWORK, os.O_RDONLY | os.O_CLOEXEC)


def enter_network(fd: int) -> None:
  """Moves this process into a network namespace; needs no right if it is in it."""
  if not os.path.samestat(os.stat(_OWN_NETWORK), os.fstat(fd)):
    _check(_libc.setns(fd, _CLONE_NEWNET), 'enter the network namespace')


def listen_in(network: int, port: int) -> socket.socket:
  """Listens on a loopback port of a namespace of `new_network`; enters it.

  A socket belongs to the namespace that it was made in, also in another process.

  Raises:
    OSError: the port is in use.
  """
  enter_network(network)
  return socket.create_server(('127.0.0.1', port))


def adopt_orphans() -> None:
  """Makes this process the parent of orphaned descendants."""
  _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 'become a subreaper')


def die_with(parent: int) -> None:
  """Has the kernel kill this process when `parent`, which forked it, exits.

  Call it after the last change of uid, which resets it.
  """
  _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), 'die with the parent')
  if os.getppid() != parent:
    raise ProcessLookupError('the supervisor has exited')


def new_session_keyring() -> None:
  """Replaces the caller's session keyring by an empty one (keyrings(7)).

  No effect if the kernel has no keyrings or the number of the call is unknown: then
  only the system call filter protects keys.

  Raises:
    OSError: the kernel denied it.
  """
  number = _KEYCTL.get(os.uname().machine)
  if number is None:
    return
  if _libc.syscall(number, _KEYCTL_JOIN_SESSION_KEYRING, None) == -1:
    error = ctypes.get_errno()
    if error not in (errno.ENOSYS, errno.EPERM):  # EPERM: a container's filter
      raise OSError(error, f'join a session keyring: {os.strerror(error)}')


def processes_of(uid: int) -> list[int]:
  """The processes that run under a uid."""
  found = []
  for name in os.listdir('/proc'):
    if name.isdigit():
      with contextlib.suppress(OSError):
        if os.stat(f'/proc/{name}').st_uid == uid:
          found.append(int(name))
  return found


def threads_of(uid: int) -> int:
  """Number of threads of a uid, which RLIMIT_NPROC counts."""
  count = 0
  for pid in processes_of(uid):
    with contextlib.suppress(OSError):
      count += len(os.listdir(f'/proc/{pid}/task'))
  return count


def children() -> list[int]:
  """The child processes of this process."""
  found, parent = [], os.getpid()
  for name in os.listdir('/proc'):
    if name.isdigit():
      with contextlib.suppress(OSError), open(f'/proc/{name}/stat') as f:
        if int(f.read().rpartition(') ')[2].split()[1]) == parent:
          found.append(int(name))
  return found


def mount_tmpfs(target: str, size_bytes: int, inodes: int, mode: int, uid: int) -> None:
  """Mounts a private in-memory file system of at most `size_bytes` and `inodes`."""
  options = f'size={size_bytes},nr_inodes={inodes},mode={mode:o},uid={uid},gid={uid}'
  if uid == 0 or os.geteuid() != 0:
    # A user namespace maps only the creator's ids.
    options = f'size={size_bytes},nr_inodes={inodes},mode={mode:o}'
  _mount('tmpfs', target, 'tmpfs', _MS_NOSUID | _MS_NODEV, options)


def bind(source: str, target: str) -> None:
  """Mounts `source`, including its submounts, at `target` too."""
  _mount(source, target, None, _MS_BIND | _MS_REC, '')


def move_mount(source: str, target: str) -> None:
  """Moves the file system at `source` to `target`."""
  _mount(source, target, None, _MS_MOVE, '')


def unmount(target: str) -> None:
  """Detaches the file system at `target`; it lasts until its files are closed."""
  _check(_libc.umount2(target.encode(), _MNT_DETACH), f'unmount {target}')
