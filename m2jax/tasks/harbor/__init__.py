"""Harbor task directories as tasks: `task` the kind, `directory` the format.

`schema` checks task.toml, `verifier` judges, `teacher` demonstrates.
"""

from m2jax.tasks.harbor.directory import Directory, Draft, read, write
from m2jax.tasks.harbor.schema import BadTask, Ceilings, Metadata
from m2jax.tasks.harbor.task import (
  SPLITS,
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
  'SetupFailed',
  'BadTask',
  'Ceilings',
  'Config',
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
  'write',
]
