"""Pages in host memory, by their keys (`page_keys`); evicts the least recently used.

Used by the engine's thread. The last page of a chain is evicted first: the others are
usable without it, but not vice versa.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from m2jax.rollout.tiers.page_layout import Page


@dataclasses.dataclass
class Entry:
  """A page. read: whether it came from the pool, and has not been used since."""

  page: Page
  read: bool = False


class HostCache:
  """Pages within a budget.

  Attributes:
    pages: maximum number; all have the same size.
    evicted: pages given up so far.
  """

  def __init__(self, pages: int):
    self.pages = pages
    self.evicted = 0
    self._entries: collections.OrderedDict[bytes, Entry] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._entries)

  def __contains__(self, key: bytes) -> bool:
    return key in self._entries

  def find(self, keys: Sequence[bytes]) -> list[Entry]:
    """The entries of the first keys, up to the first that is not here; uses them."""
    found = []
    for key in keys:
      if (entry := self._entries.get(key)) is None:
        break
      found.append(entry)
    for key in reversed(keys[: len(found)]):
      self._entries.move_to_end(key)
    return found

  def put(self, pages: Iterable[tuple[bytes, Page]], *, read: bool = False) -> None:
    """Stores pages, those of a chain in order."""
    for key, page in reversed(list(pages)):
      if key not in self._entries:
        self._entries[key] = Entry(page, read)
      self._entries.move_to_end(key)
    while len(self._entries) > self.pages:
      self._entries.popitem(last=False)
      self.evicted += 1

  def clear(self) -> None:
    self._entries.clear()
