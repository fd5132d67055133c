"""The fields of a request: a `Body` declares them; errors name the field."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from m2jax.gateway import schemas
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


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of an object of a request.

  Attributes:
    schema: schema of the values that the OpenAPI document promises to serve; None: it
      does not name the field.
    read: a value that is not null, and its path → the checked value. Raises ApiError.
    default: value of a field that is absent or null.
    required: whether it must be there.
  """

  schema: dict[str, Any] | None = None
  read: Callable[[Any, str], Any] = lambda value, where: value
  default: Any = None
  required: bool = False


class Body(dict[str, Field]):
  """The fields of an object by name: what is checked, ignored and documented."""

  def __init__(self, *args, refused: str = '', no_effect: str = '', **fields: Field):
    """`refused` and `no_effect` are names, separated by spaces: of fields that would
    change the meaning of the request if ignored, and of those that are counted."""
    super().__init__(*args, **fields, **dict.fromkeys(refused.split(), _REFUSED))
    self.update(dict.fromkeys(no_effect.split(), _NO_EFFECT))

  def read(self, data: dict, where: str = '') -> dict[str, Any]:
    """The checked value of each field; `where` is the path of the object.

    Raises:
      ApiError: 400, names the field.
    """
    found = {}
    for name, field in self.items():
      if (value := data.get(name)) is not None:
        found[name] = field.read(value, where + name)
      elif field.required:
        raise invalid('is required', where + name)
      else:
        found[name] = field.default
    return found

  def ignored(self, data: dict) -> tuple[str, ...]:
    """The fields that are accepted without effect, to be counted.

    They are those of `no_effect` that are not null, and 'unknown' if there are some
    that the dialect does not have: their names are the client's.
    """
    names = (name for name, field in self.items() if field is _NO_EFFECT)
    found = tuple(name for name in names if data.get(name) is not None)
    return found if data.keys() <= self.keys() else (*found, 'unknown')

  def schema(self, model: dict = schemas.TEXT) -> dict[str, Any]:
    """The schema of the object, and in it that of the model's name."""
    shown = {name: field.schema for name, field in self.items() if field.schema}
    if 'model' in shown:
      shown['model'] = model
    required = (name for name, field in self.items() if field.required)
    return schemas.input_(' '.join(required), **shown)


def nested(body: Body) -> Field:
  """An object with declared fields."""

  def read(value: Any, where: str) -> dict[str, Any]:
    return body.read(options(value, where), f'{where}.')

  return Field(body.schema(), read, body.read({}))


def integer(low: int, high: int = 2**64, advice: str = '') -> Field:
  """An integer in a range. In JSON, 5.0 is the integer 5."""

  def read(value: Any, where: str) -> int:
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
      raise invalid('must be an integer', where)
    if value < low:
      raise invalid(f'must be at least {low}', where)
    if value > high:
      raise invalid(f'must be at most {high}{advice}', where)
    return value

  bounds = {'minimum': max(low, -(2**31)), 'maximum': min(high, 2**31 - 1)}
  return Field(schemas.INTEGER | bounds, read)


def number(low: float, high: float, *, least: float | None = None) -> Field:
  """A number in a range; `low` is not in it if the document has another `least`."""

  def read(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise invalid('must be a number', where)
    if not low <= value <= high or (least and value == low):
      raise invalid(f'must be between {low} and {high}, not {value}', where)
    return value

  return Field(schemas.number(least or low, high), read)


def _flag(value: Any, where: str) -> bool:
  if not isinstance(value, bool):
    raise invalid('must be true or false', where)
  return value


def _refuse(value: Any, where: str) -> None:
  if value not in _EMPTY:
    raise unsupported('is not supported; omit it', where)


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


def options(value: Any, where: str) -> dict:
  """An object; what is empty or false is an empty one."""
  return mapping(value or {}, where)


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


def ignored_in(value: dict, used: Iterable[str], label: str) -> tuple[str, ...]:
  """(label,) if an object has a field besides the used ones that asks for something."""
  others = value.keys() - set(used)
  return (label,) if any(value[name] not in (None, False) for name in others) else ()


TEXT = Field(schemas.TEXT, text)
REQUIRED_TEXT = dataclasses.replace(TEXT, required=True)
FLAG = Field(schemas.FLAG, _flag, False)
STOPS = Field(
  schemas.list_({'type': 'string', 'minLength': 1, 'maxLength': 64}), stops, ()
)
_REFUSED, _NO_EFFECT = Field(None, _refuse), Field()
