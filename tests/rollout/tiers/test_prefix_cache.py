"""Pages on the host: none is lost, none is twice, none of other tokens is found.

A stateful test against a list of running sequences and a dict of what was stored.
"""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  Bundle,
  RuleBasedStateMachine,
  consumes,
  invariant,
  precondition,
  rule,
)

from m2jax.rollout.tiers.prefix_cache import PrefixCache

PAGES, PAGE = 12, 2
TOKENS = st.lists(st.integers(0, 1), min_size=0, max_size=14).map(np.array)


class Running:
  """A sequence: its tokens, the nodes that it shares and pages of its own."""

  def __init__(self, tokens, shared, own):
    self.tokens, self.shared, self.own = tokens, shared, own


class Machine(RuleBasedStateMachine):
  running = Bundle('running')

  def __init__(self):
    super().__init__()
    self.cache = PrefixCache(PAGES, PAGE)
    self.alive: list[Running] = []
    self.stored: dict[int, tuple] = {}  # by page: the prefix up to its end
    self.version = 0

  @rule(target=running, tokens=TOKENS)
  def start(self, tokens):
    """Takes what is known of a prompt, and pages for the rest."""
    nodes = self.cache.match(tokens)
    self.cache.hold(nodes)
    need = -(-len(tokens) // PAGE) - len(nodes)
    before = self.cache.available
    own = self.cache.allocate(need)
    assert (own is None) == (need > before)
    if own is None:
      self.cache.release(nodes)
      one = Running(tokens[:0], [], [])
    else:
      one = Running(tokens, nodes, own)
    for page in own or ():
      self.stored.pop(page, None)
    for i, node in enumerate(nodes):
      want = (self.version, *tokens[: (i + 1) * PAGE])
      assert self.stored[node.page] == want
    self.alive.append(one)
    return one

  @rule(one=running)
  def share(self, one):
    """Makes the full pages known; the same tokens of the same weights are one page."""
    while one.own and (len(one.shared) + 1) * PAGE <= len(one.tokens):
      index = len(one.shared)
      part = one.tokens[index * PAGE : (index + 1) * PAGE]
      node = self.cache.insert(one.shared, part, one.own[0], self.version)
      if node is None:
        return
      mine, one.own = one.own[0], one.own[1:]
      if node.page == mine:
        path = (self.version, *one.tokens[: (index + 1) * PAGE])
        assert path not in self.stored.values() or not all(n.known for n in one.shared)
        self.stored[mine] = path
      one.shared.append(node)

  @rule(one=consumes(running))
  def end(self, one):
    self.cache.free(one.own)
    self.cache.release(one.shared)
    self.alive.remove(one)

  @precondition(lambda self: self.stored)
  @rule()
  def replace_weights(self):
    """Nothing that was known is found again."""
    self.cache.clear()
    assert self.cache.cached == 0
    self.version += 1

  @invariant()
  def every_page_is_somewhere_once(self):
    held = {node.page for one in self.alive for node in one.shared}
    own = [page for one in self.alive for page in one.own]
    assert len(set(own)) == len(own) and not held & set(own)
    assert self.cache.available + len(held) + len(own) == PAGES - 1
    assert 0 not in held and 0 not in own

  def teardown(self):
    """Without users all pages can be had."""
    for one in self.alive:
      self.cache.free(one.own)
      self.cache.release(one.shared)
    assert sorted(self.cache.allocate(PAGES - 1)) == list(range(1, PAGES))
    assert self.cache.allocate(1) is None


TestPrefixCache = Machine.TestCase
TestPrefixCache.settings = settings(deadline=None)


def stored(cache, tokens):
  """Stores a sequence that then ends."""
  nodes = cache.match(tokens)
  cache.hold(nodes)
  pages = cache.allocate(len(tokens) // PAGE - len(nodes))
  for page in pages:
    at = len(nodes) * PAGE
    nodes.append(cache.insert(nodes, tokens[at : at + PAGE], page, 0))
  cache.release(nodes)


def test_the_least_recently_used_prefix_goes_first():
  """And a page never before those that continue it: they would be unreachable."""
  cache = PrefixCache(7, PAGE)
  first, second = np.array([1, 1, 2, 2, 3, 3]), np.array([4, 4, 5, 5, 6, 6])
  stored(cache, first)
  stored(cache, second)
  stored(cache, first)  # used again
  assert cache.available == 6 and cache.allocate(2) is not None
  assert [len(cache.match(t)) for t in (first, second)] == [3, 1]
  assert cache.evicted == 2


def test_pages_of_other_weights_are_not_mixed():
  """A continuation by new weights stays the sequence's own where the old is known."""
  cache = PrefixCache(7, PAGE)
  tokens = np.array([1, 1])
  stored(cache, tokens)
  (page,) = cache.allocate(1)
  assert cache.insert([], tokens, page, version=1) is None
  cache.clear()
  assert cache.insert([], tokens, page, version=1).page == page
