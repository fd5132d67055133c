"""Keeps a process from starting others, by a filter of its system calls (seccomp).

In Python 3.11 to 3.13, C code starts processes without an audit event (guards.py), and
no guard sees what such a process reads or computes. Threads are not blocked.

Filter: Linux, Documentation/userspace-api/seccomp_filter.rst. Standard library only:
the file is copied into each task.
"""

import errno
import os
import platform

# Events of guards.py after which a process may start others.
_STARTS = frozenset(
  'os.fork os.forkpty os.posix_spawn os.system subprocess.Popen'.split()
)
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _RETURN = 0x20, 0x06  # a word of the call; of the filter
_EQUAL, _AT_LEAST, _ANY_BIT = 0x15, 0x35, 0x45  # jumps
_NUMBER, _ARCH, _FLAGS = 0, 4, 16  # offsets in the call's data; of the first argument
_CLONE_THREAD, _CLONE3, _X32 = 0x10000, 435, 0x40000000
# AUDIT_ARCH_*, and the numbers of clone, fork and vfork.
_CALLS = {'x86_64': (0xC000003E, 56, 57, 58), 'aarch64': (0xC00000B7, 220)}


def may_start(audited):
  """Whether the right sources start processes; `audited`: their events, or None."""
  return audited is None or any(key.partition(' ')[0] in _STARTS for key in audited)


def stay():
  """From here on fork and similar calls raise `PermissionError` in this process.

  Raises:
    OSError: the kernel has no filters.
  """
  import ctypes

  if platform.machine() not in _CALLS:
    return
  program = _program(*_CALLS[platform.machine()])
  code = b''.join(
    c.to_bytes(2, 'little') + bytes((yes, no)) + k.to_bytes(4, 'little')
    for c, yes, no, k in program
  )

  class Program(ctypes.Structure):
    _fields_ = [('length', ctypes.c_ushort), ('filter', ctypes.c_char_p)]

  filter_ = Program(len(program), code)
  prctl = ctypes.CDLL(None, use_errno=True).prctl
  none = ctypes.c_ulong(0)
  for option, value, data in (
    (_PR_SET_NO_NEW_PRIVS, 1, none),
    (_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(filter_)),
  ):
    if prctl(option, ctypes.c_ulong(value), data, none, none):
      number = ctypes.get_errno()
      raise OSError(number, f'prctl({option}): {os.strerror(number)}')


def _program(arch, clone, *forks):
  """Instructions (code, jump if so, jump if not, value) of the filter."""
  refused = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
  return [
    (_LOAD, 0, 0, _ARCH),
    (_EQUAL, 1, 0, arch),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, _NUMBER),
    (_AT_LEAST, 0, 1, _X32),
    refused,
    (_EQUAL, 0, 1, _CLONE3),
    (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),  # threads then start by clone
    *(step for fork in forks for step in ((_EQUAL, 0, 1, fork), refused)),
    (_EQUAL, 1, 0, clone),
    (_RETURN, 0, 0, _ALLOW),
    (_LOAD, 0, 0, _FLAGS),
    (_ANY_BIT, 1, 0, _CLONE_THREAD),
    refused,
    (_RETURN, 0, 0, _ALLOW),
  ]
