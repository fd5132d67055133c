"""The scripted teacher whose demonstrations SFT imitates: closed-loop and fallible.

For a task it thinks, calls the tool `sh`, reads the actual output, and continues from
there to a final answer. It makes errors as human demonstrators do, at the rates that
`TeacherConfig` gives for each family, and nothing in its text marks an error:

    wrong_option   an option or a program mixed up: wc -c for -l, cp for mv
    skipped_step   skips a step
    not_in_place   sed without -i
    first_only     sed without g
    clobber        > for >>
    malformed_call makes a tool call with a misnamed argument, then the right one
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib
from m2jax.tasks.terminal import draw, shell
from m2jax.tasks.terminal.steps import FAMILIES
from m2jax.tasks.terminal.task import TerminalTask

MISNAMED_ARGUMENT = 'command'  # instead of shell.ARGUMENT

RATES: Mapping[str, Mapping[str, float]] = {
  name: dict.fromkeys(family.mistakes, 0.04) for name, family in FAMILIES.items()
}


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """How often the teacher errs.

  Attributes:
    rates: family -> kind of mistake -> probability at each opportunity. Families and
      kinds that are not listed have probability 0.
    malformed_call: probability of one malformed tool call in a demonstration.
    looks: probability of listing the files before a command, while spare calls are
      left. It is no mistake and has no consequence; it makes the number of calls so far
      a poor predictor of the steps left.
    scale: factor on every rate; 0 makes the teacher perfect.
    seed: seed of the mistakes.
  """

  kind: str = 'terminal'
  rates: Mapping[str, Mapping[str, float]] = dataclasses.field(
    default_factory=lambda: RATES
  )
  malformed_call: float = 0.05
  looks: float = 0.0
  scale: float = 1.0
  seed: int = 0

  def __post_init__(self):
    for family, rates in self.rates.items():
      if family not in FAMILIES:
        raise ValueError(
          f'TeacherConfig.rates: unknown family {family!r}: expected one of '
          f'{sorted(FAMILIES)}'
        )
      kinds = FAMILIES[family].mistakes
      for kind, rate in rates.items():
        if kind not in kinds:
          raise ValueError(
            f'TeacherConfig.rates[{family!r}]: unknown mistake {kind!r}: '
            f'expected one of {kinds}'
          )
        if not 0.0 <= rate <= 1.0:
          raise ValueError(
            f'TeacherConfig.rates[{family!r}][{kind!r}] is {rate}: expected 0-1'
          )
    for name in ('malformed_call', 'looks'):
      if not 0.0 <= getattr(self, name) <= 1.0:
        raise ValueError(
          f'TeacherConfig.{name} is {getattr(self, name)}: expected a probability'
        )
    if self.scale < 0.0:
      raise ValueError(f'TeacherConfig.scale is {self.scale}: expected 0 or more')


def lesson(
  task: TerminalTask,
  config: TeacherConfig,
  mistakes: list[str],
  attempt: int = 0,
) -> demonstrations.Lesson:
  """The teacher's turns; see `demonstrations.lesson`.

  Args:
    attempt: index of the attempt; each draws its own mistakes.
  """
  rng = random.Random(f'teacher/{config.seed}/{attempt}/{task.spec}')
  rates = config.rates.get(task.family, {})

  def slips(kind: str, rate: float) -> bool:
    if rng.random() >= rate * config.scale:
      return False
    mistakes.append(kind)
    return True

  def call(thought: str, command: str, argument: str = shell.ARGUMENT):
    return demonstrations.Turn(thought, shell.NAME, {argument: command})

  steps = FAMILIES[task.family].teach(
    task.params, lambda kind: slips(kind, rates.get(kind, 0.0))
  )
  spare = task.max_tool_calls - task.baseline_calls
  malformed = spare > 0 and slips('malformed_call', config.malformed_call)
  spare -= malformed
  printed = None
  while True:
    try:
      thought, command = steps.send(printed)
    except StopIteration as end:
      answer: draw.Answer = end.value
      return demonstrations.Turn(answer.thought, content=answer.content)
    if spare and config.looks and rng.random() < config.looks:
      yield call('look around', 'ls')
      spare -= 1
    if malformed:
      yield call(thought, command, MISNAMED_ARGUMENT)
      malformed = False
    printed = yield call(thought, command)


async def demonstrate(
  task: TerminalTask,
  environment: task_lib.Environment,
  config: TeacherConfig = TeacherConfig(),
  attempt: int = 0,
) -> demonstrations.Demonstration:
  """Attempts a task in an environment with the task's files.

  Args:
    task: a terminal task.
    environment: the open environment of the task.
    config: rates of mistakes.
    attempt: as for `lesson`.
  """
  mistakes: list[str] = []
  turns = lesson(task, config, mistakes, attempt)
  return await demonstrations.perform(task, environment, turns, mistakes)
