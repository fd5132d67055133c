"""Host memory: bounded, finds runs of a chain, and gives up a chain from its end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.rollout.engine import pages as pages_lib
from m2jax.rollout.tiers.host_cache import HostCache
from m2jax.rollout.tiers.page_layout import Layout
from tests.rollout.conftest import CFG

CHAINS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=20)


def chain(stem: int, count: int):
  return [b'%d.%d' % (stem, i) for i in range(count)]


def page(key: bytes):
  return (np.frombuffer(key, np.uint8),)


@given(CHAINS, st.integers(1, 8))
def test_bounded_and_of_the_right_keys(chains, pages):
  cache = HostCache(pages)
  for stem, count in chains:
    keys = chain(stem, count)
    cache.put((key, page(key)) for key in keys)
    assert len(cache) <= pages
    found = cache.find(chain(stem, 5))
    # What was stored last is there, from the first page on.
    assert len(found) >= min(count, pages)
    for key, entry in zip(chain(stem, 5), found, strict=False):
      assert entry.page[0].tobytes() == key


def test_the_end_of_the_chain_used_least_recently_goes_first():
  cache = HostCache(6)
  for stem in range(2):
    cache.put((key, page(key)) for key in chain(stem, 3))
  assert len(cache.find(chain(0, 3))) == 3
  cache.put((key, page(key)) for key in chain(2, 2))
  assert [len(cache.find(chain(stem, 3))) for stem in range(3)] == [3, 1, 2]
  assert cache.evicted == 2
  cache.clear()
  assert len(cache) == 0 and cache.find(chain(0, 3)) == []


@pytest.mark.parametrize('record_experts', [False, True])
def test_blocks_split_and_join(record_experts):
  """Whatever arrays a page has: each is split along the axis of its pages."""
  shapes = jax.eval_shape(
    lambda: pages_lib.empty(CFG, 5, 4, 'bfloat16', record_experts=record_experts)
  )
  random = np.random.default_rng(0)
  block = jax.tree.map(
    lambda x: random.integers(50, size=x.shape).astype(x.dtype), shapes
  )
  layout = Layout.of(shapes)
  pages = layout.split(block, 3)
  assert sum(x.nbytes for x in pages[0]) == layout.page_bytes
  joined = layout.join(pages, 4)
  for axis, a, b in zip(layout.axes, block, joined, strict=False):
    assert b.dtype == a.dtype and b.shape[axis] == 4
    np.testing.assert_array_equal(
      np.take(b, range(3), axis), np.take(a, range(3), axis)
    )
    assert not np.take(b, 3, axis).any()
  assert layout.finite(pages[0])
  pages[0][1][...] = jnp.inf
  assert not layout.finite(pages[0])
