"""Lookups: follow a chain of keys by a tool, and answer with a total.

Each call of `look` gives a number and the next key; the answer is the sum of all
numbers modulo 5. The teacher's thinking carries the running total, which no observation
contains: an agent that drops the thinking of earlier turns has to add up the whole
chain again. The tasks need no sandbox. Specs: lookup/SPLIT/hops_N/SEED/INDEX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from m2jax.checks import require
from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib

SPLITS = ('train', 'dev', 'held_out')
MODULUS = 5
_CONSONANTS, _VOWELS = 'bdfgklmnprstvz', 'aeiou'
_SYLLABLES = [a + b for a in _CONSONANTS for b in _VOWELS]
_KEYS = len(_SYLLABLES) ** 3  # too many to be learned by heart

TOOL: Mapping[str, Any] = {
  'type': 'function',
  'function': {
    'name': 'look',
    'description': 'Look up a key.',
    'parameters': {
      'type': 'object',
      'properties': {'key': {'type': 'string'}},
      'required': ['key'],
    },
  },
}


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """Distribution of the lookups.

  Attributes:
    hops: minimum and maximum number of keys in a chain, each a family `hops_N`.
  """

  kind: str = 'lookup'
  hops: tuple[int, int] = (2, 5)

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'hops', tuple(self.hops))
    require(self, 1 <= self.hops[0] <= self.hops[1] <= 16, 'hops', 'within 1-16')


@dataclasses.dataclass(frozen=True)
class Lookup:
  """A `tasks.Task`.

  Attributes:
    chain: keys in order, each with its number.
  """

  spec: str
  family: str
  split: str
  chain: tuple[tuple[str, int], ...]
  tools: Sequence[Mapping[str, Any]] = (TOOL,)

  @property
  def instruction(self) -> str:
    return f'Add up from {self.chain[0][0]}, modulo {MODULUS}.'

  @property
  def baseline_calls(self) -> int:
    return len(self.chain)

  @property
  def max_tool_calls(self) -> int:
    return len(self.chain) + 1

  @property
  def total(self) -> int:
    """The answer."""
    return sum(number for _, number in self.chain) % MODULUS

  @contextlib.asynccontextmanager
  async def open(self, **_: Any) -> AsyncIterator[task_lib.Environment]:
    """Opens the table; see `tasks.Task.open`."""
    nexts = [key for key, _ in self.chain[1:]] + ['end']
    table = {
      key: f'{n} then {after}'
      for (key, n), after in zip(self.chain, nexts, strict=True)
    }

    async def execute(name: str, arguments: Mapping[str, Any]) -> str:
      if name != 'look' or set(arguments) != {'key'}:
        raise task_lib.BadCall('look takes one string: key')
      return table.get(str(arguments['key']), 'no such key')

    yield task_lib.Environment(execute)

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """Whether the answer is the total."""
    return float(answer.strip() == str(self.total))


def families(config: Config) -> Mapping[str, float]:
  """Relative frequency of each family; equal if the config has no weights."""
  low, high = config.hops
  names = [f'hops_{n}' for n in range(low, high + 1)]
  return dict(config.weights) or dict.fromkeys(names, 1.0)


def spec(split: str, index: int, seed: int, config: Config, family: str | None) -> str:
  """The spec of the index-th task; see `tasks.spec`."""
  if split not in SPLITS or index < 0:
    raise ValueError(f'lookup: no task {index} of the split {split!r}')
  if family is None:
    weights = families(config)
    rng = random.Random(f'family/{split}/{seed}/{index}')
    family = rng.choices(sorted(weights), [weights[n] for n in sorted(weights)])[0]
  return f'lookup/{split}/{family}/{seed}/{index}'


def _key(number: int) -> str:
  """Three syllables."""
  rest, last = divmod(number, len(_SYLLABLES))
  return ''.join(_SYLLABLES[i] for i in (*divmod(rest, len(_SYLLABLES)), last))


def make(spec: str) -> Lookup:
  """The task of a spec. Raises ValueError if it is not one of `spec`."""
  try:
    kind, split, family, _, _ = spec.split('/')
    hops = int(family.removeprefix('hops_'))
    own = range(SPLITS.index(split), _KEYS, len(SPLITS))  # splits share no key
  except ValueError as error:
    raise ValueError(
      f'{spec!r} is no lookup: expected lookup/SPLIT/hops_N/SEED/INDEX'
    ) from error
  rng = random.Random(spec)
  chain = tuple((_key(i), rng.randrange(MODULUS)) for i in rng.sample(own, hops))
  return Lookup(spec, family, split, chain)


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """A teacher without mistakes."""

  kind: str = 'lookup'


def lesson(
  task: Lookup, teacher: TeacherConfig, mistakes: list[str]
) -> demonstrations.Lesson:
  """The teacher's turns; see `demonstrations.lesson`."""
  total, key = 0, task.chain[0][0]
  while key != 'end':
    shown = yield demonstrations.Turn(f'total {total}', 'look', {'key': key})
    number, _, key = shown.partition(' then ')
    total = (total + int(number)) % MODULUS
  return demonstrations.Turn(f'total {total}', content=str(total))


async def demonstrate(
  task: Lookup, environment: task_lib.Environment, teacher: TeacherConfig
) -> demonstrations.Demonstration:
  """A demonstration whose calls are really executed."""
  turns = lesson(task, teacher, [])
  return await demonstrations.perform(task, environment, turns)
