"""Directories in the machine's temporary directory that do not outlive their processes.

A process locks its directory until it ends, however it ends; the next one that makes a
directory removes the unlocked ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_YOUNG_S = 60.0  # may not be locked yet


def directory(prefix: str, place: str | None = None) -> tuple[str, int]:
  """Makes a directory, whose name begins with `prefix`, and removes abandoned ones.

  Returns:
    Its path, and a descriptor: close it when the directory is removed.
  """
  place = place or tempfile.gettempdir()
  for path in Path(place).glob(f'{prefix}*'):
    with contextlib.suppress(OSError, RecursionError):  # another's, held, or too deep
      _remove_abandoned(path)
  path = tempfile.mkdtemp(prefix=prefix, dir=place)
  held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  fcntl.flock(held, fcntl.LOCK_SH)
  return path, held


def _remove_abandoned(path: Path) -> None:
  flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
  fd = os.open(path, flags)
  try:
    found = os.fstat(fd)
    young = found.st_mtime > time.time() - _YOUNG_S
    if found.st_uid == os.geteuid() and not young:
      fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
      shutil.rmtree(path, ignore_errors=True)
  finally:
    os.close(fd)
