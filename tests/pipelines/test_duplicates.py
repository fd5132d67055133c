"""Near-duplicates: the index misses few, and templates are judged by their facts."""

from __future__ import annotations

import dataclasses
import random

import pytest

from m2jax_pipelines import duplicates, reasoning, reasoning_facts, slides, spreadsheets
from m2jax_pipelines.spreadsheets import models

pytest.importorskip('datasketch', reason='pip install -e ./m2jax_pipelines')


def test_a_pair_at_the_threshold_is_found():
  """An index of MinHash proposes pairs by chance; it has to miss few of those that the
  setting rejects."""
  near = duplicates.NearDuplicates(0.9)
  found = 0
  for number in range(60):
    shared = [f'{number}.{i}' for i in range(91)]
    near.add(str(number), [*shared, *(f'{number}.a{i}' for i in range(5))])
    twin = near.find([*shared, *(f'{number}.b{i}' for i in range(4))])
    assert twin in (None, str(number))
    found += twin is not None
  assert found >= 56


def test_a_pair_below_the_threshold_is_none():
  near = duplicates.NearDuplicates(0.6)
  for number in range(60):
    near.add(str(number), [f'{number}.{i}' for i in 'abcd'])
    assert near.find([f'{number}.{i}' for i in 'abef']) is None


def _twin(threshold, *features):
  """Whether one of these is a near-duplicate of one before it."""
  near, twin = duplicates.NearDuplicates(threshold), False
  for number, found in enumerate(features):
    twin = twin or near.find(found) is not None
    near.add(str(number), found)
  return twin


def _workbook(draw, seed=1):
  return draw(random.Random(seed))


@pytest.mark.parametrize('draw', models.GENERATORS, ids=lambda draw: draw.__name__)
def test_a_workbook_of_the_same_data_and_question_is_rejected(draw):
  """In other words, or with another number in one place."""
  threshold = spreadsheets.Config().near_duplicate
  model = _workbook(draw)
  known = spreadsheets.facts(model)
  reworded = {
    place: dataclasses.replace(wanted, text=f'in this cell, {wanted.text}, please')
    for place, wanted in model.wanted.items()
  }
  same = spreadsheets.facts(dataclasses.replace(model, wanted=reworded))
  assert _twin(threshold, known, same)
  place = list(model.inputs)[-2]
  changed = {**model.cells, place: model.cells[place] + 1}
  alike = spreadsheets.facts(dataclasses.replace(model, cells=changed))
  assert alike != known and _twin(threshold, known, alike)


@pytest.mark.parametrize('draw', models.GENERATORS, ids=lambda draw: draw.__name__)
def test_a_workbook_of_other_data_is_kept(draw):
  """The statements are alike, which is why their words cannot decide."""
  threshold = spreadsheets.Config().near_duplicate
  facts = [spreadsheets.facts(_workbook(draw, seed)) for seed in range(40)]
  assert not _twin(threshold, *facts)


def test_another_question_about_the_same_workbook_is_kept():
  model = _workbook(models.ledger)
  other = {
    place: dataclasses.replace(w, formula=w.formula.replace('AVERAGE', 'SUM'))
    for place, w in model.wanted.items()
  }
  changed = spreadsheets.facts(dataclasses.replace(model, wanted=other))
  assert not _twin(0.6, spreadsheets.facts(model), changed)


def test_decks_are_told_apart_by_their_tables():
  """Another year in a title and another opening are the same task; other rows no."""
  threshold = slides.Config().near_duplicate
  drafts = [
    slides.drafted('Orders', random.Random(seed), f'orders/{seed}')
    for seed in range(40)
  ]
  facts = [slides.facts(draft) for draft in drafts]
  assert not _twin(threshold, *facts)
  told = dataclasses.replace(drafts[0], instruction='Orders 1999, for our new owners')
  assert _twin(threshold, facts[0], slides.facts(told))
  (name, _, value), *rows = (row.partition(',') for row in facts[0])
  changed = [f'{name},{int(value) + 1}', *(''.join(row) for row in rows)]
  assert _twin(threshold, facts[0], changed)


