"""The data that distinguish a problem of reasoning-gym from others of its generator.

Questions of a generator have one template or a few, so that their words are alike and
one problem is asked in several wordings. Its facts are the data that the package's
record has beside the question, and the answer; which data are the problem's is stated
for each generator. Where the record has none, they are lines of the question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from m2jax_pipelines.tasks.reasoning.problems import Problem

# Generator → fields of the record's metadata; an item of a list is a fact of its own.
_DATA = {
  'base_conversion': ('source_repr', 'source_base', 'target_base'),
  'basic_arithmetic': ('expression',),
  'binary_alternation': ('string',),
  'bitwise_arithmetic': ('problem',),
  'chain_sum': ('expression',),
  'count_bits': ('number',),
  'count_primes': ('start', 'end'),
  'course_schedule': ('prerequisites',),
  'gcd': ('numbers',),
  'isomorphic_strings': ('words',),
  'largest_island': ('grid',),
  'lcm': ('numbers',),
  'leg_counting': ('animals',),
  'letter_counting': ('target_letter', 'span'),
  'products': ('expression',),
  'ransom_note': ('ransom_note', 'magazine'),
  'spell_backward': ('word',),
  'syllogism': ('premise1', 'premise2', 'conclusion'),
  'word_sorting': ('original_words',),
}
_NOT_DATA = 'source_dataset', 'source_index', 'difficulty'
_NAME = re.compile(r'(?!How|They|What)\b[A-Z][a-z]+')


def facts(generator: str, problem: Problem) -> tuple[str, ...]:
  """The facts of a problem, each with what is asked about it."""
  record = problem.entry['metadata']
  asked = generator
  if generator in ('aiw', 'family_relationships'):
    own = [_nameless(problem.question)]
    if generator == 'family_relationships':
      story = problem.question.partition('\n\n')[0]
      pair = f'{record["person1"]} of {record["person2"]}'
      own = [_nameless(f'{story} {pair}')]
  elif generator == 'self_reference':
    own = re.findall(r'^ - .* of these .*', problem.question, re.M)
  elif generator == 'simple_equations':
    own = [re.sub('[a-z]', 'x', record['equation'])]
  elif generator == 'calendar_arithmetic':
    own = [str(sorted((k, v) for k, v in record.items() if k not in _NOT_DATA))]
  elif generator in _DATA:
    fields = _DATA[generator]
    own = list(_items(fields, record))
    if fields == ('expression',):
      asked = 'value'  # three generators, of two splits, ask for it
    if generator == 'word_sorting':
      asked += ' descending' if ' descending ' in problem.question else ' ascending'
  else:
    own = [problem.question]
  return tuple(f'{asked}: {fact}' for fact in [*own, f'= {problem.answer}'])


def _items(fields: tuple[str, ...], record: dict[str, Any]) -> Iterator[str]:
  """Single values together, then each item of the lists; rows of a grid by number."""
  values = {field: record[field] for field in fields}
  lists = {k: v for k, v in values.items() if isinstance(v, list | dict)}
  single = {k: v for k, v in values.items() if k not in lists}
  if single:
    yield str(single)
  for field, value in lists.items():
    items = value.items() if isinstance(value, dict) else value
    for number, item in enumerate(items):
      yield f'{field} {number if field == "grid" else ""} {item}'


def _nameless(text: str) -> str:
  """A text with its people's names numbered in their order: who they are is no fact."""
  numbers: dict[str, int] = {}
  return _NAME.sub(
    lambda match: f'P{numbers.setdefault(match.group(), len(numbers))}', text
  )
