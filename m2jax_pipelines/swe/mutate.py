"""Stage 6, bug injection: one edit of a function's syntax tree, as text.

The kinds follow SWE-smith's procedural modifiers (facts/pipelines.md §3.2, §3.4): a
comparison, boolean or arithmetic operator is replaced, a number moved by one, a
condition negated, a branch or an assignment removed, two arguments swapped, a loop or a
return value shortened. Only the edited expression is printed anew; the rest of the file
stays as it is written.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator

_COMPARE = {
  ast.Lt: ('<', '<='),
  ast.LtE: ('<=', '<'),
  ast.Gt: ('>', '>='),
  ast.GtE: ('>=', '>'),
  ast.Eq: ('==', '!='),
  ast.NotEq: ('!=', '=='),
  ast.Is: ('is', 'is not'),
  ast.IsNot: ('is not', 'is'),
  ast.In: ('in', 'not in'),
  ast.NotIn: ('not in', 'in'),
}
_ARITHMETIC = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.FloorDiv,
  ast.FloorDiv: ast.Mult,
  ast.Mod: ast.FloorDiv,
}


Edits = Callable[[ast.AST, str], Iterator[tuple[ast.AST, str, str]]]


@dataclasses.dataclass(frozen=True)
class Mutation:
  """One edit.

  Attributes:
    path: the file's path.
    function: qualified name; line: its first line, decorators included.
    kind: kind of edit.
    start, end: offsets of the replaced text. new: what replaces it.
    at: line of the edit.
  """

  path: str
  function: str
  line: int
  kind: str
  start: int
  end: int
  new: str
  at: int

  def apply(self, text: str) -> str:
    """The file with the bug."""
    return text[: self.start] + self.new + text[self.end :]


def mutations(
  path: str, text: str, rng: random.Random, edits: Edits | None = None
) -> list[Mutation]:
  """All edits of a file's functions, in random order. Check `parses` on the result.

  `edits` are those of a function, by default the kinds above: yields the node to
  replace, the kind, and the new text.
  """
  if '\r' in text or not parses(text):
    return []
  tree = ast.parse(text)
  found = []
  for function, name in functions(tree, ''):
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    for node, kind, new in (edits or _edits)(function, text):
      start, end = span(text, node)
      if text[start:end] != new:
        found.append(Mutation(path, name, first, kind, start, end, new, node.lineno))
  found = list(dict.fromkeys(found))
  rng.shuffle(found)
  return found


def parses(text: str) -> bool:
  """Whether a text is Python; an edit in an f-string, for one, may not be."""
  try:
    ast.parse(text)
  except (SyntaxError, ValueError):
    return False
  return True


def functions(node: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
  """Functions inside a node, with their qualified names."""
  for child in ast.iter_child_nodes(node):
    name = prefix
    if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      name = f'{prefix}.{child.name}' if prefix else child.name
      if not isinstance(child, ast.ClassDef):
        yield child, name
    yield from functions(child, name)


def own(function: ast.FunctionDef) -> Iterator[ast.AST]:
  """Nodes of a function's body, without those of functions inside it."""
  stack = list(reversed(function.body))
  while stack:
    node = stack.pop()
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
      continue
    yield node
    stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _edits(function, text: str) -> Iterator[tuple[ast.AST, str, str]]:
  for node in own(function):
    yield from _expression_edits(node, text)
    yield from _statement_edits(node, text)


def _expression_edits(node: ast.AST, text: str) -> Iterator[tuple[ast.AST, str, str]]:
  if isinstance(node, ast.Compare) and len(node.ops) == 1:
    _, new = _COMPARE[type(node.ops[0])]
    left, right = segment(text, node.left), segment(text, node.comparators[0])
    yield node, 'comparison', f'{left} {new} {right}'
  elif isinstance(node, ast.BoolOp):
    new = ' or ' if isinstance(node.op, ast.And) else ' and '
    yield node, 'boolean', f'({new.join(segment(text, v) for v in node.values)})'
  elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
    if not any(
      isinstance(n, ast.Constant | ast.JoinedStr)
      and isinstance(getattr(n, 'value', ''), str)
      for n in (node.left, node.right)
    ):
      changed = ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
      yield node, 'arithmetic', f'({ast.unparse(changed)})'
  elif isinstance(node, ast.Constant) and type(node.value) is int:
    if segment(text, node).isdigit():
      yield node, 'number', str(node.value + 1)
  elif isinstance(node, ast.Constant) and type(node.value) is bool:
    yield node, 'truth', str(not node.value)
  elif isinstance(node, ast.IfExp):
    parts = node.orelse, node.test, node.body
    a, test, b = (segment(text, p) for p in parts)
    yield node, 'branches', f'({a} if {test} else {b})'
  elif isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
    a, b = node.args
    if not any(isinstance(n, ast.Starred) for n in node.args):
      name = segment(text, node.func)
      yield node, 'arguments', f'{name}({segment(text, b)}, {segment(text, a)})'
  elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
    lower = node.slice.lower
    if lower is not None and node.slice.upper is None and node.slice.step is None:
      value = segment(text, node.value)
      yield node, 'slice', f'{value}[{segment(text, lower)} + 1:]'


def _statement_edits(node: ast.AST, text: str) -> Iterator[tuple[ast.AST, str, str]]:
  if isinstance(node, ast.If | ast.While):
    test = node.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
      yield test, 'condition', segment(text, test.operand)
    else:
      yield test, 'condition', f'not ({segment(text, test)})'
  if isinstance(node, ast.If) and not node.orelse and len(node.body) == 1:
    yield node.body[0], 'branch removed', 'pass'
  elif isinstance(node, ast.AugAssign):
    yield node, 'assignment removed', 'pass'
  elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
    yield node, 'call removed', 'pass'
  elif isinstance(node, ast.Break):
    yield node, 'loop', 'continue'
  elif isinstance(node, ast.Continue):
    yield node, 'loop', 'break'
  elif isinstance(node, ast.Return) and node.value is not None:
    if not isinstance(node.value, ast.Constant):
      yield node, 'return removed', 'return None'


def segment(text: str, node: ast.AST) -> str:
  """Source of a node."""
  start, end = span(text, node)
  return text[start:end]


def span(text: str, node: ast.AST) -> tuple[int, int]:
  """Offsets in characters of a node, whose columns are in UTF-8 bytes."""
  lines, starts = _lines(text)

  def offset(line: int, column: int) -> int:
    row = lines[line - 1]
    if not row.isascii():
      column = len(row.encode()[:column].decode())
    return starts[line - 1] + column

  return (
    offset(node.lineno, node.col_offset),
    offset(node.end_lineno, node.end_col_offset),
  )


@functools.lru_cache(maxsize=4)
def _lines(text: str) -> tuple[list[str], list[int]]:
  lines = text.split('\n')
  starts = [0]
  for line in lines:
    starts.append(starts[-1] + len(line) + 1)
  return lines, starts
