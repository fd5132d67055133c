"""Which group of devices a sequence gets: a cached prefix against an even load."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.serving.sequences import ROW_TOKENS, Sequences, State

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


def test_the_same_conversations_again_are_balanced():
  """Prompts whose continuations are cached are not taken for agents that return."""
  config = dataclasses.replace(CONFIG, slots=8, decode_rows=(8,), pages=200)
  table = Sequences(config, 2)
  for _ in range(3):
    for turn in range(3):
      slots = []
      for agent in range(8):
        tokens = np.arange(40 + 40 * turn) + 1000 * agent
        slot, _ = table.place(tokens, ahead=4)
        table.take(slot, tokens, 0)
        table.held[slot] = table.target[slot]
        table.share(slot)
        table.state[slot] = State.DECODE
        slots.append(slot)
      np.testing.assert_array_equal(table.count_rows(np.array(slots)), [4, 4])
      for slot in slots:
        table.leave(slot)


def test_newcomers_share_the_groups():
  """Also with a prefix of one row's cost, after agents whose places are remembered."""
  config = dataclasses.replace(CONFIG, slots=8, decode_rows=(8,), pages=200)
  table = Sequences(config, 2)
  table.count_rows(np.arange(16))
  shared, found = np.arange(ROW_TOKENS), []
  for agent in range(8):
    tokens = np.concatenate([shared, 1000 * (agent + 1) + np.arange(40)])
    slot, _ = table.place(tokens, ahead=4)
    table.take(slot, tokens, 0)
    table.held[slot] = table.target[slot]
    table.share(slot)
    table.state[slot] = State.DECODE
    found.append(int(table.group(slot)))
  assert sorted(found) == 4 * [0] + 4 * [1]


@pytest.mark.parametrize('tokens, groups', [(100, [0, 0]), (40, [0, 1])])
def test_a_prefix_that_is_being_computed(tokens, groups):
  """A long one is worth waiting for; a short one is computed in each group, which takes
  no longer. Only a group that computes it is waited for."""
  table, tokens = Sequences(CONFIG, 2), np.arange(tokens)
  first, _ = table.place(tokens, ahead=4)
  table.take(first, tokens, 0)
  slots, second = [first], table.place(tokens, ahead=4)
  if groups == [0, 0]:
    assert second == 'soon'
  else:
    assert second[1] == 0 and table.group(second[0]) != table.group(first)
    table.take(second[0], tokens, 0)
    slots.append(second[0])
    assert table.place(tokens, ahead=4) == 'soon'
  for slot in slots:
    table.held[slot] = table.target[slot]
    table.share(slot)
  _, hit = table.place(tokens, ahead=4)  # although nothing is decoding yet
  assert hit == len(tokens) // 16 * 16
