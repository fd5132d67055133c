"""A seccomp program that denies system calls to sandboxed commands.

libseccomp compiles the table below for this machine's architecture; bubblewrap loads
the result (`bwrap --seccomp`). A call of another architecture (i386 and x32 on x86_64)
kills the process. A call that is newer than the installed libseccomp fails with ENOSYS,
as on an older kernel, because it has not been reviewed.
Source: seccomp(2), seccomp_rule_add(3).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import resource
import socket

_LIBRARY = 'libseccomp.so.2'
# Other architectures may order the arguments of clone(2) differently: untested.
_MACHINES = ('x86_64', 'aarch64')
_DENIED = {
  'access to other processes': (
    'ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp '
    'pidfd_getfd move_pages migrate_pages'
  ),
  'kernel keys, which outlive a process': 'add_key request_key keyctl',
  'rarely needed parts of the kernel with a history of vulnerabilities': (
    'io_setup '
    'userfaultfd io_uring_setup io_uring_enter io_uring_register bpf perf_event_open '
    'personality modify_ldt vm86 vm86old uselib lookup_dcookie remap_file_pages'
  ),
  'memory and queues that file limits do not count': (
    'memfd_create memfd_secret ipc shmget shmat shmctl shmdt semget semop semctl '
    'semtimedop semtimedop_time64 msgget msgsnd msgrcv msgctl mq_open mq_unlink '
    'mq_timedsend mq_timedsend_time64 mq_timedreceive mq_timedreceive_time64 mq_notify '
    'mq_getsetattr'
  ),
  'namespaces and mounts': (
    'unshare setns mount umount umount2 pivot_root chroot move_mount open_tree '
    'open_tree_attr fsopen fsconfig fsmount fspick mount_setattr statmount listmount'
  ),
  'other ways to files': 'open_by_handle_at name_to_handle_at fanotify_init',
  'the machine': (
    'kexec_load kexec_file_load init_module finit_module delete_module create_module '
    'query_module get_kernel_syms reboot swapon swapoff acct quotactl quotactl_fd '
    'nfsservctl syslog settimeofday clock_settime clock_settime64 stime sethostname '
    'setdomainname iopl ioperm vhangup sysfs _sysctl bdflush'
  ),
}
# Its flags are behind a pointer; on ENOSYS, libraries fall back to clone.
_ABSENT = 'clone3'
_NAMESPACE_FLAGS = (
  0x00020000,  # CLONE_NEWNS
  0x02000000,  # CLONE_NEWCGROUP
  0x04000000,  # CLONE_NEWUTS
  0x08000000,  # CLONE_NEWIPC
  0x10000000,  # CLONE_NEWUSER
  0x20000000,  # CLONE_NEWPID
  0x40000000,  # CLONE_NEWNET
)
# Others are outside the network namespace (AF_VSOCK reaches a virtual machine's host)
# or rarely used (AF_ALG).
_SOCKET_FAMILIES = (
  socket.AF_UNSPEC,
  socket.AF_UNIX,
  socket.AF_INET,
  socket.AF_INET6,
  socket.AF_NETLINK,
)
_LAST_FAMILY = 63
_TERMINAL_INPUT = (0x5412, 0x541C)  # ioctl TIOCSTI, TIOCLINUX: inject input
# Numbers that all architectures share, including those of future calls.
_NEW_CALLS = range(424, 512)

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ATTRIBUTE_FOREIGN, _ATTRIBUTE_OPTIMIZE = 2, 8
_BINARY_TREE = 2
_NOT_EQUAL, _GREATER, _MASKED_EQUAL = 1, 6, 7
_LOW = 0xFFFFFFFF  # the kernel reads these arguments as 32 bits, and so must the filter
_UNKNOWN = -1  # __NR_SCMP_ERROR


class _Comparison(ctypes.Structure):
  """`struct scmp_arg_cmp`."""

  _fields_ = (
    ('argument', ctypes.c_uint),
    ('operation', ctypes.c_int),
    ('first', ctypes.c_uint64),
    ('second', ctypes.c_uint64),
  )


class _Filter:
  """A filter under construction: `seccomp_init` to `seccomp_export_bpf`."""

  def __init__(self, library: ctypes.CDLL):
    self._library = library
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_void_p
    self._context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    if not self._context:
      raise OSError(errno.ENOMEM, 'libseccomp cannot create a filter')

  def set(self, attribute: int, value: int) -> bool:
    """Returns whether this version of the library supports the attribute."""
    value = ctypes.c_uint32(value)
    return self._library.seccomp_attr_set(self._context, attribute, value) == 0

  def number(self, name: str) -> int:
    """The number of a system call; below 0 if this machine does not have it."""
    return self._library.seccomp_syscall_resolve_name(name.encode())

  def knows(self, number: int) -> bool:
    """Whether the library has a name for a number."""
    native = ctypes.c_uint32(0)  # SCMP_ARCH_NATIVE
    name = self._library.seccomp_syscall_resolve_num_arch(native, number)
    if name:
      ctypes.CDLL(None).free(ctypes.c_void_p(name))
    return bool(name)

  def deny(self, number: int, error: int, *comparisons: tuple) -> None:
    """Makes a call fail with `error` if all comparisons hold."""
    action = ctypes.c_uint32(0x00050000 | error)  # SCMP_ACT_ERRNO
    rows = (_Comparison * len(comparisons))(*(_Comparison(*c) for c in comparisons))
    result = self._library.seccomp_rule_add_array(
      self._context, action, number, len(comparisons), rows
    )
    if result < 0:
      raise OSError(-result, f'libseccomp rejected a rule for system call {number}')

  def export(self) -> bytes:
    """Returns the program for the kernel."""
    fd = os.memfd_create('seccomp', os.MFD_CLOEXEC)
    try:
      result = self._library.seccomp_export_bpf(self._context, fd)
      if result < 0:
        raise OSError(-result, 'libseccomp cannot write the filter')
      return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
      os.close(fd)

  def release(self) -> None:
    """Frees the library's memory."""
    self._library.seccomp_release(self._context)


