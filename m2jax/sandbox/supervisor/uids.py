"""Uids for sandboxes, none of which another supervisor of this machine uses.

Processes of one uid may signal each other in the weaker mode, and limits of the kernel
count by uid, so two supervisors must not have one uid at the same time. Uids come in
blocks of 64, and a supervisor owns a block by locking a file in a directory that only
root can enter: the kernel releases the lock when that process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import stat

_BLOCK = 64
_DIRECTORY = '/run/m2jax-uids'


class Uids:
  """Uids of [low, high); each is given out again as late as its blocks allow."""

  def __init__(self, low: int, high: int):
    self._low, self._high = low, high
    self._held: dict[int, int] = {}  # block -> descriptor of its lock
    self._free: list[int] = []

  def take(self) -> int:
    """A uid that nothing else uses.

    Raises:
      OSError: this and other supervisors use all of them.
    """
    if not self._free:
      self._hold_another()
    return self._free.pop(0)

  def give_back(self, uid: int) -> None:
    """Nothing runs under the uid any more."""
    self._free.append(uid)

  def _hold_another(self) -> None:
    os.makedirs(_DIRECTORY, 0o700, exist_ok=True)
    found = os.lstat(_DIRECTORY)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid or found.st_mode & 0o077:
      raise OSError(f"{_DIRECTORY} must be root's own directory, with mode 0700")
    blocks = range(self._low // _BLOCK, -(-self._high // _BLOCK))
    first = os.getpid() % len(blocks)
    for block in (*blocks[first:], *blocks[:first]):
      if block in self._held:
        continue
      path = os.path.join(_DIRECTORY, str(block))
      fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
      try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except OSError:  # another supervisor has it
        os.close(fd)
        continue
      self._held[block] = fd
      start = block * _BLOCK
      self._free += range(max(start, self._low), min(start + _BLOCK, self._high))
      return
    raise OSError(f'all uids from {self._low} to {self._high} are in use')
