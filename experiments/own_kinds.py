"""Builds the config of another person's run, whose kinds may be import paths.

Its module has no flags, so that tests can import it together with jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import common
from m2jax import kinds
from m2jax.evolve.doctor import settings
from m2jax.forge.config import ForgeConfig

# Packages of the modules that a config may name by `kind`, by where it names them.
_KINDS = {
  'tasks': 'm2jax.tasks',
  'teacher': 'm2jax.tasks',
  'episodes.agent': 'm2jax.agents',
}


def build(values: Mapping[str, Any]) -> ForgeConfig:
  """The config of these values.

  Raises:
    ValueError: it is wrong, or names a module outside the installed distributions that
      register kinds, which is not imported.
  """
  for path, package in _KINDS.items():
    kind = settings.get(values, f'{path}.kind', '')
    known = isinstance(kind, str) and kind.partition('.')[0] in kinds.packages(package)
    if '.' in str(kind) and not known:
      raise ValueError(f'{path}.kind={kind!r}: of another package')
  return common.build(ForgeConfig, dict(values))
