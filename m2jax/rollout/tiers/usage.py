"""Which pages a store has, how large they are, and which were used least recently.

The writer enforces the bound on bytes: it makes space before it writes a value.
Several processes may share a store; each lists it when it starts and whenever it has
written a sixteenth of the bound, so that p processes may exceed the bound by p
sixteenths in between. For local files the time of last use is the file's modification
time, which survives a restart and which all processes see; elsewhere it is known for
the life of a process.

Only names that `page_name` makes are listed, counted and deleted.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import re
import threading
import time

import tensorstore as ts

_NAME = re.compile(r'[0-9a-f]{2}/[0-9a-f]{64}-([0-9]{1,15})\.page')
_LOCK_SUFFIX = '.page.__lock'  # of tensorstore's file driver, while it writes
_ABANDONED_S = 600.0
_SCAN_SHARE = 16


def page_name(key: bytes, size: int) -> str:
  """The name of a page's value of `size` bytes."""
  return f'{key.hex()[:2]}/{key.hex()}-{size}.page'


class Usage:
  """Names in a store by their last use. Thread-safe.

  Attributes:
    capacity: bytes.
    total: bytes in the store, with those that are being written.
    evicted: values deleted to make room.
  """

  def __init__(self, store: ts.KvStore, capacity: int, timeout_s: float):
    """Lists the store; raises what tensorstore raises."""
    self.capacity, self.evicted, self.total = capacity, 0, 0
    self._store, self._timeout_s = store, timeout_s
    spec = store.spec().to_json()
    self._files = pathlib.Path(spec['path']) if spec['driver'] == 'file' else None
    self._sizes: collections.OrderedDict[str, int] = collections.OrderedDict()
    self._writing: dict[str, int] = {}
    self._written = 0  # bytes since the last listing
    self._lock = threading.Condition()
    with self._lock:
      self._scan()

  def __contains__(self, name: str) -> bool:
    with self._lock:
      return name in self._sizes or name in self._writing

  def __len__(self) -> int:
    return len(self._sizes)

  def used(self, name: str, size: int) -> None:
    """A value was read."""
    with self._lock:
      if name not in self._sizes:  # another process wrote it
        self.total += size
      self._sizes[name] = size
      self._sizes.move_to_end(name)
    if self._files is not None:
      with contextlib.suppress(OSError):
        os.utime(self._files / name)

  def gone(self, name: str) -> None:
    """A value was not found, or deleted."""
    with self._lock:
      self.total -= self._sizes.pop(name, 0)

  def begin(self, name: str, size: int) -> bool:
    """Makes room for a value of at most the capacity, waiting for others if it must.

    Returns:
      False if the value is there or being written.
    """
    with self._lock:
      self._written += size
      if self._written * _SCAN_SHARE > self.capacity:
        self._scan()
      while True:
        if name in self._sizes or name in self._writing:
          return False
        if self.total + size <= self.capacity:
          break
        self._make_room()
      self._writing[name] = size
      self.total += size
      return True

  def end(self, name: str, *, stored: bool) -> None:
    """A value that had room was written, or could not be."""
    with self._lock:
      size = self._writing.pop(name)
      if stored:
        # A listing in the meantime may have found it.
        self.total -= self._sizes.pop(name, 0)
        self._sizes[name] = size
      else:
        self.total -= size
      self._lock.notify_all()

  def _make_room(self) -> None:
    if not self._sizes and self._writing:
      self._lock.wait()
      return
    name, size = self._sizes.popitem(last=False)
    self.total -= size
    self.evicted += 1
    self._store.write(name, None).result(self._timeout_s)  # deletes it

  def _scan(self) -> None:
    """Lists the store; what is known of the order of use stays."""
    names = self._store.list().result(self._timeout_s)
    order = {name: i for i, name in enumerate(self._sizes)}
    found = []
    for name in (raw.decode('utf-8', 'replace') for raw in names):
      match = _NAME.fullmatch(name)
      if match is None or name in self._writing:
        continue
      size, used = int(match[1]), float(order.get(name, -1))
      if self._files is not None:
        try:
          status = (self._files / name).stat(follow_symlinks=False)
        except OSError:
          continue
        size, used = status.st_size, status.st_mtime
      found.append((used, name, size))
    self._sizes.clear()
    self._sizes.update((name, size) for _, name, size in sorted(found))
    self.total = sum(self._sizes.values()) + sum(self._writing.values())
    self._written = 0
    if self._files is not None:
      self._remove_abandoned()

  def _remove_abandoned(self) -> None:
    """Deletes what processes that were killed had not finished writing."""
    before = time.time() - _ABANDONED_S
    for path in self._files.glob(f'[0-9a-f][0-9a-f]/*{_LOCK_SUFFIX}'):
      with contextlib.suppress(OSError):
        if path.stat(follow_symlinks=False).st_mtime < before:
          path.unlink()
