"""A third variant of a function: wrong where the bug is, but not as the bug is.

A test that lists the bug's results and asserts that they are not returned distinguishes
the bug from the right source without knowing the right result. The third variant
returns the right result where both agree, and elsewhere a third value like the bug's:
it raises where the bug does, a number is further off, a text differs in one letter. A
test of the right results, or of a property that they have and the bug's lack, fails on
it; one of wrong results passes.
"""

from __future__ import annotations

import ast
import secrets

from m2jax_pipelines.swe import canaries, mutate

_HELPER = '''
def helper(run, right, bug, arguments, keywords):
  """run: the variant that runs now, if any, so that recursion stays in one."""
  import copy as copying
  import itertools
  import types

  def end_of(function, arguments, keywords):
    try:
      found = function(*arguments, **keywords)
      if isinstance(found, types.GeneratorType):
        return list(itertools.islice(found, 10000)), None, True
      return found, None, False
    except Exception as error:
      return None, error, False

  def same(a, b, depth=0):
    if type(a) is not type(b):
      return False
    if isinstance(a, (type, types.FunctionType, types.ModuleType)):
      return a is b
    if hasattr(a, '__dict__') and depth < 4:
      a, b = vars(a), vars(b)
      return a.keys() == b.keys() and all(same(a[k], b[k], depth + 1) for k in a)
    try:
      return bool(a == b)
    except Exception:
      return False

  def neither(a, b, depth=0):  # like a, the bug's
    if a is None or isinstance(a, bool):
      return a if a is None or isinstance(b, bool) else not a
    if type(a) is type(b) and depth < 4:
      if isinstance(a, (int, float)) and a - 2 != a:
        return a + 2 if a > b else a - 2
      if isinstance(a, (list, tuple)) and len(a) == len(b) and type(a) in (list, tuple):
        pairs = zip(a, b)
        return type(a)(
          x if same(x, y) else neither(x, y, depth + 1) for x, y in pairs)
      if type(a) is dict and a.keys() == b.keys():
        return {
          k: v if same(v, b[k]) else neither(v, b[k], depth + 1) for k, v in a.items()}
      if hasattr(a, '__dict__') and vars(a).keys() == vars(b).keys():
        other = copying.copy(a)
        for k, v in vars(a).items():
          if not same(v, vars(b)[k]):
            vars(other)[k] = neither(v, vars(b)[k], depth + 1)
        return other
    kind = lambda c: (c.isupper(), c.islower(), c.isdigit())
    for i in reversed(range(len(a) if type(a) in (str, list) else 0)):
      if type(a) is list:
        others = [[neither(a[i], None, depth + 1)]]
      else:
        others = [c for c in 'abAB01' if kind(c) == kind(a[i])]
      for other in others:
        other = a[:i] + other + a[i + 1:]
        if not same(other, a) and not same(other, b):
          return other
    other = wrong(a)
    while same(other, b):
      other = wrong(other)
    return other

  if run:
    return (right if run[0] == 'right' else bug)(*arguments, **keywords)
  try:
    copied = copying.deepcopy((arguments, keywords))
  except Exception:
    copied = arguments, keywords
  run.append('bug')
  try:
    found, raised, yields = end_of(bug, *copied)
    run[0] = 'right'
    value, error, is_generator = end_of(right, arguments, keywords)
    changed = [*arguments, *keywords.values()], [*copied[0], *copied[1].values()]
    for one, other in zip(*changed):  # what it changes is a result, too
      if one is not other and not same(one, other):
        if type(one) is list:
          one[:] = neither(other, one)
        elif type(one) is dict:
          one.update(neither(other, one))
        elif hasattr(one, '__dict__'):
          vars(one).update(vars(neither(other, one)))
    agree = type(raised) is type(error)
    if not agree or (error is None and not same(value, found)):
      value, is_generator = neither(found, value), yields
  finally:
    run.clear()
  if raised is not None:
    raise error if agree else type('Neither', (Exception,), {})(str(raised))
  return iter(value) if is_generator else value
'''
_WRAPPER = """
def wrapper(*_arguments, **_keywords):
  def _right():
    pass
  def _bug():
    pass
  return {}
"""


def source(right: str, bug: str, function: str, line: int) -> str:
  """The third variant of a file; '' if the function has none.

  Args:
    right, bug: texts of the file.
    function, line: qualified name and first line, decorators included, of the function.
  """
  trees = ast.parse(right), ast.parse(bug)
  nodes = [_find(tree, function, line) for tree in trees]
  if not all(type(node) is ast.FunctionDef for node in nodes):
    return ''
  node = nodes[0]
  names = {n: f'_{secrets.token_hex(6)}' for n in ('helper', 'wrong', 'run')}
  call = f'{names["helper"]}({names["run"]}, _right, _bug, _arguments, _keywords)'
  wrapper = ast.parse(_WRAPPER.format(call)).body[0]
  for inner, one in zip(wrapper.body, nodes, strict=False):
    inner.args, inner.body = one.args, one.body
  doc = ast.get_docstring(node, clean=False)
  if doc is not None:
    wrapper.body.insert(0, ast.Expr(ast.Constant(doc)))
  node.args, node.body, node.returns = wrapper.args, wrapper.body, None
  text = canaries.WRONG + _HELPER + f'{names["run"]} = []\n'
  for name in ('helper', 'wrong'):
    text = text.replace(f'{name}(', f'{names[name]}(')
  canaries.insert(trees[0], text)
  return ast.unparse(ast.fix_missing_locations(trees[0])) + '\n'


def _find(tree: ast.Module, name: str, line: int) -> ast.AST | None:
  for node, qualified in mutate.functions(tree, ''):
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    if (qualified, first) == (name, line):
      return node
  return None
