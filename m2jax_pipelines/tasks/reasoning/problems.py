"""Problems of reasoning-gym's generators, by name, level and key.

Only generators whose problems have one right answer in one notation are listed; a
problem is accepted if the package's own scorer gives its answer 1, twice, and gives
other answers less (`defect`). facts/pipelines.md §5 lists the generators whose answers
are wrong: boxnet, graph_color, propositional_logic, rubiks_cube, rush_hour.
number_sequence is not listed either: it squares numbers without a bound, and some of
its draws do not end. Where only some problems of a generator are wrong, `_DEFECTS`
finds them.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Mapping
from typing import Any

PACKAGE, LICENCE = 'reasoning-gym', 'Apache-2.0'
TRAIN = (
  'aiw',
  'base_conversion',
  'basic_arithmetic',
  'binary_alternation',
  'bitwise_arithmetic',
  'calendar_arithmetic',
  'chain_sum',
  'count_bits',
  'count_primes',
  'course_schedule',
  'family_relationships',
  'gcd',
  'isomorphic_strings',
  'leg_counting',
  'letter_counting',
  'simple_equations',
  'syllogism',
)
DEV = ('lcm', 'word_sorting', 'ransom_note')
HELD_OUT = ('products', 'spell_backward', 'largest_island', 'self_reference')
_AFTER_FEBRUARY = (
  '(?:March|April|May|June|July|August|September|October|November|December) [0-9]'
)
_SAMPLE, _FEW = 100, 12  # problems, for the answer that most have
_WRONG = ('', '0', '1', '-1', 'yes', 'no', '?', 'the answer')


class NotInstalled(ValueError):
  """reasoning-gym is not installed, or lacks a generator."""


@dataclasses.dataclass(frozen=True)
class Problem:
  """Attributes:
  question, answer: texts.
  entry: the package's record, for its scorer.
  """

  question: str
  answer: str
  entry: dict[str, Any]


@functools.cache
def version() -> str:
  """Version of the installed package.

  Raises:
    NotInstalled: it is missing.
  """
  try:
    return importlib.metadata.version(PACKAGE)
  except importlib.metadata.PackageNotFoundError as error:
    raise NotInstalled(
      f'{PACKAGE} is not installed: pip install -e ./m2jax_pipelines'
    ) from error


@functools.cache
def record_sha256() -> str:
  """SHA-256 of the installed package's list of files, each with its hash."""
  record = importlib.metadata.distribution(PACKAGE).read_text('RECORD') or ''
  return hashlib.sha256(record.encode()).hexdigest()


def draw(generator: str, level: int, key: str) -> Problem:
  """The problem of a key: a random function of `generator`, `level` and `key`.

  Args:
    generator: a name of reasoning-gym's.
    level: a level of its curriculum; the last one if it has fewer. Without a curriculum
      every level is the generator's default.
    key: any text.

  Raises:
    NotInstalled: there is no such generator.
  """
  entry = _dataset(generator, level, key)[0]
  return Problem(entry['question'].strip(), str(entry['answer']).strip(), entry)


def defect(generator: str, level: int, key: str) -> str:
  """Why a problem is not accepted; '' if it is."""
  first, second = draw(generator, level, key), draw(generator, level, key)
  if (first.question, first.answer) != (second.question, second.answer):
    return 'not the same problem when it is drawn again'
  if not first.answer or '<' in first.answer:
    return 'the answer is empty or contains markup'
  dataset = _dataset(generator, level, key)
  for _ in range(2):
    if not _score(dataset, first.entry['answer'], first.entry) == 1:
      return "the package's scorer rejects its own answer"
  for wrong in (*_WRONG, f'{first.answer} {first.answer}'):
    if wrong != first.answer and _score(dataset, wrong, first.entry) >= 1:
      return f"the package's scorer also accepts {wrong!r}: not one right answer"
  return _DEFECTS.get(generator, lambda problem: '')(first)


@functools.cache
def common_answer(generator: str, level: int) -> str | None:
  """The answer that more than half of a generator's problems have; None if none has.

  Of the first 100 accepted problems of a stream of keys of its own; of 12 if no answer
  occurs among them more than twice.
  """
  answers = collections.Counter()
  for i in range(4 * _SAMPLE):
    key = f'common_answer/{i}'
    if not defect(generator, level, key):
      answers[draw(generator, level, key).answer] += 1
    varied = answers.total() == _FEW and max(answers.values()) <= 2
    if varied or answers.total() == _SAMPLE:
      break
  if not answers:
    return None
  answer, count = answers.most_common(1)[0]
  return answer if 2 * count > answers.total() else None


def _family(problem: Problem) -> str:
  """A child's spouse is called the parent, nieces and nephews by the other's gender."""
  inverted = 'father-in-law', 'mother-in-law', 'niece', 'nephew'
  return 'the relation is inverted' if problem.answer in inverted else ''


def _circle(problem: Problem) -> str:
  """A woman of the circle is counted among her own colleagues."""
  counted = 'colleagues' in problem.question
  return 'she is counted as a colleague of hers' if counted else ''


def _calendar(problem: Problem) -> str:
  """The end of a range may be in the next year, and is written with this one."""
  dates = re.findall(r'([A-Z]\w+day), ([A-Z]\w+ \d+)(?:, (\d{4}))?', problem.question)
  year = next((year for _, _, year in dates if year), '')
  for weekday, day, own in dates:
    date = datetime.datetime.strptime(f'{day} {own or year}', '%B %d %Y')
    if date.strftime('%A') != weekday:
      return f'{day}, {own or year} is no {weekday}'
  by_new_year = re.search(
    'first day of the year|January 1(?:st| fell)', problem.question
  )
  if by_new_year and re.search(_AFTER_FEBRUARY, problem.question):
    return 'it depends on whether the year has a leap day'
  return ''


def _syllogism(problem: Problem) -> str:
  """A middle term that is in no premise as a whole connects nothing."""
  lines = re.findall(r'(All|No|Some) (\w+) are (not )?(\w+)', problem.question)
  *premises, (_, one, _, other) = lines
  whole = set()
  for quantity, subject, negated, predicate in premises:
    whole |= {subject} if quantity in ('All', 'No') else set()
    whole |= {predicate} if quantity == 'No' or negated else set()
  middle = {term for line in premises for term in (line[1], line[3])} - {one, other}
  wrong = problem.answer == 'Yes' and middle and not middle & whole
  return 'the middle term is not distributed' if wrong else ''


# Generator → why a problem of it is wrong; '' if it is right.
_DEFECTS: Mapping[str, Callable[[Problem], str]] = {
  'aiw': _circle,
  'calendar_arithmetic': _calendar,
  'family_relationships': _family,
  'syllogism': _syllogism,
}


def _score(dataset, answer, entry) -> float:
  try:
    return float(dataset.score_answer(answer, entry))
  except Exception:  # a scorer that fails on a wrong answer does not accept it
    return 0.0


def _dataset(generator: str, level: int, key: str):
  version()
  from reasoning_gym import factory

  if generator not in factory.DATASETS:
    raise NotInstalled(f'{PACKAGE} {version()} has no generator {generator!r}')
  digest = hashlib.sha256(f'{generator}/{level}/{key}'.encode()).digest()
  settings = {'seed': int.from_bytes(digest[:4]) >> 1, 'size': 1}
  if not factory.has_curriculum(generator):
    return factory.create_dataset(generator, **settings)
  curriculum = factory.create_curriculum(generator)
  curriculum.set_global_level(level)
  config = curriculum.generate_configuration(settings)
  return factory.DATASETS[generator][0](config)
