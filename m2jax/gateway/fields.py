"""Typed access to the fields of a request; errors name the field."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from m2jax.gateway.errors import invalid, unsupported
from m2jax.text import strict_json

_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256
# Neither text, nor a list, an object, a number or a flag that asks for anything.
_EMPTY = (None, [], '', {}, 0, False)


def body(data: bytes | bytearray | str) -> dict:
  """A body's JSON object. Raises ApiError (400), which names the invalid field."""
  try:
    value = strict_json.loads(data)
  except strict_json.JsonFault as fault:
    code = None if fault.path else 'invalid_json'
    message = fault.reason if fault.path else f'the body: {fault.reason}'
    raise invalid(message, fault.path or None, code) from None
  if not isinstance(value, dict):
    raise invalid('the body must be a JSON object', None, 'invalid_json')
  return value


def flag(data: dict, field: str) -> bool:
  """A boolean field; absent or null is False."""
  value = data.get(field)
  if value is None:
    return False
  if not isinstance(value, bool):
    raise invalid('must be true or false', field)
  return value


def integer(data: dict, field: str) -> int | None:
  """An integer field; absent or null is None. In JSON, 5.0 is the integer 5."""
  value = data.get(field)
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
    raise invalid('must be an integer', field)
  return value


def positive(data: dict, *fields: str) -> int | None:
  """The first of these integer fields that is present; at least 1."""
  for field in fields:
    value = integer(data, field)
    if value is not None:
      if value < 1:
        raise invalid('must be at least 1', field)
      return value
  return None


def text(value: Any, where: str) -> str:
  """A string."""
  if not isinstance(value, str):
    raise invalid('must be a string', where)
  return value


def name(value: Any, where: str) -> str:
  """A string that is not empty."""
  if not text(value, where):
    raise invalid('must not be empty', where)
  return value


def mapping(value: Any, where: str) -> dict:
  """An object."""
  if not isinstance(value, dict):
    raise invalid('must be an object', where)
  return value


def listed(value: Any, where: str) -> list:
  """A list."""
  if not isinstance(value, list):
    raise invalid('must be a list', where)
  return value


def part(value: Any, where: str, types: tuple[str, ...]) -> str:
  """The text of a part of one of these types."""
  if not isinstance(value, dict) or value.get('type') not in types:
    names = ' or '.join(map(repr, types))
    raise invalid(f'must be a part of type {names}', where)
  return text(value.get('text'), f'{where}.text')


def arguments(value: Any, where: str) -> dict:
  """The arguments of a call: a JSON object, as a string or as it is."""
  if isinstance(value, str):
    try:
      value = strict_json.loads(value or '{}')
    except strict_json.JsonFault as fault:
      raise invalid(f'must be a JSON object, as a string; {fault}', where) from None
  if not isinstance(value, dict):
    raise invalid('must be a JSON object, as a string', where)
  return value


def call(call_id: Any, name: str, values: dict) -> dict:
  """A checked call as an entry of OpenAI's `tool_calls`; arguments are an object."""
  function = {'name': name, 'arguments': values}
  return {'id': call_id, 'type': 'function', 'function': function}


def stops(value: Any, where: str) -> tuple[str, ...]:
  """Stop strings: null, a string, or a list of strings."""
  values = [value] if isinstance(value, str) else value or []
  for i, stop in enumerate(listed(values, where)):
    if not isinstance(stop, str) or not 0 < len(stop) <= _MAX_STOP_CHARACTERS:
      raise invalid(
        f'must be a string of 1 to {_MAX_STOP_CHARACTERS} characters', f'{where}[{i}]'
      )
  if len(values) > _MAX_STOPS:
    raise invalid(f'must have at most {_MAX_STOPS} strings', where)
  return tuple(values)


def schema(value: Any, where: str) -> None:
  """Checks what the tool-call parser uses of an object schema."""
  if not isinstance(value, dict):
    raise invalid('must be a JSON schema object', where)
  if value.get('type', 'object') != 'object':
    raise invalid("must have type 'object'", f'{where}.type')
  properties = mapping(value.get('properties', {}), f'{where}.properties')
  for name, property_ in properties.items():
    if not isinstance(property_, dict | bool):
      raise invalid('must be a JSON schema', f'{where}.properties.{name}')


def tool_name(value: Any, where: str, known: set[str], longest: int = 64) -> str:
  """The name of a tool, which is added to the `known` ones."""
  if not isinstance(value, str) or not re.fullmatch(
    rf'[A-Za-z0-9_.-]{{1,{longest}}}', value
  ):
    raise invalid(
      f'must be 1 to {longest} letters, digits, underscores, dots or dashes', where
    )
  if value in known:
    raise invalid(f'{value!r} is defined twice', where)
  known.add(value)
  return value


def refuse(data: dict, names: Iterable[str]) -> None:
  """Refuses fields that would change the meaning of the request if ignored."""
  for name in names:
    if data.get(name) not in _EMPTY:
      raise unsupported('is not supported; omit it', name)


def ignored(
  data: dict, known: frozenset[str], no_effect: Iterable[str]
) -> tuple[str, ...]:
  """The fields that are accepted without effect, to be counted.

  They are those of `no_effect` that are not null, and 'unknown' if there are some that
  the dialect does not have: their names are the client's.
  """
  found = tuple(name for name in no_effect if data.get(name) is not None)
  return found if data.keys() <= known else (*found, 'unknown')


def ignored_in(value: dict, used: Iterable[str], label: str) -> tuple[str, ...]:
  """(label,) if an object has a field besides the used ones that asks for something."""
  others = value.keys() - set(used)
  return (label,) if any(value[name] not in (None, False) for name in others) else ()
