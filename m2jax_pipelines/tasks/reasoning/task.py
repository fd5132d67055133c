"""Reasoning problems as tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from m2jax import sandbox
from m2jax.checks import require
from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks.reasoning import problems, strict

SPLITS = ('train', 'dev', 'held_out')
FORMAT = f'End with the answer alone in {strict.OPEN}{strict.CLOSE}.'
_PARTS = 10  # of problems if splits share generators: 8 train, 1 dev, 1 held_out
_MAX_DRAWS = 4000


@dataclasses.dataclass(frozen=True)
class Config(task_lib.TasksConfig):
  """Distribution of the problems.

  Attributes:
    levels: difficulties, steps of the generators' curricula; each is equally likely.
    queries: number of distinct problems of the training stream: its indices repeat
      after that many. 0: no limit. Responses per query are `rl.group_size`.
    dev, held_out: generators of these splits; the rest, or those of `weights`, train.
    split_by: 'generator', or 'problem': every split has the generators of `weights`,
      and a question belongs to one split by its hash.
  """

  kind: str = 'reasoning'
  levels: tuple[int, ...] = (0,)
  queries: int = 0
  dev: tuple[str, ...] = problems.DEV
  held_out: tuple[str, ...] = problems.HELD_OUT
  split_by: str = 'generator'

  def __post_init__(self):
    super().__post_init__()
    require(self, self.split_by in ('generator', 'problem'), 'split_by', 'of those two')
    require(self, self.levels and min(self.levels) >= 0, 'levels', 'some, from 0 on')
    require(self, self.queries >= 0, 'queries', '0 or more')
    require(self, not self.partial_credit, 'partial_credit', '0: right or wrong')
    both = set(self.dev) & set(self.held_out)
    require(self, not both, 'dev', f'without those of held_out: {sorted(both)}')
    if self.split_by == 'generator':
      trained = set(self.weights) & {*self.dev, *self.held_out}
      require(self, not trained, 'weights', f'of training generators: {trained}')

  def generators(self, split: str) -> Mapping[str, float]:
    """Relative frequency of the generators of a split."""
    train = dict(self.weights) or dict.fromkeys(problems.TRAIN, 1.0)
    if self.split_by == 'problem' or split == 'train':
      return train
    return dict.fromkeys(self.dev if split == 'dev' else self.held_out, 1.0)


@dataclasses.dataclass(frozen=True)
class ReasoningTask:
  """A `tasks.Task` without tools."""

  spec: str
  family: str
  split: str
  instruction: str
  answer: str
  tools: Sequence[Mapping[str, Any]] = ()
  max_tool_calls: int = 0
  baseline_calls: int = 0

  @contextlib.asynccontextmanager
  async def open(
    self, *, backend: str = 'namespaces', limits: sandbox.Limits | None = None
  ) -> AsyncIterator[task_lib.Environment]:
    """An environment without tools; see `tasks.Task.open`."""

    async def execute(name: str, arguments: Mapping[str, Any]) -> str:
      raise task_lib.BadCall(f'no tool {name!r}: this task has none')

    yield task_lib.Environment(execute)

  async def verify(self, environment: task_lib.Environment, answer: str) -> float:
    """1 if the answer is right, else 0."""
    return float(strict.equal(strict.extract(answer), self.answer))


def families(config: Config) -> Mapping[str, float]:
  """Relative frequency of the training generators."""
  return config.generators('train')


def spec(
  split: str, index: int, seed: int, config: Config, family: str | None = None
) -> str:
  """The spec of the index-th problem of a stream.

  Raises:
    ValueError: an unknown split, a negative index, or a generator of another split.
  """
  if split not in SPLITS:
    raise ValueError(f'unknown split {split!r}: expected one of {SPLITS}')
  if index < 0:
    raise ValueError(f'task index is {index}: expected 0 or more')
  weights = config.generators(split)
  if family is not None and family not in weights:
    raise ValueError(f'{family!r} is no generator of {split}: {sorted(weights)}')
  if split == 'train' and config.queries:
    index %= config.queries
  rng = random.Random(f'{split}/{seed}/{index}')
  drawn = rng.choices(sorted(weights), [weights[n] for n in sorted(weights)])[0]
  level = rng.choice(config.levels)
  name = f'reasoning/{split}/{family or drawn}/{level}/{seed}/{index}'
  return name if config.split_by == 'generator' else f'{name}?problem'


@functools.lru_cache(maxsize=4096)
def make(spec: str) -> ReasoningTask:
  """Returns the task that a spec names.

  If more than half of a generator's problems have one answer, half of the tasks have
  it, so that no constant answer is right for most of them.

  Raises:
    ValueError: `spec` does not come from `reasoning.spec`, or the generator has no
      usable problem.
  """
  name, _, by = spec.partition('?')
  parts = name.split('/')
  if len(parts) != 6 or parts[1] not in SPLITS or by not in ('', 'problem'):
    raise ValueError(
      f'{spec!r} is no reasoning task: expected '
      'reasoning/SPLIT/GENERATOR/LEVEL/SEED/INDEX'
    )
  _, split, generator, level, _, _ = parts
  common = problems.common_answer(generator, int(level))
  is_common = random.Random(f'is_common/{name}').random() < 0.5
  for attempt in range(_MAX_DRAWS):
    key = f'{name}/{attempt}'
    problem = problems.draw(generator, int(level), key)
    if by and _split_of(problem.question) != split:
      continue
    if common is not None and (problem.answer == common) != is_common:
      continue
    if not problems.defect(generator, int(level), key):
      break
  else:
    raise ValueError(f'{spec!r}: no usable problem in {_MAX_DRAWS} draws')
  instruction = f'{problem.question}\n{FORMAT}'
  return ReasoningTask(spec, generator, split, instruction, problem.answer)


def _split_of(question: str) -> str:
  part = int.from_bytes(hashlib.sha256(question.encode()).digest()[:4]) % _PARTS
  return {0: 'dev', 1: 'held_out'}.get(part, 'train')


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """A teacher that knows the answers: it shows the format, not how to reason."""

  kind: str = 'reasoning'


def lesson(
  task: ReasoningTask, teacher: TeacherConfig, mistakes: list[str]
) -> demonstrations.Lesson:
  """One turn, the answer; see `tasks.lesson`."""
  content = f'{strict.OPEN}{task.answer}{strict.CLOSE}'
  return demonstrations.Turn(f'it is {task.answer}', content=content)
  yield  # a generator without tool calls


async def demonstrate(
  task: ReasoningTask, environment: task_lib.Environment, teacher: TeacherConfig
) -> demonstrations.Demonstration:
  """Answers; see `tasks.Demonstration`."""
  return await demonstrations.perform(task, environment, lesson(task, teacher, []))
