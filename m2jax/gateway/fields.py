"""Fields of a request by type, with an error that names them."""

from __future__ import annotations

from m2jax.gateway.errors import invalid


def flag(data: dict, field: str) -> bool:
  """A field that is true or false; absent or null is false."""
  value = data.get(field)
  if value is None:
    return False
  if not isinstance(value, bool):
    raise invalid('must be true or false', field)
  return value


def integer(data: dict, field: str) -> int | None:
  """A field that is an integer, or None."""
  value = data.get(field)
  if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
    raise invalid('must be an integer', field)
  return value
