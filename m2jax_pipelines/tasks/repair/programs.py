"""Short Python functions, described in words, and their one-edit bugs.

A program starts with a parameter and applies N steps; step i of the description is line
i of the code. A bug replaces the operation or the operand of one step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Mapping, Sequence

SPLITS = ('train', 'dev', 'held_out')
MAX_STEPS = 6
PARAMETERS = (('x', 'y'), ('m', 'n'), ('p', 'q'))
_NUMBERS = range(2, 10)
_PARTS = 10  # of all programs: 8 train, 1 dev, 1 held_out
_MAX_DRAWS = 1000
# Operation -> its line of code, and its words.
_CODE: Mapping[str, str] = {
  'add': 'a = a + {}',
  'subtract': 'a = a - {}',
  'multiply': 'a = a * {}',
  'at least': 'a = max(a, {})',
  'at most': 'a = min(a, {})',
  'remainder': 'a = a % {}',
}
_WORDS: Mapping[str, str] = {
  'add': 'add {}',
  'subtract': 'subtract {}',
  'multiply': 'multiply by {}',
  'at least': 'make it at least {}',
  'at most': 'make it at most {}',
  'remainder': 'take it modulo {}',
}


@dataclasses.dataclass(frozen=True)
class Step:
  """One step: `operation` is a key of the tables above; `operand` a name or number."""

  operation: str
  operand: str

  @property
  def code(self) -> str:
    return _CODE[self.operation].format(self.operand)

  @property
  def words(self) -> str:
    return _WORDS[self.operation].format(self.operand)


@dataclasses.dataclass(frozen=True)
class Program:
  """A function of two integers."""

  parameters: tuple[str, str]
  steps: tuple[Step, ...]

  @property
  def code(self) -> str:
    first, second = self.parameters
    body = [f'a = {first}', *(step.code for step in self.steps), 'return a']
    return f'def f({first}, {second}):\n' + ''.join(f'  {line}\n' for line in body)

  @property
  def words(self) -> str:
    return ', '.join(
      [f'start with {self.parameters[0]}', *(s.words for s in self.steps)]
    )

  def __call__(self, *arguments: int) -> int:
    """The value that the code returns."""
    known = dict(zip(self.parameters, arguments, strict=True))
    a = arguments[0]
    for step in self.steps:
      b = known[step.operand] if step.operand in known else int(step.operand)
      a = {
        'add': lambda a, b: a + b,
        'subtract': lambda a, b: a - b,
        'multiply': lambda a, b: a * b,
        'at least': max,
        'at most': min,
        'remainder': lambda a, b: a % b,
      }[step.operation](a, b)
    return a


@dataclasses.dataclass(frozen=True)
class Bug:
  """Step `index` of a program is `step` in the file."""

  index: int
  step: Step


def split_of(program: Program) -> str:
  """The split that owns a program, by its text without the parameters' names."""
  text = program.words
  for name, same in zip(program.parameters, ('first', 'second'), strict=True):
    text = text.replace(f' {name}', f' {same}')
  part = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % _PARTS
  return {0: 'dev', 1: 'held_out'}.get(part, 'train')


def draw(
  rng: random.Random, split: str, steps: int, inputs: Sequence[tuple[int, int]]
) -> tuple[Program, Bug]:
  """A program of the split with a bug that changes some of its values on `inputs`.

  The lines of the file are distinct, so that each can be named by its text.

  Raises:
    ValueError: none was found.
  """
  for _ in range(_MAX_DRAWS):
    parameters = rng.choice(PARAMETERS)
    program = Program(parameters, tuple(_step(rng, parameters) for _ in range(steps)))
    index = rng.randrange(steps)
    wrong = rng.choice(neighbours(program.steps[index], parameters))
    broken = apply(program, Bug(index, wrong))
    if split_of(program) != split:
      continue
    lines = [step.code for step in (*broken.steps, program.steps[index])]
    if len(set(lines)) == len(lines) and all(
      any(program(*i) != other(*i) for i in inputs)
      for other in (broken, _without(program, index))
    ):
      return program, Bug(index, wrong)
  raise ValueError(f'no program of {steps} steps in {_MAX_DRAWS} draws')


def apply(program: Program, bug: Bug) -> Program:
  """The program with the bug."""
  steps = list(program.steps)
  steps[bug.index] = bug.step
  return dataclasses.replace(program, steps=tuple(steps))


def neighbours(step: Step, parameters: tuple[str, str]) -> list[Step]:
  """The steps with either another operation or another operand, in a fixed order."""
  operands = [parameters[1], *map(str, _NUMBERS)]
  found = [Step(operation, step.operand) for operation in _CODE]
  found += [Step(step.operation, operand) for operand in operands]
  return [s for s in found if s != step and _defined(s)]


def _defined(step: Step) -> bool:
  return step.operation != 'remainder' or step.operand.isdigit()  # a name may be 0


def _without(program: Program, index: int) -> Program:
  steps = program.steps[:index] + program.steps[index + 1 :]
  return dataclasses.replace(program, steps=steps)


def _step(rng: random.Random, parameters: tuple[str, str]) -> Step:
  operation = rng.choice(list(_CODE))
  named = Step(operation, parameters[1])
  if _defined(named) and rng.random() < 0.3:
    return named
  return Step(operation, str(rng.choice(_NUMBERS)))
