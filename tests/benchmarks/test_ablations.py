"""What benchmarks.ablations asks, and how it adds up; it runs for minutes itself."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from benchmarks import ablations
from tests import processes

VALUES = np.arange(100, 100 + ablations.SLOTS * ablations.VALUES)
VALUES = VALUES.reshape(ablations.SLOTS, -1)


def stream(seed=0, size=5000):
  ids = np.random.default_rng(seed).integers(1, ablations.QUESTIONS[0], size)
  return ids.astype(np.int32)


def test_needles():
  """An answer is the one value of its slot in the row, a question before it and the
  value at its distance before that; every distance is asked alike; all else is the text
  in its order, without values."""
  asked = []
  for seed in range(20):
    text = stream(seed)
    row = ablations.needles(np.random.default_rng(seed), text, VALUES)
    assert len(row.tokens) == ablations.CONTEXT and np.all(row.tokens >= 0)
    taken = np.zeros(ablations.CONTEXT, bool)
    slots = []
    for answer, distance in zip(row.answers, row.distances, strict=True):
      slot = ablations.QUESTIONS.index(row.tokens[answer - 1])
      value = answer - 1 - distance
      assert row.tokens[value] == row.tokens[answer]
      places = np.flatnonzero(np.isin(row.tokens, VALUES[slot]))
      assert places.tolist() == [value, answer]
      taken[[value, answer - 1, answer]] = True
      slots.append(slot)
    assert sorted(slots) == list(range(ablations.SLOTS))
    rest = row.tokens[~taken]
    plain = text[~np.isin(text, VALUES)]
    np.testing.assert_array_equal(rest, plain[: len(rest)])
    asked += row.distances.tolist()
  times = {asked.count(distance) for distance in ablations.DISTANCES}
  assert len(times) == 1 and sum(times) > 0


def test_batches():
  """Answers weigh more than the rest, a seed decides everything."""
  text = ablations.Text(stream(), stream(1), VALUES)
  runs = [ablations.batches(text, seed) for seed in (3, 3, 4)]
  for a, b, other in itertools.islice(zip(*runs, strict=True), 3):
    np.testing.assert_array_equal(a.tokens, b.tokens)
    assert not np.array_equal(a.tokens, other.tokens)
    weight = np.asarray(a.weight)
    light, heavy = np.unique(weight[weight > 0])
    assert heavy / light == pytest.approx(ablations.ANSWER_WEIGHT)
    plain = ablations.ROWS // 4
    assert np.sum(weight == heavy) == (ablations.ROWS - plain) * ablations.SLOTS
    parents = np.take_along_axis(np.asarray(a.tokens), np.asarray(a.term_token) - 1, 1)
    assert set(parents[weight == heavy]) == set(ablations.QUESTIONS)


def test_table():
  """Medians with least and most; one seed has no spread."""

  def result(variant, seed, loss):
    retrieval = {str(d): loss / 10 for d in ablations.DISTANCES}
    more = dict(max_violation=1.0, max_violation_batch=2.0)
    return dict(variant=variant, seed=seed, loss=loss, retrieval=retrieval, **more)

  rows = [result('m2', s, loss) for s, loss in enumerate((3.0, 1.0, 2.0))]
  lines = ablations.table([*rows, result('hybrid', 0, 5.0)]).splitlines()
  assert lines[2].startswith('| m2 | 2.000 [1.000, 3.000] | 0.20 [0.10, 0.30] |')
  assert lines[3].startswith('| hybrid | 5.000 | 0.50 |')
  assert lines[3].endswith('| 1.00 | 2.00 |') and len(lines) == 4


@pytest.mark.thorough
def test_it_runs():
  """Two variants, a few steps: every figure is there and none is out of its range."""
  flags = '--steps 15 --seeds 0 --files 30 --jobs 1 --json --variants'.split()
  variants = 'hybrid', 'softmax_no_bias'
  child = processes.run('benchmarks.ablations', *flags, *variants, timeout_s=1200)
  assert child.returncode == 0, child.stderr[-3000:]
  rows = json.loads(child.stdout)['rows']
  assert [row['variant'] for row in rows] == ['hybrid', 'softmax_no_bias']
  for row in rows:
    assert 3 < row['loss'] < 8 and row['max_violation'] >= 0
    assert all(0 <= share <= 1 for share in row['retrieval'].values())
