"""Prefix trees and the terms of the loss, against the samples that they come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.viewer import bundle

_SEQUENCES = st.lists(
  st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=9
)


def path(segments, leaf):
  parts = []
  while leaf >= 0:
    parent, ids = segments[leaf]
    parts.append(ids)
    leaf = parent
  return np.concatenate(parts[::-1]).tolist()


@given(_SEQUENCES)
def test_the_tree_has_each_sequence_as_a_path_and_each_prefix_once(sequences):
  """What is drawn is exactly what was sampled, and no token is in it twice."""
  segments, leaves = bundle.tree([np.array(s, np.int32) for s in sequences])
  assert [path(segments, leaf) for leaf in leaves] == sequences
  prefixes = {tuple(s[: i + 1]) for s in sequences for i in range(len(s))}
  assert sum(len(ids) for _, ids in segments) == len(prefixes)
  assert all(parent < i for i, (parent, _) in enumerate(segments))


def test_weights_are_those_of_the_batch_of_the_step():
  """Per prompt: 1 / (its own tokens · groups with terms); dropped groups have none."""
  judged = {0: {'a': (3, 1.0), 'b': (5, 1.0)}, 1: {'c': (4, 0.0)}, 2: {'d': (2, 0.5)}}
  by_prompt = {'a': 1 / 16, 'b': 1 / 16, 'd': 1 / 4}
  assert bundle.weights(judged) == pytest.approx(by_prompt)
  assert bundle.weights(judged, 'token') == pytest.approx(dict.fromkeys('abd', 1 / 10))
  by_trajectory = {'a': 1 / 12, 'b': 1 / 20, 'd': 1 / 4}
  assert bundle.weights(judged, 'trajectory') == pytest.approx(by_trajectory)


def test_a_group_has_its_terms(run):
  """Shared prompts once; each completion with what its terms are made of."""
  found = run.bundles.group(0)
  assert [t['session'] for t in found['trajectories']] == ['s0.0', 's0.1']
  by_id = {c['id']: c for c in found['completions']}
  c = by_id['s0.1-0']
  assert c['logprobs'] == [-2500, -5000, -7500] and c['versions'] == [[3, 2], [4, 1]]
  assert c['advantage'] == 1.0
  # Ten sampled tokens a group, two groups in the step.
  assert c['weight'] == pytest.approx(1 / 20)
  segments = [(p, np.array(ids)) for p, ids in found['segments']]
  assert path(segments, c['leaf']) == [1, 2, 3, 10, 11, 13]
  assert segments[0][1].tolist() == [
    1,
    2,
    3,
    10,
    11,
  ]  # the prompt and what both sampled
  assert run.bundles.group(2)['completions'][0]['weight'] is None
  assert run.bundles.group(99) is None
