"""The teacher of the repair tasks: compares line by line, edits, tests, tries again."""

from __future__ import annotations

import dataclasses
import random

from m2jax.checks import require
from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib
from m2jax_pipelines.tasks.repair import programs
from m2jax_pipelines.tasks.repair.task import RepairTask


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """How the teacher acts.

  Attributes:
    slip: probability that the first edit is wrong; the teacher then reads the test's
      output and mends it.
    seed: seed of the teacher's choices.
  """

  kind: str = 'repair'
  slip: float = 0.2
  seed: int = 0

  def __post_init__(self):
    require(self, 0 <= self.slip <= 1, 'slip', 'a probability')


def lesson(
  task: RepairTask, teacher: TeacherConfig, mistakes: list[str]
) -> demonstrations.Lesson:
  """The teacher's turns; see `demonstrations.lesson`."""
  rng = random.Random(f'teacher/{teacher.seed}/{task.spec}')
  right = task.program.steps[task.bug.index]
  yield demonstrations.Turn('read it', 'read')
  old, new = task.bug.step.code, right.code
  thought = _comparison(task)
  slips = _slips(task)
  if slips and rng.random() < teacher.slip:
    mistakes.append('wrong_edit')
    new = rng.choice(slips).code
  yield demonstrations.Turn(thought, 'edit', {'old': old, 'new': new})
  if (yield demonstrations.Turn('check it', 'test')) != 'ok':
    again = {'old': new, 'new': right.code}
    yield demonstrations.Turn(f'{right.words}: {right.code}', 'edit', again)
    yield demonstrations.Turn('check it', 'test')
  return demonstrations.Turn('it works', content='fixed')


def _slips(task: RepairTask) -> list[programs.Step]:
  """Other wrong steps that the test shows; the file then has their line once."""
  index, program = task.bug.index, task.program
  found = []
  for step in programs.neighbours(program.steps[index], program.parameters):
    other = programs.apply(program, programs.Bug(index, step))
    fails = any(other(*call) != program(*call) for call in task.shown)
    once = [s.code for s in other.steps].count(step.code) == 1
    if fails and once and step != task.bug.step:
      found.append(step)
  return found


def _comparison(task: RepairTask) -> str:
  """The steps up to the wrong one, each with its line."""
  good = task.program.steps[: task.bug.index]
  right = task.program.steps[task.bug.index]
  lines = [f'{step.words}: {step.code}' for step in good]
  return '\n'.join([*lines, f'{right.words}: not {task.bug.step.code}'])


async def demonstrate(
  task: RepairTask, environment: task_lib.Environment, teacher: TeacherConfig
) -> demonstrations.Demonstration:
  """A demonstration whose calls are really executed."""
  mistakes: list[str] = []
  turns = lesson(task, teacher, mistakes)
  return await demonstrations.perform(task, environment, turns, mistakes)
