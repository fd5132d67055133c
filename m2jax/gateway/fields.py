"""Typed access to the fields of a request; errors name the field."""

from __future__ import annotations

from m2jax.gateway.errors import invalid


def flag(data: dict, field: str) -> bool:
  """A boolean field; absent or null is False."""
  value = data.get(field)
  if value is None:
    return False
  if not isinstance(value, bool):
    raise invalid('must be true or false', field)
  return value


def integer(data: dict, field: str) -> int | None:
  """An integer field; absent or null is None."""
  value = data.get(field)
  if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
    raise invalid('must be an integer', field)
  return value
