"""The curriculum draws by failures, repeatably, and never drops a family."""

from __future__ import annotations

import collections

import pytest

from m2jax.forge.curriculum import Curriculum, CurriculumConfig


def shares(curriculum, draws=4000):
  counts = collections.Counter(curriculum.draw(f'0/{i}') for i in range(draws))
  return {family: n / draws for family, n in counts.items()}


def test_frequency_follows_failures():
  """A factor of the failure rate, at least the floor, on the family's own weight."""
  curriculum = Curriculum(
    CurriculumConfig(floor=0.1, memory=8), {'a': 1.0, 'b': 1.0, 'c': 2.0}, 8
  )
  before = shares(curriculum)
  assert before == pytest.approx({'a': 0.25, 'b': 0.25, 'c': 0.5}, abs=0.03)
  for _ in range(60):
    curriculum.observe('a', 1.0)
    curriculum.observe('b', 0.6)
  after = shares(curriculum)
  assert after == pytest.approx({'a': 0.04, 'b': 0.16, 'c': 0.8}, abs=0.03)
  for _ in range(60):
    curriculum.observe('a', 0.0)
    curriculum.observe('b', 0.0)
  assert shares(curriculum) == pytest.approx(before, abs=0.02)


def test_a_floor_of_one_is_no_curriculum():
  curriculum = Curriculum(CurriculumConfig(), {'a': 1.0, 'b': 1.0}, 8)
  before = shares(curriculum)
  for _ in range(200):
    curriculum.observe('a', 1.0)
  assert shares(curriculum) == before


def test_one_success_solves_nothing():
  """A family has to prove itself over its memory, not by its first trajectory."""
  curriculum = Curriculum(CurriculumConfig(memory=64), {'a': 1.0}, 8)
  curriculum.observe('a', 1.0)
  assert curriculum.success() == {'a': 1 / 64}


def test_frequency_follows_mixed_groups():
  """By the probability that a group of 4 has both: 1 - p^4 - (1 - p)^4, which is 0.875
  at a half and 0.344 at nine tenths; the floor for what always or never succeeds, and
  1 for what was not tried."""
  config = CurriculumConfig(floor=0.1, memory=16, prefer='mixed')
  curriculum = Curriculum(config, dict.fromkeys('abcde', 1.0), 4)
  for i in range(4000):
    curriculum.observe('a', 1.0)
    curriculum.observe('b', 0.0)
    curriculum.observe('c', 0.5)
    curriculum.observe('d', 0.9)
    if i == 0:  # measured from the first trajectories on
      factors = {'a': 0.1, 'b': 0.1, 'c': 0.875, 'd': 0.344, 'e': 1.0}
      want = {f: x / sum(factors.values()) for f, x in factors.items()}
      assert shares(curriculum) == pytest.approx(want, abs=0.03)
  assert shares(curriculum) == pytest.approx(want, abs=0.03)


@pytest.mark.parametrize(
  'wrong', [dict(floor=0.0), dict(memory=0.0), dict(prefer='hard')]
)
def test_bad_settings_are_named(wrong):
  """A floor of 0 would drop what was learned for good."""
  with pytest.raises(ValueError, match=next(iter(wrong))):
    CurriculumConfig(**wrong)
