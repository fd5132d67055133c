"""The curriculum draws by the chance of a mixed group, and never drops a family."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest

from m2jax.forge.curriculum import Curriculum, CurriculumConfig, mixed


def shares(curriculum, draws=4000):
  counts = collections.Counter(curriculum.draw(f'0/{i}') for i in range(draws))
  return {family: n / draws for family, n in counts.items()}


def test_mixed_is_the_chance_of_a_group_that_teaches():
  """Against a count over all groups of four."""
  success = 0.3
  chance = 0.0
  for group in itertools.product((0, 1), repeat=4):
    if 0 < sum(group) < 4:
      chance += np.prod([success if one else 1 - success for one in group])
  assert mixed(success, 4) == pytest.approx(chance)


def test_frequency_follows_the_chance_of_a_mixed_group():
  """Neither what always fails nor what always succeeds crowds out the rest."""
  weights = {'never': 1.0, 'half': 1.0, 'always': 2.0}
  curriculum = Curriculum(CurriculumConfig(floor=0.1, memory=8), weights, 8)
  before = shares(curriculum)
  assert before == pytest.approx({'never': 0.25, 'half': 0.25, 'always': 0.5}, abs=0.03)
  for i in range(80):
    curriculum.observe('never', 0.0)
    curriculum.observe('half', float(i % 2))
    curriculum.observe('always', 1.0)
  after = shares(curriculum)
  assert after == pytest.approx({'never': 0.08, 'half': 0.77, 'always': 0.15}, abs=0.03)


def test_a_floor_of_one_is_no_curriculum():
  """Frequencies then stay the weights, whatever happens."""
  curriculum = Curriculum(CurriculumConfig(), {'a': 1.0, 'b': 1.0}, 8)
  before = shares(curriculum)
  for _ in range(200):
    curriculum.observe('a', 1.0)
  assert shares(curriculum) == before


def test_one_trajectory_decides_little():
  """Success is an average over the memory, and begins where every family is tried."""
  curriculum = Curriculum(CurriculumConfig(memory=64), {'a': 1.0}, 8)
  curriculum.observe('a', 1.0)
  assert curriculum.success() == {'a': pytest.approx(0.5 + 0.5 / 64)}


@pytest.mark.parametrize('wrong', [dict(floor=0.0), dict(memory=0.0)])
def test_bad_settings_are_named(wrong):
  """A floor of 0 would drop what was learned for good."""
  with pytest.raises(ValueError, match=next(iter(wrong))):
    CurriculumConfig(**wrong)
