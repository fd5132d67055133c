"""Uniform errors for invalid settings and input, and which a user has to act on."""

from __future__ import annotations

import math
import os
import reprlib
import traceback
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


# Hint of a field → what its values are for a user, and whether a value of JSON or TOML
# is one. Numbers are sizes, times and counts.
_TYPES = {
  'str': ('text', lambda v: isinstance(v, str)),
  'str | None': ('text or null', lambda v: v is None or isinstance(v, str)),
  'bool': ('true or false', lambda v: isinstance(v, bool)),
  'int': ('a whole number, at least 0', lambda v: type(v) is int and v >= 0),
  'float': (
    'a finite number, at least 0',
    lambda v: type(v) in (int, float) and 0 <= v < math.inf,
  ),
  'Mapping[str, Any]': ('an object or table', lambda v: isinstance(v, dict)),
  'tuple[str, ...]': (
    'a list of texts',
    lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
  ),
}


def check_type(value: Any, hint: str, field: str) -> None:
  """Raises ValueError unless a value that was read from a file fits a field.

  Args:
    value: of JSON or TOML.
    hint: of the dataclass's field, as it is written; numbers are not negative.
    field: its place in the file, for the message.

  Example:
    >>> check_type('x', 'int', 'limits.processes')
    Traceback (most recent call last):
    ValueError: limits.processes is 'x': must be a whole number, at least 0
  """
  what, fits = _TYPES[hint]
  if not fits(value):
    raise ValueError(f'{field} is {reprlib.repr(value)}: must be {what}')
