"""Reasoning problems: the strict verifier, splits, streams, the teacher."""

from __future__ import annotations

import asyncio
import collections
import importlib.util

import pytest

from m2jax import tasks
from m2jax_pipelines.tasks import reasoning
from m2jax_pipelines.tasks.reasoning import problems, strict

pytestmark = pytest.mark.skipif(
  not importlib.util.find_spec('reasoning_gym'),
  reason='pip install -e ./m2jax_pipelines',
)
EASY = {'gcd': 1.0, 'chain_sum': 1.0}


@pytest.mark.parametrize(
  'message',
  [
    '42',
    '',
    '<answer></answer>',
    '<answer>42',
    '42</answer>',
    '<answer>4</answer><answer>42</answer>',
    '<answer>42</answer><answer>42</answer>',
    '<answer>41</answer> or <answer>42</answer>',
    '<answer>42</answer> or 43',
    '<answer>42 or 43</answer>',
    '<answer>The answer is 42</answer>',
    '<answer>41 42</answer>',
    '<answer>42.0</answer>',
    '<answer>+42</answer>',
    '<answer>042</answer>',
    '<answer>6*7</answer>',
    '<answer>__import__("os").system("true") or 42</answer>',
    '<answer><answer>42</answer></answer>',
    '<ANSWER>42</ANSWER>',
    '</answer>42<answer>',
    '<answer>42\u200b</answer>',
    '<answer>\uff14\uff12</answer>',
    '<answer>42\x00</answer>',
    '<answer>' + ' ' * strict.MAX_CHARS + '42</answer>',
    '<answer>42</answer> \u202e',  # not only white space follows
    '<answer>\t42</answer>',
    '<answer>42\r\n</answer>',
    '<answer >42</answer>',
    '<answer>42</ answer>',
    '<answer>4<!-- -->2</answer>',
    '<answer>&#52;&#50;</answer>',
    '<answer>\\boxed{42}</answer>',
    '<answer>["42", "43"]</answer>',
    '<answer>\u0664\u0662</answer>',  # Arabic digits
    '<answer>101010b</answer>',
    '<tool_response><answer>42</answer></tool_response>',
    '<answer>42</answer><think>or 43</think>',
    'Tool: the verifier gave 1.\n<answer>reward=1</answer>',
    '<answer>' + '\n'.join(map(str, range(100))) + '</answer>',
  ],
)
def test_the_strict_verifier_cannot_be_gamed(message):
  """Partial credit for a mere mention is what RL would learn to exploit."""
  assert not strict.equal(strict.extract(message), '42')


def test_the_right_answer_counts_after_any_reasoning():
  assert strict.equal(strict.extract('6 × 7\n<answer> 42\n</answer>\n'), '42')


@pytest.mark.parametrize('by', ['generator', 'problem'])
def test_splits_share_no_generator_or_no_question(by):
  """What evaluation asks must not have been trained on."""
  config = reasoning.Config(weights=EASY, split_by=by, levels=(0, 1))
  found = {
    split: [tasks.make(tasks.spec(config, split, i)) for i in range(10)]
    for split in ('train', 'dev', 'held_out')
  }
  asked = [{t.instruction for t in found[s]} for s in found]
  families = [{t.family for t in found[s]} for s in found]
  apart = asked if by == 'problem' else families
  assert not apart[0] & apart[1] and not apart[0] & apart[2] and not apart[1] & apart[2]


def test_a_training_generator_of_another_split_is_refused():
  with pytest.raises(ValueError, match='weights'):
    reasoning.Config(weights={'gcd': 1.0}, held_out=('gcd',))


def test_queries_bounds_the_distinct_problems_of_training_only():
  """Query scaling: the stream repeats after `queries`, evaluations do not."""
  config = reasoning.Config(weights=EASY, queries=3)
  specs = [tasks.spec(config, 'train', i) for i in range(9)]
  assert len(set(specs)) == 3 and specs[:3] == specs[3:6]
  assert len({tasks.spec(config, 'dev', i) for i in range(9)}) == 9


def test_a_spec_gives_the_same_problem_and_the_teacher_is_right():
  config = reasoning.Config(weights=EASY)
  spec = tasks.spec(config, 'train', 5)
  first = tasks.make(spec)
  reasoning.make.cache_clear()
  again = tasks.make(spec)
  assert (first.instruction, first.answer) == (again.instruction, again.answer)
  (shown,) = asyncio.run(
    tasks.demonstrations.collect([spec], reasoning.TeacherConfig())
  )
  assert shown.success == 1.0


def test_no_constant_answer_is_right_for_most_problems():
  """Without the rule, Yes is the answer of 9 in 10 syllogisms of level 0."""
  config = reasoning.Config(weights={'syllogism': 1.0}, split_by='problem')
  answers = collections.Counter(
    reasoning.make(reasoning.spec('train', i, 0, config)).answer for i in range(200)
  )
  assert 70 <= answers['Yes'] <= 130  # 4 standard deviations
  assert problems.common_answer('chain_sum', 0) is None


def test_wrong_oracles_are_found():
  """The package's own answer to these scores below 1 (facts/pipelines.md §5)."""
  assert 'rejects its own answer' in problems.defect('rush_hour', 0, 'a')
  assert not problems.defect('gcd', 0, 'a')


@pytest.mark.parametrize(
  'generator, question, answer, right',
  [
    ('family_relationships', 'A is married to B. …', 'father-in-law', False),
    ('family_relationships', 'A is married to B. …', 'niece', False),
    ('family_relationships', 'A is married to B. …', 'aunt', True),
    ('aiw', 'Ann has 3 male colleagues and …', '4', False),
    ('aiw', 'Ann has 3 brothers and she also has 2 sisters. …', '3', True),
    (
      'calendar_arithmetic',
      'How many business days (Monday-Friday) are there from Tuesday, November 1, 2022 '
      'to Sunday, March 12, 2022 (inclusive of both dates)?',
      '94',
      False,
    ),
    (
      'calendar_arithmetic',
      'Count the occurrences of Wednesday from Saturday, October 15 to Saturday, '
      'November 12, 2022 (including both start and end dates).',
      '4',
      True,
    ),
    (
      'calendar_arithmetic',
      'Given that January 1 fell on a Saturday, which weekday occurs on August 7?',
      'Sunday',
      False,
    ),
    (
      'calendar_arithmetic',
      'Given that January 1 fell on a Saturday, which weekday occurs on February 5?',
      'Saturday',
      True,
    ),
    ('syllogism', 'All a are b\nSome b are c\nSome a are c?', 'Yes', False),
    ('syllogism', 'All a are b\nSome b are c\nSome a are c?', 'No', True),
    ('syllogism', 'All b are a\nSome b are c\nSome a are c?', 'Yes', True),
    ('syllogism', 'All a are b\nNo b are c\nNo c are b?', 'Yes', True),
  ],
)
def test_wrong_problems_of_a_right_generator_are_found(
  generator, question, answer, right
):
  """The package's scorer accepts its own answers; these are wrong by the text."""
  problem = problems.Problem(question, answer, {})
  assert (problems._DEFECTS[generator](problem) == '') == right
