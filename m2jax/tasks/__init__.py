"""Tasks: instruction, environment and verdict of an episode (`tasks.task`)."""

from m2jax.tasks.demonstrations import Demonstration, TeacherConfig
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
  'Task',
  'TasksConfig',
  'TeacherConfig',
  'families',
  'make',
  'spec',
]
