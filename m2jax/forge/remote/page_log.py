"""The journal of an engine's cached pages, for readers in other processes.

A `PageJournal` has one reader, who takes every event once. Here events have numbers, so
that a reader whose request was lost asks for them again, and several routers may read
the same engine.
"""

from __future__ import annotations

import collections
import itertools
import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple

from m2jax.rollout.api import PageEvent


class Pages(NamedTuple):
  """What is new to a reader.

  Attributes:
    epoch: the log's epoch; another one after the engine has restarted.
    next: number of the event that comes after these.
    events: oldest first; the first is 'cleared' if the reader must start again.
  """

  epoch: str
  next: int
  events: Sequence[PageEvent]


class PageLog:
  """The latest events of a journal, up to `most`. Not thread-safe."""

  def __init__(self, read: Callable[[], Sequence[PageEvent]], most: int = 1 << 16):
    """Reads nothing yet; `read` returns what is new in the journal."""
    self._read, self._epoch = read, uuid.uuid4().hex
    self._events: collections.deque[PageEvent] = collections.deque(maxlen=most)
    self._next = 0

  def after(self, epoch: str, number: int) -> Pages:
    """The events from `number` on; all there are if these are not its reader's."""
    self._take()
    first = self._next - len(self._events)
    if epoch == self._epoch and first <= number <= self._next:
      events = list(itertools.islice(self._events, number - first, None))
    else:
      events = [PageEvent('cleared'), *self._events]
    return Pages(self._epoch, self._next, events)

  def _take(self) -> None:
    events = self._read()
    self._events.extend(events)
    self._next += len(events)
