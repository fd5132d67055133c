"""Uniform errors for invalid settings: field, value, and requirement."""

from __future__ import annotations

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
