"""Which group of devices a sequence gets: a cached prefix against an even load."""

from __future__ import annotations

import numpy as np
import pytest

from m2jax.rollout.engine_config import EngineConfig
from m2jax.rollout.sequences import Sequences, State

CONFIG = EngineConfig(slots=4, context_tokens=256, page_tokens=16)


@pytest.mark.parametrize(
  'tokens, groups',
  [
    (100, [0, 0, 1, 1]),  # six pages save less than two sequences more in a group cost
    (250, [0, 0, 0, 0]),  # fifteen save more
    (10, [0, 1, 0, 1]),  # no page
  ],
)
def test_a_prefix_counts_less_than_many_sequences(tokens, groups):
  table, found = Sequences(CONFIG, 2), []
  for _ in groups:
    slot, hit = table.place(np.arange(tokens), ahead=4)
    table.take(slot, np.arange(tokens), 0)
    assert hit == table.held[slot]
    table.held[slot] = table.target[slot]
    table.share(slot)
    table.state[slot] = State.DECODE
    found.append(int(table.group(slot)))
  # which of two equal groups is first does not matter
  assert [g ^ found[0] for g in found] == groups


def test_agents_return_to_their_group():
  """Even if all of one group return before the others, and their prefix is short."""
  table = Sequences(CONFIG, 2)

  def play(agent):
    tokens = np.arange(40) + 1000 * agent
    slot, hit = table.place(tokens, ahead=4)
    table.take(slot, tokens, 0)
    table.held[slot] = table.target[slot]
    table.share(slot)
    table.state[slot] = State.DECODE
    return int(table.group(slot)), hit

  first = [play(agent)[0] for agent in range(4)]
  assert sorted(first) == [0, 0, 1, 1]
  counts = table.count_rows(table.where(State.DECODE))
  np.testing.assert_array_equal(counts, [2, 2])
  for slot in table.where(State.DECODE):
    table.leave(slot)
  for agent in sorted(range(4), key=first.__getitem__):
    assert play(agent) == (first[agent], 32)
