"""Canaries: copies of tests with one wrong expected value, which must fail.

Code that passes a test fails its canary, since a result that equals one value does not
equal another. If a canary passes, the tests decide nothing: their results are forged,
the object that they compare equals everything, or it was read from the test. Tests and
canaries run in an unknown order, from files with the same names and formatting.

The n-th canary of a file changes the n-th assertion of each of its tests. The last one
changes parameters (`pytest.mark.parametrize`) that only assertions use, in place.
Standard library only: the file is copied into each task.
"""

import ast
import secrets

_MOST = 3  # assertions of a test
NUMBERS = range(_MOST + 1)  # of canaries of a file
# Also inserted into the text of a canary, under another name.
WRONG = """
def wrong(value):
  kind = type(value)
  if value is None:
    return 0
  if kind is bool:
    return not value
  if kind in (int, float, complex):
    return value + 1 if value + 1 != value else 0
  if kind in (str, bytes):
    return value + (value[:1] or kind(b'a', *(['ascii'] if kind is str else [])))
  if kind in (list, tuple):
    return kind([*value, value[-1] if value else 0])
  if kind in (set, frozenset):
    return kind([*value, len(value) + 7919])
  if kind is dict:
    return {**value, len(value) + 7919: 0}
  return [value]
"""
_OPPOSITE = {
  ast.NotEq: ast.Eq,
  ast.In: ast.NotIn,
  ast.NotIn: ast.In,
  ast.Is: ast.IsNot,
  ast.IsNot: ast.Is,
}
_EQUAL = frozenset(
  'assertEqual assertEquals assertListEqual assertDictEqual assertTupleEqual '
  'assertSetEqual assertAlmostEqual assertMultiLineEqual assertSequenceEqual '
  'assertCountEqual'.split()
)
_PAIRS = ('True False', 'In NotIn', 'Is IsNot', 'IsNone IsNotNone', 'NotEqual Equal')
_SWAPPED = {
  f'assert{a}': f'assert{b}'
  for pair in map(str.split, _PAIRS)
  for a, b in (pair, pair[::-1])
  if a != 'Equal'
}
_names = {}
exec(WRONG, _names)
wrong = _names['wrong']


def canary(source, number=None):
  """The text of a file's canary; None if no test has one of that number.

  Without a number no expected value is changed.
  """
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError, RecursionError):
    return None
  helper, changed = f'_{secrets.token_hex(6)}', number is None
  for function in _tests(tree) if number is not None else ():
    found = list(_assertions(function))
    if number == _MOST:
      changed |= _change_parameter(function, found)
    elif number < len(found):
      _change(found[number], helper)
      changed = True
  if not changed:
    return None
  insert(tree, WRONG.replace('wrong(', f'{helper}(', 1))
  return ast.unparse(ast.fix_missing_locations(tree)) + '\n'


def canaries_of(sources, number=None):
  """{path: text} of the files that have such canaries; `sources`: {path: text}."""
  texts = {path: canary(source, number) for path, source in sources.items()}
  return {path: text for path, text in texts.items() if text is not None}


def insert(tree, text):
  """Puts statements behind a module's docstring and its imports from __future__."""
  at = 1 if ast.get_docstring(tree, clean=False) is not None else 0
  while at < len(tree.body) and getattr(tree.body[at], 'module', '') == '__future__':
    at += 1
  tree.body[at:at] = ast.parse(text).body


def _tests(node):
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.ClassDef):
      yield from _tests(child)
    elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
      if child.name.startswith('test'):
        yield child


