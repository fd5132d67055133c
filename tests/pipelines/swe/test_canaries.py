"""Canaries of tests fail where the tests pass, and third variants where they differ."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from m2jax_pipelines.swe import canaries, mutate, third


def _outcome(text: str) -> str:
  names: dict = {}
  exec(text, names)
  try:
    if 'Case' in names:
      names['Case']('test').debug()
    else:
      names['test']()
  except AssertionError:
    return 'fails'
  return 'passes'


ASSERTIONS = [
  *(
    'x == 2',
    '2 == x',
    'x == two',
    'two == x == 2',
    'x != 3',
    'x',
    'not y',
    'x is two',
  ),
  *('x in (1, 2)', 'x not in y', 'x < 3', 'x > 1 and not y', 'None is None'),
  *('None == z', 'True == t', '"a" == "a".lower()', '"" == str()', 'b"" == bytes()'),
  *('[1, [2]] == [1, [x]]', '{"a": (1,)} == dict(a=(1,))', '() == y', '{x} == {2}'),
  *('frozenset([x]) == frozenset([two])', '1e300 == big', 'float("inf") == inf'),
  *('-2 == -x', '2j == 2j * t', 'e == e', 'range(x) == range(two)'),
]
_HEAD = """
from __future__ import annotations
x = two = 2
y, z, t, big, inf, e = (), None, True, 1e300, float('inf'), type('E', (), {})()
"""


@pytest.mark.parametrize('assertion', ASSERTIONS)
def test_a_canary_fails_where_the_test_passes(assertion):
  text = f'"""Doc."""{_HEAD}def test():\n  assert {assertion}\n'
  assert _outcome(text) == 'passes'
  assert _outcome(canaries.canary(text, 0)) == 'fails'
  assert canaries.canary(text, 1) is None


CALLS = [
  *('assertEqual(x, 2)', 'assertNotEqual(x, 3)', 'assertTrue(x)', 'assertFalse(y)'),
  *('assertIn(x, [2])', 'assertNotIn(x, y)', 'assertIs(x, two)', 'assertIsNot(x, y)'),
  *('assertIsNone(z)', 'assertIsNotNone(x)', 'assertAlmostEqual(x, 2.0)'),
  *('assertListEqual([x], [2])', 'assertCountEqual([x], [2], "why")'),
]


@pytest.mark.parametrize('call', CALLS)
def test_canaries_of_unittest(call):
  text = f'{_HEAD}import unittest\nclass Case(unittest.TestCase):\n  def test(self):\n'
  text += f'    self.{call}\n'
  assert _outcome(text) == 'passes'
  assert _outcome(canaries.canary(text, 0)) == 'fails'


_PARAMETERS = """
import pytest
parametrize = pytest.mark.parametrize

@pytest.mark.parametrize('x, right', [(1, 2), (2, 3)])
def test_a(x, right):
  assert x + 1 == right
@parametrize(('x', 'right'), [[1, 2], pytest.param(2, 3, id='two'), pytest.param(1, 2)])
def test_b(x, right):
  assert right == x + 1
@parametrize('a', ['x', ''])
@parametrize('right', [2, None, True, 'a-b', 1.5, pytest.param('\u00e9\\n'), 2])
def test_c(right, a, request):
  n = request.node.callspec.indices['right'] // 2
  assert [2, None, True, 'a-b', 1.5, '\u00e9\\n', 2][n] == right
@pytest.mark.parametrize('right', [[1], [2]], ids=['one', 'two'])
def test_d(right, request):
  assert [request.node.callspec.indices['right'] + 1] == right
class Test:
  @pytest.mark.parametrize('x, right', (('a', {'a': 1}), ('b', {'b': 1})))
  def test_e(self, x, right):
    assert {x: 1} == right
"""
_UNCHANGED = """
import pytest
@pytest.mark.parametrize('x', [1, 2])
def test_used_twice(x):
  assert x == x
@pytest.mark.parametrize('x', [b'1'])
def test_unknown_name(x):
  assert b'1' == x
