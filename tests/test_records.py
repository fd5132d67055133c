"""Lineages: how many updates lie between weights, over restarts; checks of verdicts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.records import Lineages, Trajectory, policy_version, split_versions


@pytest.mark.parametrize(
  'lineage, version, want',
  [
    (3, 14, 1),  # of this life
    (3, 12, 3),  # what it restored
    (2, 12, 3),  # the same weights, as the lineage before it knew them
    (2, 11, 4),
    (2, 17, 8),  # lost: 5 updates back to step 12, then 3
    (1, 14, 4 + 5),  # lost two lives ago, and never saved
    (0, 10, 5),
    (0, 13, 3 + 5),
    (0, 3, 12),
  ],
)
def test_worked_example(lineage, version, want):
  """0 ran to 13, its checkpoint at 10 was restored twice: 1 died unsaved at 14, 2 saved
  at 12 and ran to 17; 3 began there and is at 15."""
  lineages = Lineages(((-1, 0), (0, 10), (0, 10), (2, 12)))
  assert lineages.current == 3
  assert lineages.updates_between(lineage, (version,), 15).tolist() == [want]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms())
def test_distance_in_the_tree_of_updates(lengths, rng):
  """Against the tree itself: every update a node, distance by walking up."""
  branches, up, nodes = [(-1, 0)], {}, [(0, 0)]
  for step in range(1, lengths[0] + 1):
    up[0, step] = (0, step - 1)
    nodes.append((0, step))
  for lineage, length in enumerate(lengths[1:], start=1):
    parent, step = at = rng.choice(nodes)
    branches.append(at)
    up[lineage, step] = at  # restored: no update between
    for later in range(step + 1, step + length + 1):
      up[lineage, later] = (lineage, later - 1)
      nodes.append((lineage, later))
  lineages = Lineages(tuple(branches))
  last = max(step for lineage, step in [*nodes, *up] if lineage == lineages.current)

  def root_path(node):
    path = [node]
    while path[-1] in up:
      path.append(up[path[-1]])
    return path

  mine = root_path((lineages.current, last))
  for lineage, step in nodes:
    theirs = root_path((lineage, step))
    common = next(node for node in theirs if node in mine)
    want = (step - common[1]) + (last - common[1])
    assert lineages.updates_between(lineage, (step,), last).tolist() == [want]


_WEIGHTS = st.tuples(st.integers(0, 2046), st.integers(-1, 2**20 - 2))


@given(_WEIGHTS, _WEIGHTS)
def test_a_version_is_one_number(a, b):
  """Later weights have higher numbers, in whichever lineage; no two have the same one;
  both parts come back, also of the step -1 before training; it fits int32."""
  assert (policy_version(*a) < policy_version(*b)) == (a < b)
  assert (policy_version(*a) == policy_version(*b)) == (a == b)
  lineage, steps = split_versions([policy_version(*a)] * 2)
  assert (lineage, steps.tolist()) == (a[0], [a[1]] * 2)
  assert -(2**31) <= policy_version(*a) < 2**31


def test_versions_of_several_lineages_are_an_error():
  assert split_versions([])[0] == 0
  with pytest.raises(ValueError, match=r'lineages \[0, 2\]'):
    split_versions([policy_version(0, 7), policy_version(2, 7)])


@pytest.mark.parametrize(
  'fields, said',
  [
    (dict(success=float('nan')), 'task fetch/1: the verdict is nan: must be .*0, 1'),
    (dict(success=1.5), 'task fetch/1: the verdict is 1.5'),
    (dict(success=-1.0), 'task fetch/1: the verdict is -1.0'),
    (dict(success=None), 'task fetch/1: the verdict is None'),
    (dict(rewards={'c': float('inf')}), 'task fetch/1: the reward of c is inf'),
    (dict(rewards={'c': '1'}), "task fetch/1: the reward of c is '1'"),
  ],
)
def test_verdicts_and_rewards_are_checked(fields, said):
  """Wherever a trajectory comes from, with the task's name."""
  values = dict(success=1.0, wall_s=1.0, tool_calls=0) | fields
  with pytest.raises(ValueError, match=said):
    Trajectory('s', 0, 0, 'fetch/1', 'f', 'answer', **values)
