"""Seccomp programs that allow sandboxed commands the system calls that programs need.

libseccomp compiles both for this machine's architecture. One has the calls of the
table below; all others, also those that are newer than this table or than the installed
libseccomp, fail with ENOSYS, as on an older kernel, for which programs are prepared.
The other looks at arguments. The kernel runs both and takes the stricter answer. A call
of another architecture (i386 and x32 on x86_64) kills the process.
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
_ALLOWED = {
  # Without sync and syncfs, which write what the whole machine has not written yet.
  'files': (
    'access chdir chmod chown close close_range copy_file_range creat dup dup2 dup3 '
    'faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchmodat2 fchown '
    'fchownat fcntl fdatasync flock fstat fstatfs fsync ftruncate futimesat getcwd '
    'getdents getdents64 ioctl lchown link linkat lseek lstat mkdir mkdirat mknod '
    'mknodat newfstatat open openat openat2 pipe pipe2 pread64 preadv preadv2 pwrite64 '
    'pwritev pwritev2 read readahead readlink readlinkat readv rename renameat '
    'renameat2 rmdir sendfile splice stat statfs statx symlink symlinkat '
    'sync_file_range tee truncate umask unlink unlinkat utime utimensat utimes '
    'vmsplice write writev'
  ),
  # Those that set attributes are absent: no limit counts an attribute's memory.
  'attributes of files': (
    'fgetxattr flistxattr fremovexattr getxattr lgetxattr listxattr llistxattr '
    'lremovexattr removexattr'
  ),
  'memory': (
    'brk cachestat get_mempolicy madvise map_shadow_stack mbind membarrier mincore '
    'mlock mlock2 mlockall mmap mprotect mremap msync munlock munlockall munmap '
    'pkey_alloc pkey_free pkey_mprotect set_mempolicy set_mempolicy_home_node'
  ),
  'processes and threads': (
    'arch_prctl capget capset clone execve execveat exit exit_group fork futex '
    'futex_requeue futex_wait futex_waitv futex_wake get_robust_list get_thread_area '
    'getcpu getegid geteuid getgid getgroups getpgid getpgrp getpid getppid '
    'getpriority getresgid getresuid getrlimit getrusage getsid gettid getuid '
    'ioprio_get ioprio_set landlock_add_rule landlock_create_ruleset '
    'landlock_restrict_self pidfd_open prctl prlimit64 rseq sched_get_priority_max '
    'sched_get_priority_min sched_getaffinity sched_getattr sched_getparam '
    'sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr '
    'sched_setparam sched_setscheduler sched_yield seccomp set_robust_list '
    'set_thread_area set_tid_address setfsgid setfsuid setgid setgroups setpgid '
    'setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid times '
    'vfork wait4 waitid'
  ),
  'signals': (
    'alarm kill pause pidfd_send_signal restart_syscall rt_sigaction rt_sigpending '
    'rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait '
    'rt_tgsigqueueinfo sigaltstack signalfd signalfd4 tgkill tkill'
  ),
  'sockets': (
    'accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom '
    'recvmmsg recvmsg sendmmsg sendmsg sendto setsockopt shutdown socket socketpair'
  ),
  'events and time': (
    'clock_getres clock_gettime clock_nanosleep epoll_create epoll_create1 epoll_ctl '
    'epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 getitimer gettimeofday '
    'inotify_add_watch inotify_init inotify_init1 inotify_rm_watch nanosleep poll '
    'ppoll pselect6 select setitimer time timer_create timer_delete timer_getoverrun '
    'timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime'
  ),
  'the machine': 'getrandom sysinfo uname',
}
# An architecture may lack one of the others, and an older libseccomp a name.
_REQUIRED = 'read write openat mmap clone execve exit_group wait4'
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
# setsockopt (level, option) that take memory no limit counts, have the kernel wait, or
# change tables that all networks share. They succeed without effect.
_IGNORED_OPTIONS = (
  *((int(socket.SOL_SOCKET), option) for option in (7, 8)),  # SO_SNDBUF, SO_RCVBUF
  (int(socket.SOL_SOCKET), 13),  # SO_LINGER
  *((int(socket.SOL_SOCKET), option) for option in (26, 50, 51, 52)),  # filters
  (int(socket.IPPROTO_IPV6), 32),  # IPV6_FLOWLABEL_MGR
)

_ALLOW = 0x7FFF0000
_ERROR = 0x00050000  # SCMP_ACT_ERRNO, with the number
_KILL_PROCESS = 0x80000000
_ATTRIBUTE_FOREIGN, _ATTRIBUTE_OPTIMIZE = 2, 8
_BINARY_TREE = 2
_NOT_EQUAL, _GREATER, _MASKED_EQUAL = 1, 6, 7
_LOW = 0xFFFFFFFF  # the kernel reads these arguments as 32 bits, and so must the filter


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

  def __init__(self, library: ctypes.CDLL, default: int):
    self._library = library
    library.seccomp_init.restype = ctypes.c_void_p
    self._context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(default)))
    if not self._context:
      raise OSError(errno.ENOMEM, 'libseccomp cannot create a filter')
    self._set(_ATTRIBUTE_FOREIGN, _KILL_PROCESS)
    self._set(_ATTRIBUTE_OPTIMIZE, _BINARY_TREE)  # since 2.5; only for speed

  def _set(self, attribute: int, value: int) -> None:
    value = ctypes.c_uint32(value)
    self._library.seccomp_attr_set(self._context, attribute, value)

  def number(self, name: str) -> int:
    """The number of a system call; below 0 if this machine does not have it."""
    return self._library.seccomp_syscall_resolve_name(name.encode())

  def add(self, action: int, number: int, *comparisons: tuple) -> None:
    """Gives a call an action if all comparisons hold."""
    rows = (_Comparison * len(comparisons))(*(_Comparison(*c) for c in comparisons))
    action = ctypes.c_uint32(action)
    result = self._library.seccomp_rule_add_array(
      self._context, action, number, len(comparisons), rows
    )
    if result < 0:
      raise OSError(-result, f'libseccomp rejected a rule for system call {number}')

  def deny(self, name: str, error: int, *comparisons: tuple) -> None:
    """Makes a call fail with `error` (0: succeed without effect)."""
    number = self.number(name)
    if number >= 0:
      self.add(_ERROR | error, number, *comparisons)

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
def programs() -> tuple[tuple[bytes, ...], str]:
  """Returns `(the filters, '')`, or `((), the reason why there are none)`."""
  machine = platform.machine()
  if machine not in _MACHINES:
    return (), f'no table of system calls for {machine}'
  if not is_installed():
    return (), f'{_LIBRARY} is not installed'
  try:
    library = ctypes.CDLL(_LIBRARY)
    return tuple(_compile(library, *parts) for parts in _FILTERS), ''
  except (OSError, AttributeError) as error:
    return (), str(error)


def _compile(library: ctypes.CDLL, default: int, add_rules) -> bytes:
  rules = _Filter(library, default)
  try:
    add_rules(rules)
    return rules.export()
  finally:
    rules.release()


def _allow_calls(rules: _Filter) -> None:
  for name in _REQUIRED.split():
    if rules.number(name) < 0:
      raise OSError(errno.ENOSYS, f'libseccomp does not support {name}')
  for names in _ALLOWED.values():
    for name in names.split():
      number = rules.number(name)
      if number >= 0:
        rules.add(_ALLOW, number)


def _check_arguments(rules: _Filter) -> None:
  for flag in _NAMESPACE_FLAGS:
    rules.deny('clone', errno.EPERM, (0, _MASKED_EQUAL, flag, flag))
  for name in ('socket', 'socketpair'):
    for family in set(range(_LAST_FAMILY + 1)) - set(map(int, _SOCKET_FAMILIES)):
      rules.deny(name, errno.EAFNOSUPPORT, (0, _MASKED_EQUAL, _LOW, family))
    rules.deny(name, errno.EAFNOSUPPORT, (0, _GREATER, _LAST_FAMILY, 0))
  # Processes can send one another messages by the other protocols, and no limit counts
  # the memory of those that nobody receives.
  netlink = (0, _MASKED_EQUAL, _LOW, int(socket.AF_NETLINK))
  route = (2, _NOT_EQUAL, 0, 0)  # NETLINK_ROUTE: the kernel's answers only
  rules.deny('socket', errno.EPROTONOSUPPORT, netlink, route)
  for level, option in _IGNORED_OPTIONS:
    level = (1, _MASKED_EQUAL, _LOW, level)
    rules.deny('setsockopt', 0, level, (2, _MASKED_EQUAL, _LOW, option))
  for request in _TERMINAL_INPUT:
    rules.deny('ioctl', errno.EPERM, (1, _MASKED_EQUAL, _LOW, request))
  # Limits of other processes, and the limit of core dumps.
  core = (1, _MASKED_EQUAL, _LOW, int(resource.RLIMIT_CORE))
  rules.deny('prlimit64', errno.EPERM, core, (2, _NOT_EQUAL, 0, 0))
  rules.deny('prlimit64', errno.EPERM, (0, _NOT_EQUAL, 0, 0))
  rules.deny('setrlimit', errno.EPERM, (0, *core[1:]))


_FILTERS = (
  (_ALLOW, _check_arguments),
  (_ERROR | errno.ENOSYS, _allow_calls),
)