def _problem(question, answer, **record):
  from m2jax_pipelines.tasks.reasoning import problems

  return problems.Problem(question, answer, {'metadata': record})


_FAMILY = '{} is married to {}. They have a child called {}.\n\n{}'


def _family(father, mother, child, question, answer, person1, person2):
  text = _FAMILY.format(father, mother, child, question)
  problem = _problem(text, answer, person1=person1, person2=person2)
  return 'family_relationships', problem


_SAME = {  # generator, problem → the same in other words
  'other words': [
    ('chain_sum', _problem('State the answer: 2 - 4 =', '-2', expression='2 - 4')),
    ('chain_sum', _problem('What is 2 - 4?', '-2', expression='2 - 4')),
  ],
  'a generator of another split': [
    ('basic_arithmetic', _problem('Calculate 4 * 2.', '8', expression='4 * 2')),
    ('products', _problem('Solve the multiplication: 4 * 2', '8', expression='4 * 2')),
  ],
  'another letter': [
    ('simple_equations', _problem('Find m: 3*m = 6', '2', equation='3*m = 6')),
    ('simple_equations', _problem('Solve 3*k = 6', '2', equation='3*k = 6')),
  ],
  'other names': [
    _family('Tom', 'Ann', 'Max', 'What is Max to Tom?', 'son', 'Max', 'Tom'),
    _family('Jim', 'Eve', 'Leo', 'How is Leo related to Jim?', 'son', 'Leo', 'Jim'),
  ],
  'an item that changes nothing': [
    ('gcd', _problem('GCD: 12, 18, 600', '6', numbers=[12, 18, 600])),
    ('gcd', _problem('GCD: 12, 18, 660', '6', numbers=[12, 18, 660])),
  ],
}


@pytest.mark.parametrize('case', _SAME)
def test_a_problem_in_other_words_is_rejected(case):
  one, other = (reasoning_facts.facts(*pair) for pair in _SAME[case])
  assert _twin(reasoning.Config().near_duplicate, one, other)


_OTHER = {
  'another number': [
    ('chain_sum', _problem('What is 2 - 4?', '-2', expression='2 - 4')),
    ('chain_sum', _problem('What is 2 - 5?', '-3', expression='2 - 5')),
  ],
  'another question about the same numbers': [
    ('gcd', _problem('GCD: 12, 18, 24', '6', numbers=[12, 18, 24])),
    ('lcm', _problem('LCM: 12, 18, 24', '72', numbers=[12, 18, 24])),
  ],
  'another person is asked about': [
    _family('Tom', 'Ann', 'Max', 'What is Max to Tom?', 'son', 'Max', 'Tom'),
    _family('Tom', 'Ann', 'Max', 'What is Ann to Tom?', 'wife', 'Ann', 'Tom'),
  ],
  'the other order': [
    ('word_sorting', _problem('in ascending order: b, a', 'a', original_words=['b'])),
    ('word_sorting', _problem('in descending order: b, a', 'b', original_words=['b'])),
  ],
}


@pytest.mark.parametrize('case', _OTHER)
def test_another_problem_is_kept(case):
  one, other = (reasoning_facts.facts(*pair) for pair in _OTHER[case])
  assert not _twin(reasoning.Config().near_duplicate, one, other)


def test_every_generator_has_facts():
  """Those of the package's own records: fields that are named must be there, and
  different problems of a generator are rarely alike."""
  pytest.importorskip('reasoning_gym', reason='pip install -e ./m2jax_pipelines')
  from m2jax_pipelines.tasks.reasoning import problems

  near = duplicates.NearDuplicates(reasoning.Config().near_duplicate)
  twins = 0
  for generator in reasoning.Config().generators:
    for number in range(6):
      problem = problems.draw(generator, number % 3, f'facts/{number}')
      facts = reasoning_facts.facts(generator, problem)
      assert len(facts) > 1 and reasoning_facts.facts(generator, problem) == facts
      twins += near.find(facts) is not None
      near.add(f'{generator}/{number}', facts)
  assert twins <= 7  # of 144
