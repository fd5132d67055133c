"""The kind `verifiers`: episodes of an environment made with PyPI `verifiers` 0.4.

A spec is `verifiers/SPLIT/SEED/INDEX@ENV?SETTINGS` (`tasks.foreign`).
docs/environments.md.
"""

from m2jax_pipelines.tasks.foreign import demonstrate
from m2jax_pipelines.tasks.verifiers.task import (
  Config,
  TeacherConfig,
  VerifiersTask,
  families,
  make,
  spec,
)

__all__ = [
  'Config',
  'TeacherConfig',
  'VerifiersTask',
  'demonstrate',
  'families',
  'make',
  'spec',
]
