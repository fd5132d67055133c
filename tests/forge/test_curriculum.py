"""The curriculum draws by how much verdicts differ, and never drops a family."""

from __future__ import annotations

import collections

import pytest

from m2jax.forge.curriculum import Curriculum, CurriculumConfig


def shares(curriculum, draws=4000):
  counts = collections.Counter(curriculum.draw(f'0/{i}') for i in range(draws))
  return {family: n / draws for family, n in counts.items()}


def test_frequency_follows_the_deviation_of_verdicts():
  """Neither failing nor solved families crowd out the others; partial credit raises the
  frequency of a family that never fully succeeds."""
  weights = {'never': 1.0, 'half': 1.0, 'always': 2.0, 'in part': 1.0}
  curriculum = Curriculum(CurriculumConfig(floor=0.1, memory=64), weights)
  before = shares(curriculum)
  assert before == pytest.approx(
    {'never': 0.2, 'half': 0.2, 'always': 0.4, 'in part': 0.2}, abs=0.03
  )
  for i in range(1000):
    curriculum.observe('never', 0.0)
    curriculum.observe('half', float(i % 2))
    curriculum.observe('always', 1.0)
    curriculum.observe('in part', 0.5 * (i % 2))
  # factors 0.1, 1, 0.1 and 0.5
  want = {'never': 0.1, 'half': 1.0, 'always': 0.2, 'in part': 0.5}
  want = {family: factor / sum(want.values()) for family, factor in want.items()}
  assert shares(curriculum) == pytest.approx(want, abs=0.03)
  assert curriculum.success() == pytest.approx(
    {'never': 0.0, 'half': 0.5, 'always': 1.0, 'in part': 0.0}, abs=0.01
  )


def test_a_floor_of_one_is_no_curriculum():
  """Frequencies then stay the weights, whatever happens."""
  curriculum = Curriculum(CurriculumConfig(), {'a': 1.0, 'b': 1.0})
  before = shares(curriculum)
  for _ in range(200):
    curriculum.observe('a', 1.0)
  assert shares(curriculum) == before


def test_one_trajectory_decides_little():
  """Success is an average over the memory, and begins where every family is tried."""
  curriculum = Curriculum(CurriculumConfig(memory=64), {'a': 1.0})
  curriculum.observe('a', 1.0)
  assert curriculum.success() == {'a': pytest.approx(0.5 + 0.5 / 64)}


@pytest.mark.parametrize('wrong', [dict(floor=0.0), dict(memory=0.0)])
def test_bad_settings_are_named(wrong):
  """A floor of 0 would drop what was learned for good."""
  with pytest.raises(ValueError, match=next(iter(wrong))):
    CurriculumConfig(**wrong)
