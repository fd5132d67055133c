"""What a router believes of a replica's pages: bounded, of one version, corrected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.rollout.api import PageEvent
from m2jax.rollout.routing.prefix_index import PrefixIndex
from m2jax.rollout.tiers import page_chain
from m2jax.rollout.tiers.page_journal import PageJournal
from m2jax.rollout.tiers.prefix_cache import PrefixCache

PAGE = 2
TOKENS = st.lists(st.integers(0, 1), max_size=16).map(np.array)


def chain(tokens) -> list[bytes]:
  return page_chain.chain(np.array(tokens, np.int32), PAGE)


@given(TOKENS, TOKENS, st.integers(0, 4))
def test_equal_digests_are_equal_prefixes(a, b, known):
  same = 0
  while same + PAGE <= min(len(a), len(b)) and np.array_equal(
    a[: same + PAGE], b[: same + PAGE]
  ):
    same += PAGE
  x, y = chain(a), chain(b)
  assert len(x) == len(a) // PAGE
  assert [p == q for p, q in zip(x, y, strict=False)].count(True) == same // PAGE
  assert page_chain.chain(a, PAGE, x[:known]) == x


@given(
  st.lists(
    st.one_of(
      st.tuples(st.just('use'), TOKENS),
      st.tuples(st.just('evicted'), TOKENS),
      st.tuples(st.just('stored'), TOKENS),
      st.tuples(st.just('cleared'), TOKENS),
      st.tuples(st.just('advance'), TOKENS),
    ),
    max_size=30,
  )
)
def test_it_is_bounded_and_finds_only_what_it_was_told(steps):
  index, version, told = PrefixIndex(4), 0, set()
  for kind, tokens in steps:
    digests = chain(tokens)
    if kind == 'use':
      index.use(digests, version)
      told |= set(digests)
      assert index.match(digests) == min(len(digests), 4)
    elif kind == 'advance':
      version += 1
      index.advance(version)
      told.clear()
    elif kind == 'cleared':
      index.apply([PageEvent('cleared')])
      told.clear()
    elif digests:
      index.apply([PageEvent(kind, digests[-1], version)])
      (told.add if kind == 'stored' else told.discard)(digests[-1])
      if kind == 'evicted':
        assert index.match(digests) < len(digests)
    assert len(index) <= 4
    found = index.match(digests)
    assert all(digest in told for digest in digests[:found])


def test_pages_of_older_weights_are_not_found():
  index = PrefixIndex(8, version=1)
  a, b = chain([0, 1, 2, 3]), chain([4, 5])
  index.use(a, 1)
  index.advance(2)
  assert index.match(a) == 0
  index.use(a, 1)  # of a request that began before
  index.apply([PageEvent('stored', b[0], 1)])  # and what it stored
  assert index.match(a) == index.match(b) == 0
  index.apply([PageEvent('stored', b[0], 2)])
  assert index.match(b) == 1
  index.advance(2)
  assert index.match(b) == 1
  stale = PrefixIndex(8, keep_stale=True)
  stale.use(a, 0)
  stale.advance(3)
  assert stale.match(a) == 2


def test_the_least_recently_used_conversation_goes_first_and_from_its_end():
  index = PrefixIndex(5)
  a, b, c = (chain([i] * 4) for i in range(3))
  index.use(a, 0)
  index.use(b, 0)
  index.use(a, 0)
  index.use(c, 0)
  assert [index.match(x) for x in (a, b, c)] == [2, 1, 2]


@given(st.lists(TOKENS, max_size=20), st.integers(2, 6))
def test_following_a_journal_is_knowing_the_cache(prompts, pages):
  """With the journal read, expected and cached pages are the same."""
  journal = PageJournal()
  journal.read()
  cache, index = PrefixCache(pages + 1, PAGE, journal), PrefixIndex(pages)
  for tokens in prompts:
    tokens = tokens[: pages * PAGE]
    index.apply(journal.read())
    nodes = cache.match(tokens)
    assert index.match(chain(tokens)) == len(nodes)
    cache.hold(nodes)
    own = cache.allocate(len(tokens) // PAGE - len(nodes))
    assert own is not None
    index.use(chain(tokens), 0)
    for page in own:
      start = len(nodes) * PAGE
      nodes.append(cache.insert(nodes, tokens[start : start + PAGE], page, 0))
    cache.release(nodes)
    if tokens.size % 7 == 6:
      cache.clear()


def test_an_unread_journal_is_bounded_and_says_that_it_lost_events():
  journal = PageJournal(most=3)
  journal.add('stored', b'nobody reads yet', 0)
  assert journal.read() == []
  for i in range(5):
    journal.add('stored', bytes([i]), 0)
  events = journal.read()
  assert len(events) <= 4 and events[0].kind == 'cleared'
  assert events[-1].digest == bytes([4])
  assert journal.read() == []


def test_a_capacity_of_nothing_is_refused():
  with pytest.raises(ValueError, match='capacity'):
    PrefixIndex(0)
