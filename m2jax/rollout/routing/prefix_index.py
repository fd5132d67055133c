"""Which prefixes an engine replica is likely to have, as far as a router can know.

Pages are named by their digests (`tiers.page_chain`), of one policy version. The index
learns from requests that were routed to the replica, whose pages will be there soon,
and from the replica's journal of what it stored and evicted. It is bounded by the pages
of the replica: the least recently used go first, a page always before the one that it
continues, as in the replica's own cache. It may be wrong in both directions: a request
may then compute more or less than expected.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from m2jax.rollout.api import PageEvent


class PrefixIndex:
  """The pages of one replica.

  Attributes:
    capacity: maximum pages.
    version: the policy's version; pages of older ones are not found, unless
      `keep_stale`.
  """

  def __init__(self, capacity: int, version: int = 0, *, keep_stale: bool = False):
    if capacity < 1:
      raise ValueError(f'capacity={capacity}: must be at least 1')
    self.capacity = capacity
    self.version = version
    self._keep_stale = keep_stale
    # Least recently used first. Every page is used after its continuations.
    self._pages: collections.OrderedDict[bytes, None] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._pages)

  def match(self, chain: Sequence[bytes]) -> int:
    """Pages of the longest known prefix of a chain."""
    pages = self._pages
    for count, digest in enumerate(chain):
      if digest not in pages:
        return count
    return len(chain)

  def use(self, chain: Sequence[bytes], version: int) -> None:
    """Expects the pages of a request that was sent to the replica, or has ended there.

    Args:
      version: version of the policy that the replica had; an older one's pages are not
        added.
    """
    if version < self.version and not self._keep_stale:
      return
    for digest in reversed(chain[: self.capacity]):
      self._pages[digest] = None
      self._pages.move_to_end(digest)
    self._trim()

  def apply(self, events: Iterable[PageEvent]) -> None:
    """Follows the replica's journal."""
    for event in events:
      if event.kind == 'stored':
        if event.version >= self.version or self._keep_stale:
          self._pages.setdefault(event.digest)
      elif event.kind == 'evicted':
        self._pages.pop(event.digest, None)
      else:
        self._pages.clear()
    self._trim()

  def advance(self, version: int) -> None:
    """The replica gets new weights: pages of older ones are useless."""
    if version <= self.version:
      return
    self.version = version
    if not self._keep_stale:
      self._pages.clear()

  def clear(self) -> None:
    """The replica has lost its pages."""
    self._pages.clear()

  def _trim(self) -> None:
    while len(self._pages) > self.capacity:
      self._pages.popitem(last=False)
