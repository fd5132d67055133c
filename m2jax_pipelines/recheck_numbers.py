"""Second solvers of `reasoning`: numbers, strings, grids and graphs.

Each reads the text of a problem, with the standard library alone, and shares no code
with the package that made it.
"""

from __future__ import annotations

import ast
import collections
import fractions
import math
import operator
import re
from collections.abc import Mapping

_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
  ast.LShift: lambda a, b: a * 2 ** int(b),
  ast.RShift: lambda a, b: a // 2 ** int(b),
}
_BASES = {'binary': 2, 'octal': 8, 'decimal': 10, 'hexadecimal': 16}
_DIGITS = '0123456789abcdefghijklmnopqrstuvwxyz'
# The package writes every plural with an s.
_LEGS = {
  **dict.fromkeys(('snake', 'sea slug', 'jellyfish', 'flatworm', 'leech'), 0),
  **dict.fromkeys(('chicken', 'bird', 'human', 'duck'), 2),
  **dict.fromkeys(
    'dog cat cow horse lion elephant giraffe tiger deer sheep'.split(), 4
  ),
  'starfish': 5,
  **dict.fromkeys('insect ant butterfly beetle bee wasp grasshopper'.split(), 6),
  **dict.fromkeys(('cricket', 'cockroach', 'praying mantis', 'firefly'), 6),
  **dict.fromkeys(('spider', 'scorpion'), 8),
  **dict.fromkeys(('crab', 'lobster', 'shrimp'), 10),
  'woodlouse': 14,
}


def evaluate(expression: str, **variables: int) -> fractions.Fraction:
  """The exact value of an expression. Raises ValueError for anything else."""
  return _value(ast.parse(expression.strip(), mode='eval').body, variables)


def _value(node: ast.expr, variables: Mapping[str, int]) -> fractions.Fraction:
  if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
    return fractions.Fraction(node.value)
  if isinstance(node, ast.Name) and node.id in variables:
    return fractions.Fraction(variables[node.id])
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    return -_value(node.operand, variables)
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    sides = (_value(side, variables) for side in (node.left, node.right))
    return _OPERATORS[type(node.op)](*sides)
  raise ValueError(f'no arithmetic: {ast.dump(node)}')


def arithmetic(text: str) -> str:
  """Value of the first expression of numbers in a text."""
  expression = max(re.findall(r'[-(\d][-+*/() \d]*[\d)]', text), key=len)
  value = evaluate(expression)
  return str(value.numerator) if value.denominator == 1 else str(float(value))


def bitwise(text: str) -> str:
  """The last line, in hexadecimal."""
  return hex(int(evaluate(text.splitlines()[-1])))


def equation(text: str) -> str:
  """The root of a linear equation."""
  left, right = text.rpartition(': ')[2].split(' = ')
  (name,) = set(re.findall(r'[a-z]', left))
  zero, one = (
    evaluate(left, **{name: x}) - evaluate(right, **{name: x}) for x in (0, 1)
  )
  return str(-zero / (one - zero))


def base(text: str) -> str:
  """A number in another base."""
  pattern = r'convert the (\S+) number (\w+) to (\S+)'
  source, number, target = re.search(pattern, text).groups()
  source, target = (
    _BASES.get(name) or int(name.removeprefix('base-')) for name in (source, target)
  )
  value, digits = 0, ''
  for digit in number.lower():
    value = value * source + _DIGITS.index(digit)
  while value or not digits:
    value, digit = divmod(value, target)
    digits = _DIGITS[digit] + digits
  return digits


def numbers(text: str) -> list[int]:
  """All integers of a text."""
  return [int(n) for n in re.findall(r'-?\d+', text)]


def listed(text: str) -> list[int]:
  """The integers between a colon and the end of its sentence."""
  return numbers(text.split(':')[1].split('.')[0])


def ones(text: str) -> str:
  """Ones in the largest number's binary form."""
  return bin(max(numbers(text))).count('1')


def primes(text: str) -> str:
  """Primes between two numbers."""
  low, high = map(int, re.search(r'between (\d+) and (\d+)', text).groups())
  return str(
    sum(
      all(n % d for d in range(2, math.isqrt(n) + 1))
      for n in range(max(2, low), high + 1)
    )
  )


def legs(text: str) -> str:
  """Legs of a list of animals."""
  found = re.findall(r'(\d+) ([a-z ]+?)s(?=[,?])', text.partition('if you have ')[2])
  return str(sum(int(count) * _LEGS[animal] for count, animal in found))


def swaps(text: str) -> str:
  """Swaps that make a binary string alternate; -1 if none do."""
  bits = re.search(r': ([01]+)\s*$', text).group(1)
  wanted = ([str((i + start) % 2) for i in range(len(bits))] for start in (0, 1))
  costs = [
    sum(a != b for a, b in zip(bits, one, strict=True)) // 2
    for one in wanted
    if collections.Counter(one) == collections.Counter(bits)
  ]
  return str(min(costs, default=-1))


def courses(text: str) -> str:
  """Whether a graph of prerequisites has no cycle."""
  pairs = set(re.findall(r'\((\d+), (\d+)\)', text))
  while pairs:
    blocked = {course for course, _ in pairs}
    left = {(course, needed) for course, needed in pairs if needed in blocked}
    if left == pairs:
      return 'False'
    pairs = left
  return 'True'


def island(text: str) -> str:
  """Cells of the largest group of ones in a grid."""
  rows = re.findall(r'^[01](?: [01])*$', text, re.MULTILINE)
  land = {
    (i, j)
    for i, row in enumerate(rows)
    for j, cell in enumerate(row.split())
    if cell == '1'
  }
  most = 0
  while land:
    group, size = [land.pop()], 0
    while group:
      i, j = group.pop()
      size += 1
      near = {(i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)} & land
      land -= near
      group += near
    most = max(most, size)
  return str(most)
