"""Exploring: find the code that is in one of several places, in a tree of places.

Each call of `look` describes a place and the places behind it; the answer is the code.
The teacher goes depth first and carries the places that are left in its thinking. An
episode may look a few times more than the teacher does, so that an agent that goes
round in circles, copies a name wrongly, or fills its context with descriptions fails.
No call needs a sandbox. Specs: explore/SPLIT/places_N/SEED/INDEX?SPARE_CALLS.
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
MAX_PLACES = 16
_CONSONANTS, _VOWELS = 'bdfgklmnprstvz', 'aeiou'
_SYLLABLES = [a + b for a in _CONSONANTS for b in _VOWELS]
_NAMES = len(_SYLLABLES) ** 2
_THINGS = ('a lamp', 'dust', 'two chairs', 'a map', 'old books', 'a clock', 'rope')

TOOL: Mapping[str, Any] = {
  'type': 'function',
  'function': {
    'name': 'look',
    'description': 'Look at a place.',
    'parameters': {
      'type': 'object',
      'properties': {'place': {'type': 'string'}},
      'required': ['place'],
    },
  },
}


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """Distribution of the tasks.

  Attributes:
    places: minimum and maximum number of places that a depth-first search looks at,
      each a family `places_N`.
    spare_calls: calls beyond those.
  """

  kind: str = 'explore'
  places: tuple[int, int] = (3, 8)
  spare_calls: int = 2

  def __post_init__(self):
    super().__post_init__()
    object.__setattr__(self, 'places', tuple(self.places))
    low, high = self.places
    require(self, 2 <= low <= high <= MAX_PLACES, 'places', f'within 2-{MAX_PLACES}')
    require(self, 0 <= self.spare_calls <= 99, 'spare_calls', 'within 0-99')
    require(self, not self.partial_credit, 'partial_credit', '0: right or wrong')


@dataclasses.dataclass(frozen=True)
class Explore:
  """A `tasks.Task`.

  Attributes:
    start: the place to begin with.
    shown: place -> what `look` says about it.
    code: the answer.
  """

  spec: str
  family: str
  split: str
  start: str
  shown: Mapping[str, str]
  code: str
  baseline_calls: int
  max_tool_calls: int
  tools: Sequence[Mapping[str, Any]] = (TOOL,)

  @property
  def instruction(self) -> str:
    return f'Find the code. Start at {self.start}.'

  @contextlib.asynccontextmanager
  async def open(self, **_: Any) -> AsyncIterator[task_lib.Environment]:
    """Opens the tree of places; see `tasks.Task.open`."""

    async def execute(name: str, arguments: Mapping[str, Any]) -> str:
      if name != 'look' or set(arguments) != {'place'}:
        raise task_lib.BadCall('look takes one string: place')
      return self.shown.get(str(arguments['place']), 'no such place')

    yield task_lib.Environment(execute)

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """Whether the answer is the code."""
    return float(answer.strip() == self.code)


def families(config: Config) -> Mapping[str, float]:
  """Relative frequency of each family; equal if the config has no weights."""
  low, high = config.places
  names = [f'places_{n}' for n in range(low, high + 1)]
  return dict(config.weights) or dict.fromkeys(names, 1.0)


def spec(split: str, index: int, seed: int, config: Config, family: str | None) -> str:
  """The spec of the index-th task; see `tasks.spec`."""
  if split not in SPLITS or index < 0:
    raise ValueError(f'explore: no task {index} of the split {split!r}')
  if family is None:
    weights = families(config)
    rng = random.Random(f'family/{split}/{seed}/{index}')
    family = rng.choices(sorted(weights), [weights[n] for n in sorted(weights)])[0]
  return f'explore/{split}/{family}/{seed}/{index}?{config.spare_calls}'


def make(spec: str) -> Explore:
  """The task of a spec. Raises ValueError if it is not one of `spec`."""
  try:
    name, _, spare = spec.partition('?')
    kind, split, family, _, _ = name.split('/')
    places, calls = int(family.removeprefix('places_')), int(spare)
    own = SPLITS.index(split)
    if not 2 <= places <= MAX_PLACES or not 0 <= calls <= 99:
      raise ValueError('out of range')
  except ValueError as error:
    raise ValueError(
      f'{spec!r} is no task: expected explore/SPLIT/places_N/SEED/INDEX?SPARE_CALLS'
    ) from error
  rng = random.Random(spec)
  start = rng.randrange(own, _NAMES, len(SPLITS))  # no start is in two splits
  others = rng.sample(range(_NAMES - 1), 2 * places - 1)
  names = [_name(start), *(_name(i + (i >= start)) for i in others)]
  behind, looked_at = _tree(names, places, rng)
  code = str(rng.randint(10, 99))
  shown = {}
  for place, others in behind.items():
    things = rng.sample(_THINGS, 2)
    paths = f'paths {" ".join(others)}' if others else 'no path'
    if place == looked_at[-1]:
      paths = f'code {code}'
    shown[place] = f'{place}: {things[0]}, {things[1]}, {paths}'
  return Explore(spec, family, split, names[0], shown, code, places, places + calls)


def _name(number: int) -> str:
  """Two syllables."""
  return ''.join(_SYLLABLES[i] for i in divmod(number, len(_SYLLABLES)))


def _tree(
  names: Sequence[str], places: int, rng: random.Random
) -> tuple[dict[str, list[str]], list[str]]:
  """What is behind each place, and the places of a depth-first search in order.

  The search looks at `places` of them, of which the last has the code.
  """
  unused = iter(names[1:])
  behind: dict[str, list[str]] = {}
  order, left = [], [names[0]]
  while len(order) < places:
    place = left.pop(0)
    order.append(place)
    # One path at least while nothing else is left to look at.
    least = 0 if left else 1
    most = min(2, 2 * places - 1 - sum(len(b) for b in behind.values()))
    behind[place] = [next(unused) for _ in range(rng.randint(min(least, most), most))]
    left = behind[place] + left
  for place in left:  # where the search does not come
    behind.setdefault(place, [])
  behind[order[-1]] = []
  return behind, order


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """A teacher that forgets.

  Attributes:
    mistakes: probability that a call looks again at a place that was looked at, before
      each of the others; the policy learns it, as far as it samples.
    seed: seed of the mistakes.
  """

  kind: str = 'explore'
  mistakes: float = 0.0
  seed: int = 0

  def __post_init__(self):
    require(self, 0 <= self.mistakes < 1, 'mistakes', 'a probability below 1')


def lesson(
  task: Explore, teacher: TeacherConfig, mistakes: list[str]
) -> demonstrations.Lesson:
  """The teacher's turns; see `demonstrations.lesson`."""
  rng = random.Random(f'teacher/{teacher.seed}/{task.spec}')
  left, seen = [task.start], []
  while True:
    thought = f'left {" ".join(left)}'
    if seen and rng.random() < teacher.mistakes:
      mistakes.append('again')
      yield demonstrations.Turn(thought, 'look', {'place': rng.choice(seen)})
      continue
    seen.append(left[0])
    shown = yield demonstrations.Turn(thought, 'look', {'place': left[0]})
    text = shown.rpartition(', ')[2]
    if text.startswith('code '):
      code = text.removeprefix('code ')
      return demonstrations.Turn('found', content=code)
    paths = [] if text == 'no path' else text.removeprefix('paths ').split()
    left = [*paths, *left[1:]]


async def demonstrate(
  task: Explore, environment: task_lib.Environment, teacher: TeacherConfig
) -> demonstrations.Demonstration:
  """A demonstration whose calls are really executed."""
  mistakes: list[str] = []
  turns = lesson(task, teacher, mistakes)
  return await demonstrations.perform(task, environment, turns, mistakes)
