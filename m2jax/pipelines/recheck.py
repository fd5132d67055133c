"""A second verifier of the pipeline `reasoning`, which shares no code with the first.

It solves the problem from the text of its instruction, with the standard library alone,
and compares with the answer that the task expects.

  python -m m2jax.pipelines.recheck workdir/reasoning --count=50
"""

from __future__ import annotations

import argparse
import ast
import fractions
import math
import operator
import pathlib
import random
import re
from collections.abc import Callable

_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}


def arithmetic(text: str) -> str:
  """Value of the first expression of numbers in a text."""
  expression = max(re.findall(r'[-(\d][-+*/() \d]*[\d)]', text), key=len)
  value = _value(ast.parse(expression.strip(), mode='eval').body)
  return str(value.numerator) if value.denominator == 1 else str(float(value))


def _value(node: ast.expr) -> fractions.Fraction:
  if isinstance(node, ast.Constant):
    return fractions.Fraction(node.value)
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    return -_value(node.operand)
  if isinstance(node, ast.BinOp):
    return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
  raise ValueError(f'no arithmetic: {ast.dump(node)}')


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'-?\d+', text)]


def _letters(text: str) -> str:
  letter, shown = re.search(r'letter "(.)" .*?text: "(.*)"', text, re.DOTALL).groups()
  return str(shown.lower().count(letter.lower()))


def _backward(text: str) -> str:
  return re.search(r'\): (\w+)', text).group(1)[::-1]


def _bits(text: str) -> str:
  return bin(max(_numbers(text))).count('1')


def _primes(text: str) -> str:
  low, high = re.search(r'between (\d+) and (\d+)', text).groups()
  found = [
    n
    for n in range(max(2, int(low)), int(high) + 1)
    if all(n % d for d in range(2, math.isqrt(n) + 1))
  ]
  return str(len(found))


SOLVERS: dict[str, Callable[[str], object]] = {
  'basic_arithmetic': arithmetic,
  'chain_sum': arithmetic,
  'products': arithmetic,
  'count_bits': _bits,
  'count_primes': _primes,
  'gcd': lambda text: math.gcd(*_numbers(text.split(':')[1].split('.')[0])),
  'lcm': lambda text: math.lcm(*_numbers(text.split(':')[1].split('.')[0])),
  'letter_counting': _letters,
  'spell_backward': _backward,
}


def check(directory: pathlib.Path) -> str | None:
  """Compares a task: '' if both agree, None without a solver, else what differs."""
  toml = (directory / 'task.toml').read_text()
  family = re.search(r'^family = "(\w+)"', toml, re.MULTILINE).group(1)
  if family not in SOLVERS:
    return None
  question = (directory / 'instruction.md').read_text().rsplit('\n\nWrite the', 1)[0]
  ours = str(SOLVERS[family](question))
  expected = (directory / 'tests' / 'expected.txt').read_text()
  return '' if ours == expected else f'{directory.name}: {ours!r}, not {expected!r}'


def main(dataset: pathlib.Path, count: int, seed: int) -> int:
  """Prints the comparison of a sample; returns the number of disagreements."""
  found = sorted(p for p in dataset.glob('tasks/*/*') if (p / 'task.toml').exists())
  random.Random(seed).shuffle(found)
  results = [r for r in map(check, found) if r is not None][:count]
  wrong = [r for r in results if r]
  print(f'{len(results)} tasks solved a second time, {len(wrong)} disagreements')
  for line in wrong:
    print(line)
  return len(wrong)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('dataset', type=pathlib.Path)
  parser.add_argument('--count', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  raise SystemExit(bool(main(arguments.dataset, arguments.count, arguments.seed)))
