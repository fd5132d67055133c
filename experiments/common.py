"""What the mains share: flags, and ConfigDict → dataclasses."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import types
import typing
from typing import Any

import ml_collections
from absl import flags, logging
from ml_collections import config_flags

WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the run.', required=True)
CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'configs/NAME.py[:variant]', lock_config=True
)


def workdir() -> pathlib.Path:
  return pathlib.Path(WORKDIR.value)


def build(kind: type, values: Any, path: str = 'config') -> Any:
  """A dataclass of `kind` from a ConfigDict or mapping, nested dataclasses included.

  Raises:
    ValueError: a field the dataclass does not have, or one that is missing.
  """
  if isinstance(values, ml_collections.ConfigDict):
    values = values.to_dict(preserve_field_references=False)
  if not dataclasses.is_dataclass(kind) or values is None:
    return tuple(values) if isinstance(values, list) else values
  hints = typing.get_type_hints(kind)
  fields = {f.name: f for f in dataclasses.fields(kind)}
  unknown = sorted(set(values) - set(fields))
  if unknown:
    raise ValueError(
      f'{path}: {kind.__name__} has no field {", ".join(unknown)}; '
      f'it has {", ".join(fields)}'
    )
  missing = [
    name
    for name, f in fields.items()
    if name not in values
    and f.default is dataclasses.MISSING
    and f.default_factory is dataclasses.MISSING
  ]
  if missing:
    raise ValueError(f'{path}: {kind.__name__} needs {", ".join(missing)}')
  return kind(
    **{
      name: build(_inner(hints[name]), value, f'{path}.{name}')
      for name, value in values.items()
    }
  )


def _inner(hint: Any) -> Any:
  """`X` of `X | None`."""
  if typing.get_origin(hint) in (typing.Union, types.UnionType):
    kinds = [k for k in typing.get_args(hint) if k is not type(None)]
    return kinds[0] if len(kinds) == 1 else hint
  return hint


def fail(error: Exception) -> None:
  """Ends the program with the error's message: for mistakes of the person at the keys."""
  logging.error('%s', error)
  sys.exit(2)
