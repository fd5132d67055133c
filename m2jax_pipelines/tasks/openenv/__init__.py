"""The kind `openenv`: episodes of an environment behind an OpenEnv server.

A spec is `openenv/SPLIT/SEED/INDEX@URL?SETTINGS` (`tasks.foreign`).
docs/environments.md.
"""

from m2jax_pipelines.tasks.foreign import demonstrate
from m2jax_pipelines.tasks.openenv.task import (
  Config,
  OpenEnvTask,
  TeacherConfig,
  families,
  make,
  spec,
)

__all__ = [
  'Config',
  'OpenEnvTask',
  'TeacherConfig',
  'demonstrate',
  'families',
  'make',
  'spec',
]