def is_installed() -> bool:
  """Whether the library is installed."""
  try:
    ctypes.CDLL(_LIBRARY)
  except OSError:
    return False
  return True


@functools.cache
def program() -> tuple[bytes | None, str]:
  """Returns `(the filter, '')`, or `(None, the reason why there is none)`."""
  machine = platform.machine()
  if machine not in _MACHINES:
    return None, f'no table of system calls for {machine}'
  if not is_installed():
    return None, f'{_LIBRARY} is not installed'
  try:
    rules = _Filter(ctypes.CDLL(_LIBRARY))
    try:
      _add_rules(rules)
      return rules.export(), ''
    finally:
      rules.release()
  except (OSError, AttributeError) as error:
    return None, str(error)


def _add_rules(rules: _Filter) -> None:
  rules.set(_ATTRIBUTE_FOREIGN, _KILL_PROCESS)
  rules.set(_ATTRIBUTE_OPTIMIZE, _BINARY_TREE)  # since 2.5; only for speed
  for names in _DENIED.values():
    for name in names.split():
      number = rules.number(name)
      if number >= 0:
        rules.deny(number, errno.EPERM)
      elif number == _UNKNOWN and name in ('ptrace', 'keyctl', 'mount'):
        raise OSError(errno.ENOSYS, f'libseccomp does not support {name}')
  rules.deny(rules.number(_ABSENT), errno.ENOSYS)
  for number in _NEW_CALLS:
    if not rules.knows(number):
      rules.deny(number, errno.ENOSYS)
  clone = rules.number('clone')
  for flag in _NAMESPACE_FLAGS:
    rules.deny(clone, errno.EPERM, (0, _MASKED_EQUAL, flag, flag))
  for name in ('socket', 'socketpair'):
    number = rules.number(name)
    for family in set(range(_LAST_FAMILY + 1)) - set(map(int, _SOCKET_FAMILIES)):
      rules.deny(number, errno.EAFNOSUPPORT, (0, _MASKED_EQUAL, _LOW, family))
    rules.deny(number, errno.EAFNOSUPPORT, (0, _GREATER, _LAST_FAMILY, 0))
  for request in _TERMINAL_INPUT:
    rules.deny(rules.number('ioctl'), errno.EPERM, (1, _MASKED_EQUAL, _LOW, request))
  _add_limit_rules(rules)


def _add_limit_rules(rules: _Filter) -> None:
  """Denies changing limits of other processes, and the limit of core dumps."""
  core = int(resource.RLIMIT_CORE)
  set_and_get = rules.number('prlimit64')
  rules.deny(
    set_and_get, errno.EPERM, (1, _MASKED_EQUAL, _LOW, core), (2, _NOT_EQUAL, 0, 0)
  )
  rules.deny(set_and_get, errno.EPERM, (0, _NOT_EQUAL, 0, 0))
  setrlimit = rules.number('setrlimit')
  if setrlimit >= 0:
    rules.deny(setrlimit, errno.EPERM, (0, _MASKED_EQUAL, _LOW, core))
