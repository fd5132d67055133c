"""A teacher of Harbor tasks that runs the task's own solution.

It shows one call of `sh`, the text of `solve.sh`. It cannot show solutions with further
files; for such tasks use recorded attempts (`sft.recorded` of the main job).
"""

from __future__ import annotations

import dataclasses

from m2jax.tasks import demonstrations
from m2jax.tasks import task as task_lib
from m2jax.tasks.harbor.task import HarborTask
from m2jax.tasks.terminal import shell


@dataclasses.dataclass(frozen=True)
class TeacherConfig(demonstrations.TeacherConfig):
  """A teacher without settings or mistakes."""

  kind: str = 'harbor'


def lesson(
  task: HarborTask, teacher: TeacherConfig, mistakes: list[str]
) -> demonstrations.Lesson:
  """The teacher's turns; see `demonstrations.lesson`.

  Raises:
    ValueError: the solution has files beside solve.sh.
  """
  files = dict(task.directory.solution())
  script = files.pop('solve.sh').decode()
  if files:
    raise ValueError(
      f'{task.spec}: its solution has files beside solve.sh, which no call of '
      f'{shell.NAME} shows ({min(files)}): set sft.recorded, or tasks.weights without '
      f'the family {task.family!r}'
    )
  yield demonstrations.Turn('do it', shell.NAME, {shell.ARGUMENT: _command(script)})
  return demonstrations.Turn('done', content='done')


async def demonstrate(
  task: HarborTask, environment: task_lib.Environment, teacher: TeacherConfig
) -> demonstrations.Demonstration:
  """A demonstration whose call is really executed."""
  return await demonstrations.perform(task, environment, lesson(task, teacher, []))


def _command(script: str) -> str:
  """The script without the comments at its top, with the variable it may use."""
  lines = script.strip().split('\n')
  while lines and lines[0].startswith('#'):
    lines.pop(0)
  command = '\n'.join(lines).strip()
  named = 'M2JAX_WORKSPACE' in command
  return f'M2JAX_WORKSPACE=$PWD\n{command}' if named else command
