"""A private PostgreSQL server, the gateway tests' gateways, and small disks."""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from tests.gateway.conftest import serve, tok
from tests.pool.conftest import postgresql

__all__ = ['postgresql', 'serve', 'tok']


class SmallDisk:
  """A file system of its own, which can be full."""

  def __init__(self, path):
    self.path, self._ballast = path, path / 'ballast'

  def fill(self) -> None:
    """Takes all space that is left."""
    with open(self._ballast, 'ab', buffering=0) as file:
      for size in (1 << 20, 1 << 12):
        with contextlib.suppress(OSError):
          while file.write(bytes(size)):
            continue

  def make_room(self) -> None:
    self._ballast.unlink()


@pytest.fixture
def small_disk(tmp_path):
  """small_disk(size): a SmallDisk of a size such as '8m'; skips where none can be."""
  with contextlib.ExitStack() as stack:

    def make(size):
      path = tmp_path / 'disk'
      path.mkdir()
      if os.geteuid():
        pytest.skip('a small file system can be mounted by root only')
      mount = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', path]
      found = subprocess.run(mount, capture_output=True, text=True)
      if found.returncode:
        pytest.skip(f'no tmpfs can be mounted here: {found.stderr.strip()}')
      stack.callback(subprocess.run, ['umount', '-l', path], check=True)
      return SmallDisk(path)

    yield make
