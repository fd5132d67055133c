"""Components that a config selects by `kind`: tasks, teachers, agents.

A kind is a module, of this repository or any other: a name without a dot is a module of
the package it belongs to (`terminal` of `m2jax.tasks`), one with a dot is an import
path (`mylab.puzzles`). The module defines the config of its kind, whose fields
`experiments.common.build` fills, so that each can be set by a flag.
"""

from __future__ import annotations

import importlib
import pkgutil
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
    raise ValueError(
      f'kind={kind!r}: no module {name}; expected a module of {package} '
      f'({", ".join(_names(package))}) or an import path with a dot'
    ) from error


def _names(package: str) -> list[str]:
  path = importlib.import_module(package).__path__
  return [module.name for module in pkgutil.iter_modules(path) if module.ispkg]
