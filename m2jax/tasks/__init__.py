"""Tasks: instruction, environment and verdict of an episode (`tasks.task`)."""

from m2jax.tasks.demonstrations import (
  Demonstration,
  Lesson,
  TeacherConfig,
  Turn,
  lesson,
)
from m2jax.tasks.task import (
  BadCall,
  Environment,
  Execute,
  Task,
  TasksConfig,
  families,
  make,
  spec,
)

__all__ = [
  'BadCall',
  'Demonstration',
  'Environment',
  'Execute',
  'Lesson',
  'Task',
  'TasksConfig',
  'TeacherConfig',
  'Turn',
  'families',
  'lesson',
  'make',
  'spec',
]
