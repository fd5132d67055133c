"""Builds the config of another person's run, whose kinds may be import paths.

And finds the job that it is of. Its module has no flags, so that tests can import it
together with jobs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from experiments import common
from m2jax import kinds
from m2jax.evolve.doctor import settings
from m2jax.forge.config import ForgeConfig

# Fields that a config.json has if it is of a job.
_FIELDS = {
  'forge': {'episodes', 'tasks'},
  'pretrain': {'pretrain', 'text'},
  'sft': {'demonstrations', 'sft'},
}
_QUALITY = 'text.quality'  # module:function; a path of a file has no colon
# Packages of the modules that a config may name by `kind`, by where it names them.
_KINDS = {
  'tasks': 'm2jax.tasks',
  'teacher': 'm2jax.tasks',
  'episodes.agent': 'm2jax.agents',
}


def job(values: Mapping[str, Any]) -> str:
  """The module of the training job that wrote a config.json.

  Raises:
    ValueError: it is of none.
  """
  for name, fields in _FIELDS.items():
    if fields <= values.keys():
      return f'experiments.{name}'
  raise ValueError(f'config.json is not of {", ".join(_FIELDS)}')


def import_paths(values: Mapping[str, Any]) -> list[str]:
  """The import paths of code that a config names."""
  of_kinds = [str(settings.get(values, f'{path}.kind', '')) for path in _KINDS]
  quality = str(settings.get(values, _QUALITY, ''))
  return [*(x for x in of_kinds if '.' in x), *(x for x in [quality] if ':' in x)]


def build(values: Mapping[str, Any], *, own: bool = False) -> Any:
  """The config of these values, as its job builds it.

  Args:
    own: its import paths are the user's, and may be imported.

  Raises:
    ValueError: it is wrong, or names a module outside the installed distributions that
      register kinds, which is not imported.
  """
  name = job(values)
  if not own:
    _check_kinds(values)
  kind = (
    ForgeConfig if name.endswith('.forge') else importlib.import_module(name).Config
  )
  return common.build(kind, dict(values))


def _check_kinds(values: Mapping[str, Any]) -> None:
  for path, package in _KINDS.items():
    kind = settings.get(values, f'{path}.kind', '')
    known = isinstance(kind, str) and kind.partition('.')[0] in kinds.packages(package)
    if '.' in str(kind) and not known:
      raise ValueError(f'{path}.kind={kind!r}: of another package')
