"""The host's account of the cache against a cache that is played through."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from m2jax.rollout.slot_table import SlotTable, State

SLOTS, CONTEXT, MIN_COPY = 4, 24, 3


class PlayedCache:
  """The token whose K/V is at each position; -1: none."""

  def __init__(self):
    self.rows = np.full((SLOTS, CONTEXT), -1)

  def check(self, table: SlotTable):
    for slot in range(SLOTS):
      held = table.held[slot]
      np.testing.assert_array_equal(
        self.rows[slot, :held], table.tokens[slot, :held], err_msg=f'slot {slot}'
      )


@given(st.data())
def test_held_tokens_are_those_in_the_cache(data):
  """A prefix hit on K/V of other tokens would corrupt responses without an error."""
  table = SlotTable(SLOTS, CONTEXT, min_copy_tokens=MIN_COPY)
  cache = PlayedCache()
  draw = data.draw
  token = st.integers(0, 1)  # two letters: prefixes are shared all the time
  for _ in range(draw(st.integers(1, 25))):
    action = draw(st.sampled_from(['place', 'prefill', 'decode', 'park', 'drop']))
    if action == 'place' and (table.state == State.IDLE).any():
      prompt = np.array(draw(st.lists(token, min_size=1, max_size=CONTEXT - 4)))
      if draw(st.booleans()):  # as a session's next turn
        slot = draw(st.integers(0, SLOTS - 1))
        prompt = np.append(table.tokens[slot, : table.held[slot]], prompt)
        prompt = prompt[: CONTEXT - 4]
      usable = np.array(draw(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS)))
      placement = table.place(prompt, usable)
      if placement is None:
        prefilling = table.state == State.PREFILL
        assert (prefilling & usable & (table.held < table.target)).any()
        continue
      assert table.state[placement.slot] == State.IDLE
      assert placement.hit_tokens < len(prompt)
      assert not placement.hit_tokens or usable[placement.source]
      hit = placement.hit_tokens
      cache.rows[placement.slot, :hit] = cache.rows[placement.source, :hit]
      cache.rows[placement.slot, hit:] = -1
      table.take(placement, prompt, version=0)
    elif action == 'prefill':
      for slot in table.where(State.PREFILL):
        stop = min(table.held[slot] + draw(st.integers(1, 9)), table.target[slot])
        cache.rows[slot, :stop] = table.tokens[slot, :stop]
        table.held[slot] = stop
        if stop == table.target[slot] and draw(st.booleans()):
          table.state[slot] = State.DECODE
    elif action == 'decode':
      slots = table.where(State.DECODE)
      if slots.size and table.held[slots].max() + 4 < CONTEXT:
        counts = np.array([draw(st.integers(0, 2)) for _ in slots])
        tokens = np.array([[draw(token) for _ in range(2)] for _ in slots])
        for slot, count in zip(slots, counts, strict=True):
          # A step consumes the last token and draws the next.
          consumed = [table.tokens[slot, table.held[slot]]]
          consumed += tokens[list(slots).index(slot)].tolist()
          held = table.held[slot]
          cache.rows[slot, held : held + count] = consumed[:count]
        table.append(slots, counts, tokens, np.zeros(tokens.shape), version=0)
    elif action in ('park', 'drop'):
      slot = draw(st.integers(0, SLOTS - 1))
      if table.state[slot] != State.IDLE:
        getattr(table, action)(slot)
    cache.check(table)


def placed(table, prompt):
  usable = np.ones(SLOTS, bool)
  placement = table.place(np.array(prompt), usable)
  if placement is not None:
    table.take(placement, np.array(prompt), version=0)
  return placement


def finish(table, slot):
  table.held[slot] = table.target[slot]
  table.park(slot)


def test_a_next_turn_takes_its_own_slot_and_a_fork_spares_it():
  """A session's turns cost their new tokens only; siblings spare each other."""
  table = SlotTable(SLOTS, CONTEXT, min_copy_tokens=MIN_COPY)
  first = placed(table, range(1, 9))
  assert (first.hit_tokens, first.source) == (0, first.slot)
  finish(table, first.slot)
  turn = placed(table, range(1, 14))
  assert (turn.slot, turn.source, turn.hit_tokens) == (first.slot, first.slot, 7)
  finish(table, turn.slot)
  fork = placed(table, [1, 2, 3, 4, 30, 31])
  assert fork.slot != first.slot
  assert (fork.source, fork.hit_tokens) == (first.slot, 4)


def test_an_identical_prompt_waits_for_the_one_being_prefilled():
  """G samples of one prompt prefill once."""
  table = SlotTable(SLOTS, CONTEXT, min_copy_tokens=MIN_COPY)
  first = placed(table, range(8))
  assert placed(table, range(8)) is None
  table.held[first.slot] = 7
  assert placed(table, range(8)).hit_tokens == 7


def test_the_least_recently_used_slot_is_taken():
  """A session that comes back soon must find its prefix."""
  table = SlotTable(SLOTS, CONTEXT, min_copy_tokens=MIN_COPY)
  slots = []
  for i in range(SLOTS):
    slots.append(placed(table, [10 + i] * 6).slot)
  for i in (2, 0, 3, 1):
    finish(table, slots[i])
  assert placed(table, [50] * 6).slot == slots[2]
  assert placed(table, [10] * 8).slot == slots[0]
  assert placed(table, [51] * 6).slot == slots[3]
