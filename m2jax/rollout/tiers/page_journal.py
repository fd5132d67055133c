"""Changes of an engine's cached pages, for a reader in another thread.

`PrefixCache` writes, a router reads. Nothing is recorded before the first read. The
journal is bounded: if it is not read in time, it is dropped, and the reader is notified
that it must start over.
"""

from __future__ import annotations

import collections

from m2jax.rollout.api import PageEvent


class PageJournal:
  """The latest changes, oldest first. Thread-safe for one writer and one reader."""

  def __init__(self, most: int = 1 << 16):
    """Keeps up to `most` unread events."""
    self._events: collections.deque[PageEvent] = collections.deque()
    self._most = most
    self._read = False  # ever

  @property
  def is_read(self) -> bool:
    """Whether there is a reader."""
    return self._read

  def add(self, kind: str, digest: bytes = b'', version: int = 0) -> None:
    if not self._read:
      return
    if len(self._events) >= self._most:
      # As if the pages were gone: a reader then expects too little, never too much.
      self._events.clear()
      self._events.append(PageEvent('cleared'))
    self._events.append(PageEvent(kind, digest, version))

  def read(self) -> list[PageEvent]:
    """Removes and returns what was added since the last call; none at the first."""
    self._read = True
    events = []
    while True:
      try:
        events.append(self._events.popleft())
      except IndexError:  # empty; the writer may add at any time
        return events
