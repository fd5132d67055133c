"""A second verifier of the pipeline `reasoning`, which shares no code with the first.

It solves the problem from the text of its instruction, with the standard library alone,
and compares with the answer that the task expects.

  python -m m2jax_pipelines.recheck workdir/reasoning --count=50
"""

from __future__ import annotations

import argparse
import math
import pathlib
import random
import re
from collections.abc import Callable

from m2jax.observe.printable import printable
from m2jax_pipelines import recheck_numbers as numbers
from m2jax_pipelines import recheck_texts as texts

SOLVERS: dict[str, Callable[[str], object]] = {
  'aiw': texts.circle,
  'base_conversion': numbers.base,
  'basic_arithmetic': numbers.arithmetic,
  'binary_alternation': numbers.swaps,
  'bitwise_arithmetic': numbers.bitwise,
  'calendar_arithmetic': texts.calendar,
  'chain_sum': numbers.arithmetic,
  'count_bits': numbers.ones,
  'count_primes': numbers.primes,
  'course_schedule': numbers.courses,
  'family_relationships': texts.family,
  'gcd': lambda text: math.gcd(*numbers.listed(text)),
  'isomorphic_strings': texts.isomorphic,
  'largest_island': numbers.island,
  'lcm': lambda text: math.lcm(*numbers.listed(text)),
  'leg_counting': numbers.legs,
  'letter_counting': texts.letters,
  'products': numbers.arithmetic,
  'ransom_note': texts.note,
  'self_reference': texts.statements,
  'simple_equations': numbers.equation,
  'spell_backward': texts.backward,
  'syllogism': texts.syllogism,
  'word_sorting': texts.words,
}


def check(directory: pathlib.Path) -> str | None:
  """Compares a task: '' if both agree, else what differs.

  None if the text leaves the answer open, or if there is no solver.
  """
  toml = (directory / 'task.toml').read_text()
  family = re.search(r'^family = "(\w+)"', toml, re.MULTILINE).group(1)
  if family not in SOLVERS:
    return None
  question = (directory / 'instruction.md').read_text().rsplit('\n\nWrite the', 1)[0]
  found = SOLVERS[family](question)
  if found is None:
    return None
  ours = str(found)
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
    print(printable(line))
  return len(wrong)


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('dataset', type=pathlib.Path)
  parser.add_argument('--count', type=int, default=50)
  parser.add_argument('--seed', type=int, default=0)
  arguments = parser.parse_args()
  raise SystemExit(bool(main(arguments.dataset, arguments.count, arguments.seed)))
