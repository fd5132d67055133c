"""Builds the config of another person's run, whose kinds may be import paths.

And finds the job that it is of. Its module has no flags, so that tests can import it
together with jobs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
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
_WINDOW = 'rl.window'  # may be a kind by itself
# Packages whose kinds a config may name, at any depth: mixtures have parts.
_PACKAGES = (
  'm2jax.tasks',
  'm2jax.agents',
  'm2jax.rl.estimators',
  'm2jax.pool.windows',
  'm2jax.evolve.proposers',
)


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
  quality = str(settings.get(values, _QUALITY, ''))
  return [*(x for x in _kinds(values) if '.' in x), *(x for x in [quality] if ':' in x)]


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
  known = set().union(*map(kinds.packages, _PACKAGES))
  for kind in _kinds(values):
    if '.' in kind and kind.partition('.')[0] not in known:
      raise ValueError(f'kind={kind!r}: of another package')


def _kinds(values: Mapping[str, Any]) -> Iterator[str]:
  """The kinds that a config names."""
  if isinstance(window := settings.get(values, _WINDOW), str):
    yield window
  parts = [values]
  while parts:
    part = parts.pop()
    if isinstance(part, Mapping):
      if isinstance(kind := part.get('kind'), str):
        yield kind
      part = list(part.values())
    if isinstance(part, list | tuple):
      parts.extend(part)