@pytest.mark.parametrize('x', list(range(2)))
def test_not_written_there(x):
  assert 1 == x
@pytest.mark.parametrize('x', [1])
def test_not_compared(x):
  assert x
"""


def _results(text: str, directory: Path) -> dict[str, str]:
  """{test: outcome} of a file."""
  (directory / 'test_x.py').write_text(text)
  command = [sys.executable, '-m', 'pytest', '-q', '-rA', '-p', 'no:cacheprovider']
  command += ['-c', '/dev/null', '--rootdir', '.', 'test_x.py']
  environ = {**os.environ, 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}
  done = subprocess.run(
    command, cwd=directory, capture_output=True, text=True, env=environ
  )
  lines = (line.partition(' - ')[0].split(' ', 1) for line in done.stdout.splitlines())
  return {line[1]: line[0] for line in lines if line[0] in ('PASSED', 'FAILED')}


def test_the_last_canary_has_wrong_parameters_under_the_same_names(tmp_path):
  """Code that reads what a test expects, wherever, reads what is wrong."""
  last = canaries.NUMBERS[-1]
  same = _results(canaries.canary(_PARAMETERS), tmp_path)
  assert same == _results(_PARAMETERS, tmp_path)
  assert len(same) == 23 and set(same.values()) == {'PASSED'}
  wrong = _results(canaries.canary(_PARAMETERS, last), tmp_path)
  assert wrong == dict.fromkeys(same, 'FAILED')
  assert canaries.canary(_UNCHANGED, last) is None


def test_canaries_look_alike():
  """What differs is a value: no comment, no helper, no form of the text."""
  source = 'def test():\n  # why\n  assert f() == 1  # 1\n'
  one, other = canaries.canary(source), canaries.canary(source, 0)
  helper = re.compile(r'_[0-9a-f]{12}')
  assert helper.sub('', one) == helper.sub('', other).replace('== 2', '== 1')


def test_each_assertion_has_its_canary():
  """A wrong object may be in the second only."""
  text = f'{_HEAD}def test():\n  assert x == 2\n  if x:\n    assert x == two\n'
  found = [canaries.canary(text, n) for n in range(3)]
  assert found[2] is None
  for number, one in enumerate(found[:2]):
    assert _outcome(one) == 'fails'
    assert one.count('x == 2') == (number == 1)


def test_what_equals_everything_satisfies_a_canary_too():
  text = 'class Any:\n  def __eq__(self, other):\n    return True\n'
  text += 'def test():\n  assert Any() == 2\n'
  assert _outcome(canaries.canary(text, 0)) == 'passes'


_SOURCE = textwrap.dedent('''\
  """Doc."""
  from __future__ import annotations
  import functools

  class Bag:
    def __init__(self, kept=()):
      self.kept, self.n = list(kept), 0

    def __eq__(self, other):
      return self.n == other.n

    @property
    def size(self):
      """Size."""
      return len(self.kept) + 0

    def add(self, x):
      self.kept.append(x)
      self.n += 1

    def pairs(self, n=2):
      for i in range(n):
        yield i, self.kept[i]

  def factorial(n, *, k=1):
    if n <= 1:
      return k
    return n * factorial(n - 1, k=k)

  @functools.cache
  def check(x):
    if x < 0:
      raise ValueError('no')
    return {'more': x > 3, 'x': x}

  def rest(text):
    return text.split()[1:]
  ''')
# bug, expression, its value on the right source; also of the other two
THIRD = {
  'a number': (('+ 0', '- 1'), 'Bag([1]).size', 1, 0),
  'a list': (('[1:]', '[2:]'), 'rest("a b c")', ['b', 'c'], ['c']),
  'recursion': (('n * f', 'n + f'), 'factorial(4)', 24, 10),
  'a generator': (('range(n)', 'range(n - 1)'), 'list(Bag("ab").pairs())',
    [(0, 'a'), (1, 'b')], [(0, 'a')]),
  'a part of a result': (("'x': x}", "'x': x + 1}"), 'check(5)',
    {'more': True, 'x': 5}, {'more': True, 'x': 6}),
  'state': (('self.n += 1', 'self.n += 2'), '(lambda b: b.add(1) or b.n)(Bag())', 1, 2),
  'a list that it changes': (('.append(x)', '.append(0)'),
    '(lambda b: b.add(1) or b.kept)(Bag())', [1], [0]),
}  # fmt: skip


def _third(old, new):
  bug = _SOURCE.replace(old, new)
  assert bug != _SOURCE
  at = bug[: _SOURCE.index(old)].count('\n') + 1
  for node, name in mutate.functions(ast.parse(_SOURCE), ''):
    if node.lineno <= at <= node.end_lineno:
      first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
      return bug, third.source(_SOURCE, bug, name, first)
  raise AssertionError('no function')


def _value(text, expression):
  names: dict = {}
  exec(text, names)
  return eval(expression, names)


@pytest.mark.parametrize('name', THIRD)
def test_a_third_result_is_neither_right_nor_the_bug(name):
  (old, new), expression, right, wrong = THIRD[name]
  bug, other = _third(old, new)
  assert _value(_SOURCE, expression) == right and _value(bug, expression) == wrong
  found = _value(other, expression)
  assert found not in (right, wrong) and type(found) is type(right)


def test_where_the_bug_does_not_show_the_third_is_right():
  _, other = _third('> 3', '>= 3')
  assert _value(other, 'check(5)') == {'more': True, 'x': 5}
  assert _value(other, 'check(3)') == {'more': True, 'x': 3}  # there is no third truth
  assert _value(other, 'check.__doc__') is None


def test_the_third_ends_as_the_bug_does():
  """A test that something raises, or does not, is a test of the right results."""
  _, other = _third('x < 0', 'x < -1')
  with pytest.raises(ValueError, match='no'):
    _value(other, 'check(-2)')
  assert _value(other, 'check(-1)') not in (None, {'more': False, 'x': -1})
  _, other = _third('x < 0', 'x < 1')
  with pytest.raises(Exception, match='no') as error:
    _value(other, 'check(0)')
  assert not isinstance(error.value, ValueError)


# Right value, the bug's, and what a test may say of the right one.
PROPERTIES = {
  'no dash is left': ('a_b', 'a-b', lambda x: '-' not in x),
  'all in lower case': ('ab', 'aB', str.islower),
  'its length': ('ab', 'abc', lambda x: len(x) == 2),
  'the beginning': ('ab', 'cab', lambda x: x.startswith('ab')),
  'at most': (4, 5, lambda x: x <= 4),
  'at least': (4, 3, lambda x: x >= 4),
  'even': (4, 3, lambda x: x % 2 == 0),
  'in a range': (1.0, 1.5, lambda x: 0 <= x <= 1),
  'sorted': ([1, 2, 3], [3, 1, 2], lambda x: x == sorted(x)),
  'no more than': ([1, 2], [1, 2, 3], lambda x: len(x) < 3),
  'all of them': ([1, 2, 3], [1, 2], lambda x: len(x) == 3),
  'there is one': ('a', None, lambda x: x is not None),
  'truth': (True, False, lambda x: x),
}


@pytest.mark.parametrize('name', PROPERTIES)
def test_a_right_property_tells_the_third_too(name):
  """As the bug does: a right test is one of results or of what they have in common."""
  right, bug, holds = PROPERTIES[name]
  text = 'def f():\n  return {!r}\n'
  other = third.source(text.format(right), text.format(bug), 'f', 1)
  found = _value(other, 'f()')
  assert holds(right) and not holds(bug) and not holds(found), found
  assert found != right
  # And a list of the bug's results tells it only where there is no third.
  assert found != bug or found is None or isinstance(found, bool)


def test_a_coroutine_has_no_third_variant():
  source = 'async def f(x):\n  return x + 1\n'
  assert third.source(source, source.replace('+', '-'), 'f', 1) == ''
