"""The scripted teacher whose demonstrations SFT imitates: closed-loop and fallible.

For a task it thinks, calls the tool `sh`, reads the actual output, and continues from
there to a final answer. It makes mistakes as human demonstrators do, at the rates that
`TeacherConfig` gives for each family, and nothing in its text marks a mistake:

    wrong_option   an option left out or mixed up: wc -c for -l, no -i, no -w, cp for mv
    wrong_pattern  searches for any use of a name instead of its definition
    wrong_file     works on another file of the workspace
    wrong_part     takes the wrong part of a printed line
    wrong_end      takes the first instead of the last
    off_by_one     takes the line before the right one
    unsorted       takes the first or last name without sorting by size
    skipped_step   skips a step, or answers before the last one
    not_in_place   sed without -i
    first_only     sed without g, or only the first of several files
    clobber        > for >>
    swapped        swaps the old and the new value
    malformed_call makes a tool call with a misnamed argument, then the right one

In some families the teacher makes a mistake more often than not (rates above one half),
so imitating it well is not enough.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib
from m2jax.tasks.terminal import draw, shell, steps
from m2jax.tasks.terminal.families import FAMILIES
from m2jax.tasks.terminal.task import TerminalTask

MISNAMED_ARGUMENT = 'command'  # instead of shell.ARGUMENT

RATES: Mapping[str, Mapping[str, float]] = {
  'count_lines': {'wrong_option': 0.3, 'wrong_file': 0.05},
  'count_matches': {'wrong_option': 0.8, 'wrong_file': 0.05},
  'find_file': {'wrong_option': 0.25},
  'find_definition': {'wrong_option': 0.7},
  'line_word': {'off_by_one': 0.15, 'wrong_part': 0.2},
  'line_number': {'wrong_end': 0.7, 'wrong_part': 0.1},
  'longer': {'wrong_end': 0.7, 'wrong_part': 0.1},
  'extreme': {'wrong_end': 0.5, 'unsorted': 0.15},
  'value': {'wrong_file': 0.1, 'wrong_part': 0.15},
  'rename': {'wrong_option': 0.35, 'wrong_file': 0.05},
  'append': {'clobber': 0.65, 'wrong_file': 0.05},
  'replace': {'first_only': 0.6, 'not_in_place': 0.15},
  'delete_line': {'off_by_one': 0.1, 'not_in_place': 0.3},
  'delete_matching': {'first_only': 0.7},
  'save_count': {'wrong_option': 0.15, 'skipped_step': 0.25},
  'set_value': {'swapped': 0.1, 'not_in_place': 0.25},
  'into_folder': {'skipped_step': 0.3, 'wrong_option': 0.1},
  'act_on_found': {
    'wrong_pattern': 0.5,
    'skipped_step': 0.15,
    'wrong_option': 0.2,
    'clobber': 0.3,
  },
  'act_on_extreme': {
    'wrong_end': 0.4,
    'unsorted': 0.1,
    'skipped_step': 0.1,
    'wrong_option': 0.2,
    'clobber': 0.3,
  },
  'follow_notes': {'skipped_step': 0.5, 'wrong_option': 0.2, 'clobber': 0.3},
  'fix_check': {'swapped': 0.15, 'not_in_place': 0.25},
  'replace_in_found': {'first_only': 0.5, 'not_in_place': 0.15},
} | {
  family: dict.fromkeys(kind.mistakes, 0.04) for family, kind in steps.FAMILIES.items()
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
  """Attempts a task in an environment that holds the task's files.

  Args:
    task: a terminal task.
    environment: the open environment of the task.
    config: rates of mistakes.
    attempt: as for `lesson`.
  """
  mistakes: list[str] = []
  turns = lesson(task, config, mistakes, attempt)
  return await demonstrations.perform(task, environment, turns, mistakes)
