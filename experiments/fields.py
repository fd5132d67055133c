"""Makes a config complete, so that every field can be set on the command line."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

_SCALARS = (bool, int, float, str)  # that a flag can set where the default is None


def complete(
  config: ml_collections.ConfigDict, kind: type
) -> ml_collections.ConfigDict:
  """Adds the defaults of a dataclass's fields that `config` leaves out, also in parts.

  Args:
    config: fields of `kind`; changed and returned.
    kind: the dataclass that `experiments.common.build` makes of it.
  """
  kind = chosen(kind, config)
  hints = typing.get_type_hints(kind)
  for field in dataclasses.fields(kind):
    name, kinds = field.name, kinds_of(hints[field.name])
    if name not in config:
      if field.default is not dataclasses.MISSING:
        default = field.default
      elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
      else:
        continue  # `build` says what is missing
      if dataclasses.is_dataclass(default):
        default = dataclasses.asdict(default)
      elif default is None and kinds[0] in _SCALARS:
        default = ml_collections.config_dict.placeholder(kinds[0])  # None, of a type
      config[name] = default
    elif isinstance(config[name], ml_collections.ConfigDict):
      for part in filter(dataclasses.is_dataclass, kinds):
        complete(config[name], part)
  return config


def chosen(kind: type, values: Mapping[str, Any]) -> type:
  """The dataclass that `values` are of: that of their `kind`, where it has kinds.

  Raises:
    ValueError: a `kind` that is not there.
  """
  of_kind = getattr(kind, 'of_kind', None)
  return of_kind(values['kind']) if of_kind and 'kind' in values else kind


def kinds_of(hint) -> tuple[type, ...]:
  """X, Y of a hint `X | Y`."""
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  return typing.get_args(hint) if union else (hint,)
