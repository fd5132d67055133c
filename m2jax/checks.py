"""Uniform errors for invalid settings and input, and which of them are user errors."""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
import traceback
from collections.abc import Mapping
from typing import Any


class InvalidSetting(ValueError):
  """A setting that is not valid. The message has all that the user needs."""


def require(config: Any, ok: bool, field: str, want: str) -> None:
  """Raises InvalidSetting unless `ok`: 'Config.field=value: must be want'.

  Args:
    config: the dataclass with the field.
    ok: whether the field's value is valid.
    field: name of the field.
    want: the requirement, such as 'at least 1'.

  Example:
    >>> def __post_init__(self):
    ...   check = functools.partial(require, self)
    ...   check(self.steps >= 1, 'steps', 'at least 1')
  """
  if not ok:
    value = getattr(config, field)
    raise InvalidSetting(f'{type(config).__name__}.{field}={value!r}: must be {want}')


def repeatable(error: BaseException) -> bool:
  """Whether the same command may succeed after this error: it is not the user's.

  Classes say so by an attribute `repeatable`. Otherwise errors of input are the user's,
  but not a ValueError that another package raises, such as a storage layer.
  """
  marked = getattr(error, 'repeatable', None)
  if marked is not None:
    return marked
  if isinstance(error, ValueError) and type(error).__module__ == 'builtins':
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and f'{os.sep}site-packages{os.sep}' in frames[-1].filename
  return not isinstance(error, (ValueError, FileNotFoundError, FloatingPointError))


def _is_text(value: Any) -> bool:
  """Whether a value is a text that files and databases accept."""
  try:
    return isinstance(value, str) and b'\0' not in value.encode()
  except UnicodeEncodeError:  # a lone surrogate
    return False


# Hint of a field → what its values are for a user, and whether a value of JSON or TOML
# is one. Numbers are sizes, times and counts.
_TYPES = {
  'str': ('text', _is_text),
  'str | None': ('text or null', lambda v: v is None or _is_text(v)),
  'bool': ('true or false', lambda v: isinstance(v, bool)),
  'int': ('a whole number, at least 0', lambda v: type(v) is int and 0 <= v < 2**63),
  'float': (
    'a finite number, at least 0',
    lambda v: type(v) in (int, float) and 0 <= v < math.inf,
  ),
  'Mapping[str, Any]': ('an object or table', lambda v: isinstance(v, dict)),
  'Mapping[str, float]': (
    'an object of numbers',
    lambda v: isinstance(v, dict) and all(type(x) in (int, float) for x in v.values()),
  ),
  'tuple[str, ...]': (
    'a list of texts',
    lambda v: isinstance(v, list) and all(map(_is_text, v)),
  ),
}


def check_fields(kind: type, values: Mapping[str, Any], where: str) -> None:
  """Raises ValueError unless values that were read from a file fit a dataclass.

  Fields whose hint is not listed here must not be given.

  Args:
    kind: the dataclass.
    values: field name → value.
    where: the place of the values in the file, for the message.
  """
  fields = [(field.name, str(field.type)) for field in dataclasses.fields(kind)]
  hints = {name: hint for name, hint in fields if hint in _TYPES}
  for name, value in values.items():
    if name not in hints:
      has = ', '.join(hints)
      raise ValueError(f'{where} has no field {reprlib.repr(name)}; it has {has}')
    check_type(value, hints[name], f'{where}.{name}')


def check_type(value: Any, hint: str, field: str) -> None:
  """Raises ValueError unless a value that was read from a file fits a field.

  Args:
    value: a value read from JSON or TOML.
    hint: type annotation of the dataclass's field, as written; numbers are not
      negative.
    field: its place in the file, for the message.

  Example:
    >>> check_type('x', 'int', 'limits.processes')
    Traceback (most recent call last):
    ValueError: limits.processes is 'x': must be a whole number, at least 0
  """
  what, fits = _TYPES[hint]
  if not fits(value):
    raise ValueError(f'{field} is {reprlib.repr(value)}: must be {what}')
