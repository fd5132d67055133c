"""The system calls that a sandboxed command may not make, as a seccomp program.

libseccomp compiles the table below for this machine's architecture and knows the
numbers of its calls; bubblewrap loads the result (`bwrap --seccomp`). A call of another
architecture (i386 and x32 on x86_64) kills the process. A call that is newer than the
installed libseccomp fails with ENOSYS, as on an older kernel: nobody has judged it yet.
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
# Elsewhere the arguments of clone(2) may be in another order: not tried.
_MACHINES = ('x86_64', 'aarch64')
_REFUSED = {
  'reach into other processes': (
    'ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp '
    'pidfd_getfd move_pages migrate_pages'
  ),
  'keys of the kernel, which outlive a process': 'add_key request_key keyctl',
  'parts of the kernel with a history of holes, rarely needed': (
    'io_setup '
    'userfaultfd io_uring_setup io_uring_enter io_uring_register bpf perf_event_open '
    'personality modify_ldt vm86 vm86old uselib lookup_dcookie remap_file_pages'
  ),
  'memory and queues that no file limit counts': (
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
# Its flags are behind a pointer; on ENOSYS libraries use clone, whose flags are not.
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
# Others are not in the network namespace (AF_VSOCK reaches a virtual machine's host)
# or are rarely used code (AF_ALG).
_SOCKET_FAMILIES = (
  socket.AF_UNSPEC,
  socket.AF_UNIX,
  socket.AF_INET,
  socket.AF_INET6,
  socket.AF_NETLINK,
)
_LAST_FAMILY = 63
_TERMINAL_INPUT = (0x5412, 0x541C)  # ioctl TIOCSTI, TIOCLINUX: type for another
# Between the calls that every architecture numbers for itself and what the next years
# may bring.
_NEW_CALLS = range(424, 512)

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ATTRIBUTE_FOREIGN, _ATTRIBUTE_OPTIMIZE = 2, 8
_BINARY_TREE = 2
_NOT_EQUAL, _GREATER, _MASKED_EQUAL = 1, 6, 7
_LOW = 0xFFFFFFFF  # the kernel reads these arguments as 32 bits: so must the filter
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
  """A filter being built: `seccomp_init` to `seccomp_export_bpf`."""

  def __init__(self, library: ctypes.CDLL):
    self._library = library
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_syscall_resolve_num_arch.restype = ctypes.c_void_p
    self._context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    if not self._context:
      raise OSError(errno.ENOMEM, 'libseccomp cannot start a filter')

  def set(self, attribute: int, value: int) -> bool:
    """Returns whether this version of the library knows the attribute."""
    value = ctypes.c_uint32(value)
    return self._library.seccomp_attr_set(self._context, attribute, value) == 0

  def number(self, name: str) -> int:
    """The number of a system call here; below 0 for one that is not of this machine."""
    return self._library.seccomp_syscall_resolve_name(name.encode())

  def knows(self, number: int) -> bool:
    """Whether the library has a name for a number."""
    native = ctypes.c_uint32(0)  # SCMP_ARCH_NATIVE
    name = self._library.seccomp_syscall_resolve_num_arch(native, number)
    if name:
      ctypes.CDLL(None).free(ctypes.c_void_p(name))
    return bool(name)

  def refuse(self, number: int, error: int, *comparisons: tuple) -> None:
    """Makes a call fail with `error`, where all comparisons hold."""
    action = ctypes.c_uint32(0x00050000 | error)  # SCMP_ACT_ERRNO
    rows = (_Comparison * len(comparisons))(*(_Comparison(*c) for c in comparisons))
    result = self._library.seccomp_rule_add_array(
      self._context, action, number, len(comparisons), rows
    )
    if result < 0:
      raise OSError(-result, f'libseccomp refused a rule for system call {number}')

  def export(self) -> bytes:
    """Returns the program that the kernel takes."""
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
  """Whether the library is there."""
  try:
    ctypes.CDLL(_LIBRARY)
  except OSError:
    return False
  return True


@functools.cache
def program() -> tuple[bytes | None, str]:
  """Returns `(the filter, '')`, or `(None, why this machine has none)`."""
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
  rules.set(_ATTRIBUTE_OPTIMIZE, _BINARY_TREE)  # of 2.5; only faster
  for names in _REFUSED.values():
    for name in names.split():
      number = rules.number(name)
      if number >= 0:
        rules.refuse(number, errno.EPERM)
      elif number == _UNKNOWN and name in ('ptrace', 'keyctl', 'mount'):
        raise OSError(errno.ENOSYS, f'libseccomp does not know {name}')
  rules.refuse(rules.number(_ABSENT), errno.ENOSYS)
  for number in _NEW_CALLS:
    if not rules.knows(number):
      rules.refuse(number, errno.ENOSYS)
  clone = rules.number('clone')
  for flag in _NAMESPACE_FLAGS:
    rules.refuse(clone, errno.EPERM, (0, _MASKED_EQUAL, flag, flag))
  for name in ('socket', 'socketpair'):
    number = rules.number(name)
    for family in set(range(_LAST_FAMILY + 1)) - set(map(int, _SOCKET_FAMILIES)):
      rules.refuse(number, errno.EAFNOSUPPORT, (0, _MASKED_EQUAL, _LOW, family))
    rules.refuse(number, errno.EAFNOSUPPORT, (0, _GREATER, _LAST_FAMILY, 0))
  for request in _TERMINAL_INPUT:
    rules.refuse(rules.number('ioctl'), errno.EPERM, (1, _MASKED_EQUAL, _LOW, request))
  _add_limit_rules(rules)


def _add_limit_rules(rules: _Filter) -> None:
  """Limits of other processes, and the one that keeps core dumps from a handler."""
  core = int(resource.RLIMIT_CORE)
  set_and_get = rules.number('prlimit64')
  rules.refuse(
    set_and_get, errno.EPERM, (1, _MASKED_EQUAL, _LOW, core), (2, _NOT_EQUAL, 0, 0)
  )
  rules.refuse(set_and_get, errno.EPERM, (0, _NOT_EQUAL, 0, 0))
  setrlimit = rules.number('setrlimit')
  if setrlimit >= 0:
    rules.refuse(setrlimit, errno.EPERM, (0, _MASKED_EQUAL, _LOW, core))
