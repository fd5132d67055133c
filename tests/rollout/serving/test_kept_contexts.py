"""Rows that stay in order between decode calls: which are stale, and what they cost."""

from __future__ import annotations

import types

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2jax.rollout.serving.kept_contexts import KeptContexts

SLOTS, GROUPS = 4, 2
SHAPES = ((2, 1), (4, 1), (4, 2))  # rows of a group, pages of a table


class Engine:
  """Contexts are which positions of which sequence each row has: started, held."""

  groups, config = GROUPS, types.SimpleNamespace(slots=SLOTS)

  def new_contexts(self, size, n):
    return np.zeros((GROUPS * size, 2), np.int64)

  def generate_kept(
    self, variables, state, contexts, started, held, live, stale, fails
  ):
    """Takes stale rows out of the pages, and draws a token of each live row."""
    if fails:
      raise RuntimeError
    contexts[stale] = np.stack([started, held], axis=1)[stale]
    want = np.stack([started, held], axis=1)
    np.testing.assert_array_equal(contexts[live], want[live])
    contexts[live, 1] += 1
    return state, None, contexts


calls = st.lists(
  st.tuples(
    st.sampled_from(SHAPES),
    st.sets(st.integers(0, GROUPS * SLOTS - 1), min_size=1),  # that decode
    st.sets(st.integers(0, GROUPS * SLOTS - 1), max_size=2),  # given to others before
    st.booleans(),
  ),
  max_size=12,
)


@given(calls)
def test_rows_have_what_their_sequences_have_stored(calls):
  """Whatever decodes when, in calls of any shape, some of which fail: a row that is not
  stale has all of its sequence, of the first rows of its group, and no row two."""
  kept = KeptContexts(Engine())
  started, held = np.arange(GROUPS * SLOTS), np.full(GROUPS * SLOTS, 3)
  clock = GROUPS * SLOTS
  for (size, n), chosen, given_away, fails in calls:
    for slot in given_away:
      started[slot], held[slot], clock = clock, 3, clock + 1
    slots = np.array(sorted(chosen))
    slots = np.concatenate([slots[slots // SLOTS == g][:size] for g in range(GROUPS)])
    if not slots.size:
      continue
    at, counts, stale = kept.lay(size, n, slots, started[slots], held[slots])
    assert len(set(at)) == len(slots)
    assert (at // size == slots // SLOTS).all()
    assert (at % size < counts[slots // SLOTS]).all()
    assert counts.tolist() == np.bincount(slots // SLOTS, minlength=GROUPS).tolist()
    fields = of_rows(size, at, started[slots], held[slots])
    try:
      kept.generate(None, None, size, n, (*fields, stale, fails))
    except RuntimeError:
      continue
    held[slots] += 1
    kept.done(size, n, at, held[slots])


def of_rows(size, at, started, held):
  """started, held and live of all rows."""
  fields = np.zeros((2, GROUPS * size), np.int64)
  fields[:, at] = started, held
  live = np.zeros(GROUPS * size, bool)
  live[at] = True
  return *fields, live


def stale_rows(kept, size, n, slots, held):
  slots = np.array(slots)
  at, _, stale = kept.lay(size, n, slots, slots, held[slots])
  fields = of_rows(size, at, slots, held[slots])
  kept.generate(None, None, size, n, (*fields, stale, False))
  held[slots] += 1
  kept.done(size, n, at, held[slots])
  return int(stale.sum())


def test_only_rows_that_change_are_taken_out_of_the_pages():
  kept, held = KeptContexts(Engine()), np.full(GROUPS * SLOTS, 3)
  step = lambda *slots: stale_rows(kept, 4, 1, slots, held)
  assert step(0, 1, 2, 5) == 4
  assert step(0, 1, 2, 5) == 0
  assert step(1, 2, 5) == 1  # the last row moves to where the first one left
  assert step(1, 2, 3, 5) == 1
  assert stale_rows(kept, 4, 2, (1, 2), held) == 2  # another shape
  assert step(1, 2, 3, 5) == 2
