"""Uniform errors for invalid settings, and which errors a user has to act on."""

from __future__ import annotations

import os
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
