"""Code repair of one edit: a function differs in one line from its description.

The agent reads, edits and tests a file by three tools; the verdict is on the values of
the function on calls it has not seen, in a new sandbox that contains no expected value.
Families are by the number of lines, so that a run shows up to which size a policy
repairs. Specs: repair/SPLIT/steps_N/SEED/INDEX?SPARE_CALLS; a program belongs to one
split by its hash.
"""

from m2jax_pipelines.tasks.repair.task import Config, RepairTask, families, make, spec
from m2jax_pipelines.tasks.repair.teacher import TeacherConfig, demonstrate, lesson

__all__ = [
  'Config',
  'RepairTask',
  'TeacherConfig',
  'demonstrate',
  'families',
  'lesson',
  'make',
  'spec',
]
