"""The curriculum draws solved families seldom, repeatably, and never drops one."""

from __future__ import annotations

import collections

import pytest

from m2jax.forge.curriculum import Curriculum, CurriculumConfig


def shares(curriculum, draws=4000):
  counts = collections.Counter(curriculum.draw(f'0/{i}') for i in range(draws))
  return {family: n / draws for family, n in counts.items()}


def test_solved_families_come_seldom():
  """Frequency falls by the factor once recent success is high, and comes back."""
  config = CurriculumConfig(solved_above=0.9, solved_weight=0.25, memory=8)
  curriculum = Curriculum(config, {'a': 1.0, 'b': 1.0, 'c': 2.0})
  before = shares(curriculum)
  assert before == pytest.approx({'a': 0.25, 'b': 0.25, 'c': 0.5}, abs=0.03)
  for _ in range(40):
    curriculum.observe('a', 1.0)
    curriculum.observe('b', 0.5)
  assert curriculum.solved() == ['a']
  after = shares(curriculum)
  assert after == pytest.approx({'a': 1 / 13, 'b': 4 / 13, 'c': 8 / 13}, abs=0.03)
  for _ in range(10):
    curriculum.observe('a', 0.0)
  assert curriculum.solved() == [] and shares(curriculum) == before


def test_one_success_solves_nothing():
  """A family has to prove itself over its memory, not by its first trajectory."""
  curriculum = Curriculum(CurriculumConfig(memory=64), {'a': 1.0})
  curriculum.observe('a', 1.0)
  assert curriculum.solved() == []


@pytest.mark.parametrize('wrong', [dict(solved_weight=0.0), dict(memory=0.0)])
def test_bad_settings_are_named(wrong):
  """A weight of 0 would drop what was learned for good."""
  with pytest.raises(ValueError, match=next(iter(wrong))):
    CurriculumConfig(**wrong)