def _assertions(node):
  """Assertions of a function, in order, without those of functions inside it."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      continue
    if isinstance(child, ast.Assert):
      yield child
    elif isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
      called = getattr(child.value.func, 'attr', '')
      if called in _SWAPPED or called in _EQUAL and len(child.value.args) > 1:
        yield child
    else:
      yield from _assertions(child)


def _change(statement, helper):
  """Makes an assertion false wherever it is true."""
  if isinstance(statement, ast.Assert):
    statement.test = _false(statement.test, helper)
    return
  call = statement.value
  if call.func.attr in _EQUAL:
    call.args[1] = _wrong(call.args[1], helper)
  else:
    call.func.attr = _SWAPPED[call.func.attr]


def _change_parameter(function, assertions):
  """Makes all values of a parameter wrong that is used in one comparison only."""
  used = [node.id for node in ast.walk(function) if isinstance(node, ast.Name)]
  compared = {name for one in assertions for name in _compared(one)}
  for call, names in _parametrized(function):
    for name in names:
      if name in compared and used.count(name) == 1:
        if _change_values(call, names, names.index(name)):
          return True
  return False


def _compared(statement):
  """Names of which an assertion says that something equals them."""
  sides = []
  if not isinstance(statement, ast.Assert):
    if statement.value.func.attr in _EQUAL:
      sides = statement.value.args[:2]
  elif isinstance(statement.test, ast.Compare) and len(statement.test.ops) == 1:
    if isinstance(statement.test.ops[0], ast.Eq):
      sides = [statement.test.left, *statement.test.comparators]
  return [side.id for side in sides if isinstance(side, ast.Name)]


def _parametrized(function):
  """(call, names) of each decorator `….parametrize(names, [values, …])`."""
  for call in function.decorator_list:
    if not isinstance(call, ast.Call) or len(call.args) != 2:
      continue
    named = getattr(call.func, 'attr', getattr(call.func, 'id', ''))
    if named != 'parametrize' or not _literal(call.args[0]):
      continue
    names = ast.literal_eval(call.args[0])
    if isinstance(names, str):
      names = [name.strip() for name in names.split(',') if name.strip()]
    if isinstance(call.args[1], ast.List | ast.Tuple):
      yield call, list(names)


def _change_values(call, names, at):
  """Makes the values of one of the names wrong, and keeps the tests' names."""
  elements = call.args[1].elts
  places = [_place(elements, number, len(names)) for number in range(len(elements))]
  if not all(places) or not all(_literal(row[first + at]) for row, first in places):
    return False
  if not any(keyword.arg == 'ids' for keyword in call.keywords):
    ids = [_id(elements[n], n, names, *place) for n, place in enumerate(places)]
    if None in ids:
      return False
    call.keywords.append(ast.keyword('ids', ast.parse(repr(ids), mode='eval').body))
  for row, first in places:
    row[first + at] = _wrong(row[first + at], '')
  return bool(places)


def _place(elements, number, size):
  """(list, index of the first) of an element's values; None if they are not there."""
  element = elements[number]
  if _is_param(element):
    row = element.args
  elif size == 1:
    return elements, number
  else:
    row = getattr(element, 'elts', [])
  return (row, 0) if len(row) == size else None


def _is_param(element):
  return isinstance(element, ast.Call) and getattr(element.func, 'attr', '') == 'param'


def _id(element, number, names, row, first):
  """What pytest calls an element; None if that is not known."""
  if _is_param(element) and any(keyword.arg == 'id' for keyword in element.keywords):
    return ''  # it keeps its own
  parts = []
  for name, node in zip(names, row[first:], strict=False):
    if not _literal(node):
      return None
    value = ast.literal_eval(node)
    if type(value) is bytes:
      return None
    plain = value is None or type(value) in (str, bool, int, float, complex)
    parts.append(str(value) if plain else f'{name}{number}')
  return '-'.join(parts)


def _false(test, helper):
  if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
    return test.operand
  if not isinstance(test, ast.Compare):
    return ast.UnaryOp(ast.Not(), test)
  if isinstance(test.ops[-1], ast.Eq):
    if len(test.ops) == 1 and _literal(test.left) and not _literal(test.comparators[0]):
      test.left = _wrong(test.left, helper)
    else:
      test.comparators[-1] = _wrong(test.comparators[-1], helper)
    return test
  opposite = _OPPOSITE.get(type(test.ops[0]))
  if opposite is None or len(test.ops) > 1:
    return ast.UnaryOp(ast.Not(), test)
  test.ops = [opposite()]
  return test


def _literal(node):
  try:
    ast.literal_eval(node)
  except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
    return False
  return True


def _wrong(node, helper):
  """An expression of another value, of the same type where that is known."""
  if _literal(node):
    return ast.parse(repr(wrong(ast.literal_eval(node))), mode='eval').body
  return ast.Call(ast.Name(helper, ast.Load()), [node], [])
