"""Static checks of a scaffold's rules.py: an allow-list of Python.

The boundary is the sandbox in which the code runs (`agents.rules`); these checks reject
before that what has no use in a pure function: imports of anything that reads files,
clocks or randomness, attributes of the interpreter, and programs at module level.
"""

from __future__ import annotations

import ast

IMPORTS = frozenset(
  (
    '__future__',
    'collections',
    'difflib',
    'functools',
    'itertools',
    'json',
    'math',
    're',
  )
)
_TOP = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Assign | ast.AnnAssign
_NAMES = frozenset(
  ('breakpoint', 'compile', 'delattr', 'eval', 'exec', 'getattr', 'globals', 'input')
  + (
    'locals',
    'memoryview',
    'open',
    'setattr',
    'type',
    'vars',
    'object',
    'super',
    'help',
  )
  + ('exit', 'quit', 'id', 'hash', 'print')
)
_NODES = ast.ClassDef | ast.Global | ast.AsyncFunctionDef | ast.Await | ast.Delete


def problems(source: str) -> list[str]:
  """What is not allowed, one line each; empty for no source."""
  if not source:
    return []
  tree = _parsed(source)
  if isinstance(tree, str):
    return [tree]
  found = []
  for node in tree.body:
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if not isinstance(node, _TOP) and not text:
      found.append(f'line {node.lineno}: a statement at module level')
  acts = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == 'act']
  if len(acts) != 1 or len(acts[0].args.args) != 1:
    found.append('must define act(episode) once')
  for node in ast.walk(tree):
    if problem := _problem(node):
      found.append(f'line {getattr(node, "lineno", 0)}: {problem}')
  return found


def normalised(source: str) -> str:
  """The syntax tree as text, without comments and docstrings; the source if invalid."""
  tree = _parsed(source)
  if isinstance(tree, str):
    return source
  for node in ast.walk(tree):
    if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
      node.body = node.body[1:]
  return ast.dump(tree) if tree.body else ''


def _problem(node: ast.AST) -> str:
  match node:
    case ast.Import():
      names = [alias.name for alias in node.names]
    case ast.ImportFrom():
      names = [node.module or '.'] if not node.level else ['.']
    case ast.Name(id=name) | ast.Attribute(attr=name):
      attribute = isinstance(node, ast.Attribute)
      if name.startswith('_' if attribute else '__') or (
        name in _NAMES and not attribute
      ):
        return f'{name} is not allowed'
      return ''
    case _:
      return f'{type(node).__name__} is not allowed' if isinstance(node, _NODES) else ''
  refused = [name for name in names if name not in IMPORTS]
  return f'import of {", ".join(refused)} is not allowed' if refused else ''


def _parsed(source: str) -> ast.Module | str:
  try:
    return ast.parse(source)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    return f'is no Python: {error}'
