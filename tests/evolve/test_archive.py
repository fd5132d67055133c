"""Parents, duplicates, cycles, budgets."""

import collections
import random

import pytest

from m2jax.checks import InvalidSetting
from m2jax.evolve import archive, budget
from m2jax.evolve.archive import ArchiveConfig, Stone
from m2jax.evolve.budget import BudgetConfig, Cost
from tests.evolve.simulated import START

# 1 is good itself, but its descendants are bad; 2 is mediocre, with a good descendant.
STONES = {
  0: Stone(None, 40, 100),
  1: Stone(0, 60, 100),
  2: Stone(0, 50, 100),
  3: Stone(1, 10, 100),
  4: Stone(1, 10, 100),
  5: Stone(2, 70, 100),
}


def drawn(method, stones=STONES, count=400):
  return collections.Counter(
    archive.parent(stones, 2, method, random.Random(i)) for i in range(count)
  )


def test_a_clade_is_a_node_with_all_its_descendants():
  clades = archive.clades(STONES)
  assert clades[0] == Stone(None, 240, 600)
  assert clades[1].score == pytest.approx(80 / 300)
  assert clades[2].score == 0.6 and clades[5].score == 0.7


def test_parents_by_clade():
  """Not by their own score: 1 is the best but one, and its clade the worst."""
  found = drawn('clade')
  assert found[5] > found[2] > 0 and found[1] == found[3] == 0
  few = {
    node: Stone(s.parent, s.total / 50, s.count // 50) for node, s in STONES.items()
  }
  assert len(drawn('clade', few)) > 3  # with little evidence it explores


def test_parents_by_dgms_rule():
  """In proportion to sigmoid(10 (score − 0.5)) / (1 + children)."""
  weights = archive.weights(STONES)
  assert weights[1] == pytest.approx(1 / (1 + 2.718281828 ** (-1)) / 3)
  assert weights[5] == pytest.approx(1 / (1 + 2.718281828 ** (-2)))
  found, total = drawn('dgm', count=4000), sum(weights.values())
  for node, weight in weights.items():
    assert found[node] / 4000 == pytest.approx(weight / total, abs=0.03)


def test_best_is_the_highest():
  """DGM's `method='best'` sorts ascending and takes the front: the worst."""
  assert set(drawn('best')) == {5} and set(drawn('incumbent')) == {2}


def test_each_method_is_a_name_of_its_own():
  """DGM's choices are joined by a missing comma, so that two of them are no choice."""
  for method in archive.METHODS:
    assert ArchiveConfig(method).method == method
    assert archive.parent(STONES, 2, method, random.Random(0)) in STONES
  with pytest.raises(InvalidSetting, match='method'):
    ArchiveConfig('score_child_propbest')


def test_cycles_are_found_by_lines_that_come_back():
  a = START
  b = a.changed({'sampling.top_k': 5, 'rules': 'def act(e):\n  return None\n'})
  c = b.changed({'sampling.top_k': 0, 'rules': ''})
  gone = archive.deleted([a, b, c])
  assert 'sampling.top_k = 0' in gone and 'rules: def act(e):' in gone
  again = c.changed({'sampling.top_k': 5})
  assert archive.readded(c, again, gone) == 1
  assert archive.readded(c, again.changed({'system': 'new'}), gone) == 0.5
  assert archive.readded(c, c.changed({'system': 'new'}), gone) == 0
  assert archive.readded(c, c, gone) == 0


@pytest.mark.parametrize(
  ('config', 'reason'),
  [
    (dict(rounds=9), 'rounds: 9'),
    (dict(seconds=60.0), 'seconds'),
    (dict(tokens=1000), 'tokens: 1,000'),
    (dict(failures=3), 'failures: 3'),
    (dict(patience=8), 'patience: 8'),
    (dict(seconds=61.0, tokens=1001, failures=4, patience=9), ''),
    (dict(failures=0), ''),
  ],
)
def test_why_a_lineage_stops(config, reason):
  spent = Cost(600, 30.0, 2) + Cost(400, 30.0, 1)
  found = budget.stop_reason(BudgetConfig(**config), 9, spent, 3, 8)
  assert found.startswith(reason) and bool(found) == bool(reason)
