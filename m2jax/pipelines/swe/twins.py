"""Twins of tests: the same tests, of which one expected value is wrong.

Code that satisfies a test fails its twin, since a result that equals one value does not
equal another. So a twin that passes tells that tests do not decide: their results are
forged, or the object that they compare equals everything. Both are run alike, in an
unknown order, from files of the same names.

The n-th twin of a file changes the n-th assertion of each of its tests. Standard
library only: the file is copied into each task.
"""

import ast
import secrets

MOST = 3  # twins of a file
# Also part of the text of a twin, under another name.
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


def twin(source, number):
  """The text of a file's twin; None if no test has that many assertions."""
  try:
    tree = ast.parse(source)
  except (SyntaxError, ValueError, RecursionError):
    return None
  helper, changed = f'_{secrets.token_hex(6)}', False
  for function in _tests(tree):
    found = list(_assertions(function))
    if number < len(found):
      _change(found[number], helper)
      changed = True
  if not changed:
    return None
  insert(tree, WRONG.replace('wrong(', f'{helper}(', 1))
  return ast.unparse(ast.fix_missing_locations(tree)) + '\n'


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
