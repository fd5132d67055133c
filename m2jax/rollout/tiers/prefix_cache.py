"""The host's record of pages: which are free, in use, or cached by their prefix.

A radix tree over whole pages of tokens: a node is one page, its path from the root is
the prefix that the page continues. Pages of running sequences are referenced and stay;
the others are cached until the space is needed. The least recently used are evicted
first, but always before the page that they continue.

Keys and values depend on the weights. `clear` forgets all pages: none is reused, and
the last user of a referenced page frees it.

All calls cost time proportional to the pages that they name, not to those that exist.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from m2jax.rollout.engine.pages import UNUSED
from m2jax.rollout.tiers import page_chain
from m2jax.rollout.tiers.page_journal import PageJournal


@dataclasses.dataclass(eq=False)
class Node:
  """A page with the tokens of its prefix that no other page before it has.

  Attributes:
    page: its number; the root's is UNUSED.
    version: version of the policy that computed it.
    users: running sequences that read it.
    used: when it was last used.
    known: whether it is in the tree; a sequence may still read it when it is not.
    digest: `page_chain` of its prefix, if there is a journal.
    name: its key in other memories (`tiers`), once it is needed.
  """

  parent: Node | None
  key: bytes
  page: int
  version: int = 0
  children: dict[bytes, Node] = dataclasses.field(default_factory=dict)
  users: int = 0
  used: int = 0
  known: bool = True
  digest: bytes = page_chain.ROOT
  name: bytes = b''


class PrefixCache:
  """The pages of one group of devices.

  Attributes:
    page_tokens: tokens of a page.
    pages: their number, without the unused one.
    evicted: cached pages given up so far.
    peak: largest number of pages in use at once.
    on_insert, on_evict: are passed each node that becomes known, or is given up while
      its page is still unchanged.
  """

  def __init__(self, pages: int, page_tokens: int, journal: PageJournal | None = None):
    """All pages are free; the journal, if any, records what is cached."""
    self._journal = journal
    self.page_tokens = page_tokens
    self.pages = pages - 1
    self.evicted = self.peak = 0
    self.on_insert: Callable[[Node], None] | None = None
    self.on_evict: Callable[[Node], None] | None = None
    self._free = list(range(pages - 1, UNUSED, -1))
    self._root = Node(None, b'', UNUSED)
    self._clock = itertools.count(1)
    self._idle = 0  # cached pages without users
    # Leaves without users when they were added, by time of use; most entries are old.
    self._leaves: list[tuple[int, int, Node]] = []

  @property
  def available(self) -> int:
    """Pages that `allocate` can give."""
    return len(self._free) + self._idle

  @property
  def cached(self) -> int:
    """Pages that no sequence reads."""
    return self._idle

  def match(self, tokens: np.ndarray) -> list[Node]:
    """The nodes of the longest known prefix of tokens [n], in whole pages."""
    node, found = self._root, []
    for key in _keys(tokens, self.page_tokens):
      if (node := node.children.get(key)) is None:
        break
      found.append(node)
    return found

  def hold(self, nodes: Sequence[Node]) -> None:
    """Adds a user to a prefix, so that it stays."""
    now = next(self._clock)
    for node in nodes:
      node.used = now
      self._idle -= node.users == 0
      node.users += 1

  def release(self, nodes: Sequence[Node]) -> None:
    """Ends the use of a prefix; it stays cached until its room is needed."""
    now = next(self._clock)
    for node in nodes:
      node.users -= 1
      node.used = now
      if node.users:
        continue
      if node.known:
        self._idle += 1
      else:
        self._free.append(node.page)
    if nodes:
      self._add_leaf(nodes[-1])

  def insert(
    self, before: Sequence[Node], tokens: np.ndarray, page: int, version: int
  ) -> Node | None:
    """Makes a sequence's own page, after the prefix `before`, known to others.

    Returns:
      The node of these tokens, with the sequence as a user. If another sequence has
      computed them with the same weights, it is that one's, and the page is free. None
      if the page stays the sequence's own: the prefix is no longer known, or its
      continuation is of other weights.
    """
    parent = before[-1] if before else self._root
    if not parent.known:
      return None
    key = _key(tokens)
    node = parent.children.get(key)
    if node is None:
      node = Node(parent, key, page, version, users=1, used=next(self._clock))
      parent.children[key] = node
      if self._journal is not None:
        node.digest = page_chain.link(parent.digest, key)
        self._journal.add('stored', node.digest, version)
      if self.on_insert is not None:
        self.on_insert(node)
      return node
    if node.version != version:
      return None
    self.hold([node])
    self.free([page])
    return node

  def allocate(self, count: int) -> list[int] | None:
    """Takes pages that hold nothing; None, and none taken, if there are too few."""
    if count > self.available:
      return None
    while len(self._free) < count:
      self._evict()
    taken = [self._free.pop() for _ in range(count)]
    self.peak = max(self.peak, self.pages - len(self._free))
    return taken

  def free(self, pages: Sequence[int]) -> None:
    """Gives back pages that `allocate` gave and `insert` did not take."""
    self._free.extend(pages)

  def clear(self) -> None:
    """Forgets all pages."""
    for node in self._nodes():
      node.known = False
      if not node.users:
        self._free.append(node.page)
    self._root.children.clear()
    self._leaves.clear()
    self._idle = 0
    if self._journal is not None:
      self._journal.add('cleared')

  def _add_leaf(self, node: Node) -> None:
    if node.known and node.parent and not node.users and not node.children:
      heapq.heappush(self._leaves, (node.used, node.page, node))

  def _evict(self) -> None:
    while True:
      used, _, node = heapq.heappop(self._leaves)
      if node.known and not node.users and not node.children and node.used == used:
        break
    if self.on_evict is not None:
      self.on_evict(node)
    node.known = False
    del node.parent.children[node.key]
    self._free.append(node.page)
    self._idle -= 1
    self.evicted += 1
    if self._journal is not None:
      self._journal.add('evicted', node.digest, node.version)
    self._add_leaf(node.parent)

  def _nodes(self) -> Iterator[Node]:
    left = list(self._root.children.values())
    while left:
      node = left.pop()
      left.extend(node.children.values())
      yield node


def _key(tokens: np.ndarray) -> bytes:
  return np.ascontiguousarray(tokens, np.int32).tobytes()


def _keys(tokens: np.ndarray, page_tokens: int) -> Iterator[bytes]:
  for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
    yield _key(tokens[start : start + page_tokens])
