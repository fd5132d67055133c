"""System calls that Python lacks: namespaces, mounts, filters, orphans, keyrings."""

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
_CLONE_NEWCGROUP = 0x02000000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
_PIVOT_ROOT = {'x86_64': 155, 'aarch64': 41}
_KEYCTL = {'x86_64': 250, 'aarch64': 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_IFREQ = '16sh14x'  # netdevice(7): name and flags
_MS_RDONLY = 1
_MS_NOSUID = 2
_MS_NODEV = 4
_MS_NOEXEC = 8
_MS_REMOUNT = 32
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
_MAX_USER_NAMESPACES = '/proc/sys/user/max_user_namespaces'
_BUFFERS = {
  'ipv4/tcp_rmem': '4096 65536 131072',
  'ipv4/tcp_wmem': '4096 16384 131072',
  'core/optmem_max': '4096',
}

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
    _write_maps(f'{uid} {uid} 1', f'{gid} {gid} 1')
  _mount('none', '/', None, _MS_REC | _MS_PRIVATE, '')


def new_mounts(keep) -> int:
  """Creates a second mount namespace with few mounts, without entering it.

  A sandbox copies all mounts of the namespace that it starts from.

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


def clone_mount(path: str) -> int:
  """A descriptor of the file system at `path`, for `attach` in any mount namespace."""
  flags = _OPEN_TREE_CLONE | os.O_CLOEXEC
  return _syscall('open_tree', _OPEN_TREE, _AT_FDCWD, path.encode(), flags)


def attach(mount: int, place: str) -> None:
  """Mounts what `clone_mount` returned at `place`."""
  flags = _MOVE_MOUNT_EMPTY_PATH
  _syscall('move_mount', _MOVE_MOUNT, mount, b'', _AT_FDCWD, place.encode(), flags)


def enter_mounts(namespace: int) -> None:
  """Moves this process into a private copy of a namespace of `new_mounts`.

  Raises:
    OSError: not allowed here.
  """
  _check(_libc.setns(namespace, _CLONE_NEWNS), 'enter the mount namespace')
  _check(_libc.unshare(_CLONE_NEWNS), 'unshare the mount namespace')


def change_root(root: str) -> None:
  """Makes the file system mounted at `root` the root, and detaches all others."""
  os.chdir(root)
  number = _PIVOT_ROOT[os.uname().machine]
  _syscall('pivot_root', number, b'.', b'.')
  unmount('.')
  os.chdir('/')


def _syscall(what: str, *arguments) -> int:
  result = _libc.syscall(*arguments)
  if result < 0:
    _check(result, what)
  return result


def new_processes() -> None:
  """The next fork of this process begins a process namespace.

  Raises:
    OSError: namespaces are not allowed here.
  """
  _check(_libc.unshare(_CLONE_NEWPID), 'unshare the process namespace')


def new_network() -> None:
  """Moves this process into new network, IPC and host name namespaces.

  The network has only a loopback interface, whose TCP connections get small buffers:
  some kernels do not count these as memory of a control group.

  Raises:
    OSError: namespaces are not allowed here.
  """
  flags = _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
  _check(_libc.unshare(flags), 'unshare the network namespace')
  socket.sethostname('sandbox')
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    request = fcntl.ioctl(s, _SIOCGIFFLAGS, struct.pack(_IFREQ, b'lo', 0))
    flags = struct.unpack(_IFREQ, request)[1] | _IFF_UP
    fcntl.ioctl(s, _SIOCSIFFLAGS, struct.pack(_IFREQ, b'lo', flags))
  for name, buffer in _BUFFERS.items():
    # Read-only in some containers, and of all networks on older kernels.
    with contextlib.suppress(OSError), open(f'/proc/sys/net/{name}', 'w') as f:
      f.write(buffer)


def enter_groups(namespace: int | None = None) -> None:
  """Moves this process into a control group namespace.

  None begins one, whose root are the groups that this process is in.
  """
  if namespace is None:
    _check(_libc.unshare(_CLONE_NEWCGROUP), 'unshare the control group namespace')
  else:
    _check(_libc.setns(namespace, _CLONE_NEWCGROUP), 'enter the control groups')


def new_user(*, nested: bool) -> None:
  """Moves this process into a user namespace whose only user, 1000, is its own.

  Args:
    nested: whether others may be made within it.

  Raises:
    OSError: namespaces are not allowed here.
  """
  uid, gid = os.getuid(), os.getgid()
  # A change of uid makes /proc/self root's, and the maps could not be written.
  _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), 'become dumpable')
  _check(_libc.unshare(_CLONE_NEWUSER), 'unshare the user namespace')
  _write_maps(f'1000 {uid} 1', f'1000 {gid} 1')
  if nested:
    return
  # A user namespace within would give privileges over further namespaces. Some
  # containers do not allow this; the filter denies them, too.
  with contextlib.suppress(OSError), open(_MAX_USER_NAMESPACES, 'w') as f:
    f.write('0')


def become_user(namespace: int) -> None:
  """Makes this process the user of a namespace of `new_user`, for an exec."""
  _check(_libc.setns(namespace, _CLONE_NEWUSER), 'enter the user namespace')
  os.setresgid(1000, 1000, 1000)
  os.setresuid(1000, 1000, 1000)


def _write_maps(uids: str, gids: str) -> None:
  for name, text in (('setgroups', 'deny'), ('uid_map', uids), ('gid_map', gids)):
    with open(f'/proc/self/{name}', 'w') as f:
      f.write(text)


def drop_privileges() -> None:
  """Gives up all capabilities; no exec of this process or its children gives any."""
  _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 'set no new privileges')
  capability = 0  # up to the first that this kernel, or this user, does not have
  while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
    capability += 1
  header = struct.pack('=Ii', _CAPABILITY_VERSION_3, 0)
  _check(_libc.capset(header, bytes(24)), 'drop capabilities')


class Filter:
  """A system call filter; `load` it last, before an exec."""

  def __init__(self, program: bytes):
    self._program = ctypes.create_string_buffer(program, len(program))
    size = ctypes.sizeof(ctypes.c_void_p)
    address = ctypes.addressof(self._program)
    # struct sock_fprog: a count of 8-byte instructions, and a pointer to them.
    self._fprog = struct.pack(f'@H{size - 2}xP', len(program) // 8, address)

  def load(self) -> None:
    """Filters the calls of this process and of its children."""
    result = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, self._fprog, 0, 0)
    _check(result, 'load the filter of system calls')


def listen_in(network: int, port: int) -> socket.socket:
  """Listens on a loopback port of a network namespace; enters it.

  A socket belongs to the namespace that it was made in, also in another process.

  Args:
    network: open descriptor of the namespace.
    port: port of 127.0.0.1.

  Raises:
    OSError: the port is in use.
  """
  _check(_libc.setns(network, _CLONE_NEWNET), 'enter the network namespace')
  return socket.create_server(('127.0.0.1', port))


def enter_processes(namespace: int) -> None:
  """The next fork of this process is in a process namespace.

  Raises:
    OSError: not allowed here.
  """
  _check(_libc.setns(namespace, _CLONE_NEWPID), 'enter the process namespace')


def adopt_orphans() -> None:
  """Makes this process the parent of orphaned descendants."""
  _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), 'become a subreaper')


def die_with_parent() -> None:
  """Has the kernel kill this process when its parent exits."""
  _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), 'die with the parent')


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


def threads_of(uid: int) -> int:
  """Number of threads of a uid, which RLIMIT_NPROC counts."""
  count = 0
  for name in os.listdir('/proc'):
    if name.isdigit():
      with contextlib.suppress(OSError):
        if os.stat(f'/proc/{name}').st_uid == uid:
          count += len(os.listdir(f'/proc/{name}/task'))
  return count


def children() -> list[int]:
  """The child processes of this process, which has one thread."""
  pid = os.getpid()
  with open(f'/proc/{pid}/task/{pid}/children') as f:
    return [int(child) for child in f.read().split()]


def mount_tmpfs(
  target: str, size_bytes: int, inodes: int, mode: int, uid: int, *, devices=False
) -> None:
  """Mounts a private in-memory file system of at most `size_bytes` and `inodes`."""
  options = f'size={size_bytes},nr_inodes={inodes},mode={mode:o}'
  if uid and os.geteuid() == 0:  # a user namespace maps only its creator's ids
    options += f',uid={uid},gid={uid}'
  flags = _MS_NOSUID | (0 if devices else _MS_NODEV)
  _mount('tmpfs', target, 'tmpfs', flags, options)


def mount_overlay(source: str, target: str, empty: str) -> None:
  """Mounts `source` read-only at `target`, with inodes, and so locks, of its own.

  Without a writable layer an overlay needs a second directory, `empty`.
  """
  if any(c in source for c in ':,\\'):
    raise OSError(errno.EINVAL, f'{source}: a path with a colon, comma or backslash')
  flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
  _mount('overlay', target, 'overlay', flags, f'lowerdir={source}:{empty}')


def mount_proc(target: str) -> None:
  """Mounts the processes of this process's namespace."""
  _mount('proc', target, 'proc', _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, '')


def mount_terminals(target: str) -> None:
  """Mounts pseudo terminals that nobody else uses."""
  options = 'newinstance,ptmxmode=0666,mode=620,max=64'
  _mount('devpts', target, 'devpts', _MS_NOSUID | _MS_NOEXEC, options)


def bind(source: str, target: str) -> None:
  """Mounts `source`, including its submounts, at `target` too."""
  _mount(source, target, None, _MS_BIND | _MS_REC, '')


def make_read_only(target: str) -> None:
  """Makes the mount at `target` read-only, keeping its other restrictions."""
  held = os.statvfs(target).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
  flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | held
  _mount('none', target, None, flags, '')


def move_mount(source: str, target: str) -> None:
  """Moves the file system at `source` to `target`."""
  _mount(source, target, None, _MS_MOVE, '')


def unmount(target: str) -> None:
  """Detaches the file system at `target`; it lasts until its files are closed."""
  _check(_libc.umount2(target.encode(), _MNT_DETACH), f'unmount {target}')
