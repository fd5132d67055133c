"""Completes a config, so that every field can be set on the command line."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

_SCALARS = (bool, int, float, str)  # types that a flag can set if the default is None


def complete(
  config: ml_collections.ConfigDict, kind: type
) -> ml_collections.ConfigDict:
  """Adds the defaults of a dataclass's fields that `config` omits, nested ones too.

  Args:
    config: fields of `kind`; changed and returned.
    kind: the dataclass that `experiments.common.build` makes from it.
  """
  if (entries := entries_of(kind)) is not None:
    for value in config.values():
      complete(value, entries)
    return config
  if hasattr(kind, 'kinds'):
    return _unset(config, kind)
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
        continue  # `build` reports what is missing
      config[name] = _settable(default, kinds)
    elif isinstance(config[name], ml_collections.ConfigDict):
      for part in filter(_has_fields, kinds):
        complete(config[name], part)
  return config


def _unset(config: ml_collections.ConfigDict, kind: type) -> ml_collections.ConfigDict:
  """Adds placeholders for what flags can set where one of them may change the kind.

  They are the fields of the group's kind and of all in `kind.kinds()`; what stays unset
  is the default of the kind that `build` finds.
  """
  for of_kind in (chosen(kind, config), *kind.kinds()):
    hints = typing.get_type_hints(of_kind)
    for field in dataclasses.fields(of_kind):
      if field.name not in config and hints[field.name] in _SCALARS:
        name, of = field.name, hints[field.name]
        config[name] = ml_collections.config_dict.placeholder(of)
  return config


def chosen(kind: type, values: Mapping[str, Any]) -> type:
  """The dataclass that `values` are of: that of their `kind`, where it has kinds.

  Raises:
    ValueError: a `kind` that is not there.
  """
  of_kind = getattr(kind, 'of_kind', None)
  return of_kind(values['kind']) if of_kind and 'kind' in values else kind


def entries_of(kind: Any) -> type | None:
  """The dataclass X of a hint `Mapping[str, X]`, else None."""
  if typing.get_origin(kind) is Mapping and len(args := typing.get_args(kind)) == 2:
    return args[1] if dataclasses.is_dataclass(args[1]) else None
  return None


def _has_fields(kind: Any) -> bool:
  return dataclasses.is_dataclass(kind) or entries_of(kind) is not None


def _settable(value, kinds: tuple[type, ...]):
  """A default that flags can set: None with its type, a dataclass as a ConfigDict."""
  if value is None and kinds[0] in _SCALARS:
    return ml_collections.config_dict.placeholder(kinds[0])
  if not dataclasses.is_dataclass(value):
    return value
  if hasattr(value, 'kinds'):  # with its defaults only: see `_unset`
    group = ml_collections.ConfigDict({'kind': value.kind})
    return complete(group, type(value))
  hints = typing.get_type_hints(type(value))
  names = [field.name for field in dataclasses.fields(value)]
  return ml_collections.ConfigDict(
    {name: _settable(getattr(value, name), kinds_of(hints[name])) for name in names}
  )


def kinds_of(hint) -> tuple[type, ...]:
  """X, Y of a hint `X | Y`."""
  union = typing.get_origin(hint) in (typing.Union, types.UnionType)
  return typing.get_args(hint) if union else (hint,)
