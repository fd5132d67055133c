"""Harbor task directories as tasks: `task` the kind, `directory` the format.

`schema` checks task.toml of our own tasks, `verifier` judges them, `teacher`
demonstrates. Those that other tools made are checked by `standard` and `service`, and
run and judged by `container`.
"""

from m2jax.tasks.harbor.directory import (
  SPLITS,
  STAGING,
  Directory,
  Draft,
  read,
  split_of,
  write,
)
from m2jax.tasks.harbor.schema import BadTask, Ceilings, Metadata
from m2jax.tasks.harbor.standard import Containers
from m2jax.tasks.harbor.task import (
  Config,
  HarborTask,
  SetupFailed,
  families,
  make,
  of_directory,
  spec,
)
from m2jax.tasks.harbor.teacher import TeacherConfig, demonstrate, lesson
from m2jax.tasks.harbor.verifier import (
  FAILED,
  INVALID,
  PASSED,
  InvalidVerdict,
  Verdict,
)

__all__ = [
  'FAILED',
  'INVALID',
  'PASSED',
  'SPLITS',
  'STAGING',
  'SetupFailed',
  'BadTask',
  'Ceilings',
  'Config',
  'Containers',
  'Directory',
  'Draft',
  'HarborTask',
  'InvalidVerdict',
  'Metadata',
  'TeacherConfig',
  'Verdict',
  'demonstrate',
  'families',
  'lesson',
  'make',
  'of_directory',
  'read',
  'spec',
  'split_of',
  'write',
]
