"""Components that a config selects by `kind`: tasks, teachers, agents, estimators.

A kind is a module, of this repository or any other. A name without a dot is a module of
the package it belongs to (`terminal` of `m2jax.tasks`) or, if it has none, an entry
point of an installed distribution, in the group of that package's name:

    [project.entry-points."m2jax.tasks"]
    sums = "mylab.sums"

A name with a dot is an import path (`mylab.puzzles`). The module defines the config of
its kind, whose fields `experiments.common.build` fills, so that each can be set by a
flag.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from importlib import metadata
from types import ModuleType


def module(package: str, kind: str) -> ModuleType:
  """Imports the module that `kind` names.

  Raises:
    ValueError: there is no such module. Errors inside the module propagate.

  Example:
    >>> module('m2jax.tasks', 'terminal').__name__
    'm2jax.tasks.terminal'
  """
  name = kind if '.' in kind else f'{package}.{kind}'
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    if error.name is None or not f'{name}.'.startswith(f'{error.name}.'):
      raise
    missing = error
  try:
    entry_point = _entry_point(package, kind)
  except KeyError:
    others = sorted(metadata.entry_points(group=package).names)
    raise ValueError(
      f'kind={kind!r}: no module {name}; expected a module of {package} '
      f'({", ".join(_names(package))}), an entry point of the group {package} '
      f'({", ".join(others) or "none is installed"}) or an import path with a dot'
    ) from missing
  return entry_point.load()


def packages(package: str) -> set[str]:
  """The top-level packages that the kinds of a package are from, its own included."""
  modules = [entry.module for entry in metadata.entry_points(group=package)]
  return {name.partition('.')[0] for name in (package, *modules)}


@functools.cache  # of what is found; a search reads the metadata of all distributions
def _entry_point(group: str, name: str) -> metadata.EntryPoint:
  """Raises KeyError if there is none, ValueError if there are several."""
  found = set(metadata.entry_points(group=group, name=name))
  if len(found) > 1:
    raise ValueError(
      f'kind={name!r}: several distributions have an entry point of this name in the '
      f'group {group}: {", ".join(sorted(entry.value for entry in found))}; give the '
      'import path instead'
    )
  if not found:
    raise KeyError(name)
  return found.pop()


def _names(package: str) -> list[str]:
  """The kinds of a package: its `KINDS`, or else its sub-packages."""
  found = importlib.import_module(package)
  modules = pkgutil.iter_modules(found.__path__)
  return getattr(found, 'KINDS', None) or [m.name for m in modules if m.ispkg]
