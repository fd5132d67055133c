"""The kind `reasoning`: problems with one right answer, without tools.

A spec is `reasoning/SPLIT/GENERATOR/LEVEL/SEED/INDEX` and, if splits share generators,
`?problem`. Problems are reasoning-gym's, the verifier is `strict`.
"""

from m2jax_pipelines.tasks.reasoning.task import (
  Config,
  ReasoningTask,
  TeacherConfig,
  demonstrate,
  families,
  lesson,
  make,
  spec,
)

__all__ = [
  'Config',
  'ReasoningTask',
  'TeacherConfig',
  'demonstrate',
  'families',
  'lesson',
  'make',
  'spec',
]
