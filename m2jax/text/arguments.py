"""Converts tool-call parameters to the types of the tool's JSON schema, like vLLM.

Source: facts/m2-and-forge.md §2.2. Differences: `null`, `none` and `nil` stay text if
the schema allows strings but not null; values that a client could not send back
(`strict_json`: NaN, lone surrogates, integers beyond 64 bits, depth) do not match.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m2jax.text import strict_json

# An argument is one level below the object of all arguments.
_MAX_DEPTH = strict_json.MAX_DEPTH - 1


def parameter_schemas(
  tools: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Mapping[str, Any]]:
  """Tool name → parameter name → schema, from OpenAI tool dicts."""
  schemas = {}
  for tool in tools or ():
    function = tool.get('function', tool)
    parameters = function.get('parameters')
    properties = parameters.get('properties') if isinstance(parameters, Mapping) else {}
    if isinstance(properties, Mapping):
      schemas[function.get('name')] = properties
  return schemas


_NULLS = ('null', 'none', 'nil')
_BOOLEANS = {
  **dict.fromkeys(('true', '1', 'yes', 'on'), True),
  **dict.fromkeys(('false', '0', 'no', 'off'), False),
}
_ALIASES = {
  'int': 'integer', 'float': 'number', 'bool': 'boolean', 'str': 'string',
  'text': 'string', 'dict': 'object', 'list': 'array',
}  # fmt: skip
_PYTHON_TYPES = (
  (bool, 'boolean'), (int, 'integer'), (float, 'number'), (str, 'string'),
  (type(None), 'null'), (dict, 'object'), (list, 'array'),
)  # fmt: skip


def _types(schema: Any) -> Iterator[str]:
  """Types that a JSON schema allows, from type, enum, anyOf, oneOf and allOf."""
  if not isinstance(schema, Mapping):
    return
  declared = schema.get('type')
  for kind in declared if isinstance(declared, list) else [declared]:
    if isinstance(kind, str):
      yield _ALIASES.get(kind.lower(), kind.lower())
  values = schema.get('enum')
  for value in values if isinstance(values, list) else ():
    yield next((name for kind, name in _PYTHON_TYPES if isinstance(value, kind)), '')
  for key in ('anyOf', 'oneOf', 'allOf'):
    branches = schema.get(key)
    for branch in branches if isinstance(branches, list) else ():
      yield from _types(branch)
  if '$ref' in schema:  # assume that references are to structured types
    yield 'object'


def types(schema: Any) -> frozenset[str]:
  """The types that a parameter's schema allows; 'string' if it names none."""
  return frozenset(_types(schema)) or frozenset({'string'})


def typed(text: str, types: frozenset[str]) -> tuple[Any, bool]:
  """A parameter's value by the types of its schema, and whether it matches one.

  The types are tried in this order: integer, number, boolean, object, array, string;
  then any JSON.
  """
  if text.lower() in _NULLS and ('null' in types or 'string' not in types):
    return None, True
  for kind in ('integer', 'number', 'boolean', 'object', 'array', 'string'):
    if kind not in types:
      continue
    if kind == 'string':
      return text, True
    try:
      return _READERS[kind](text), True
    except (ValueError, KeyError):
      continue
  try:
    return _json(text), types.isdisjoint(_READERS)
  except ValueError:
    return text, False


def _integer(text: str) -> int:
  value = int(text)
  if not strict_json.is_int64(value):
    raise ValueError('beyond 64 bits')
  return value


def _number(text: str) -> int | float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(text)
  return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _json(text: str, kind: type = object) -> Any:
  value = strict_json.loads(text, _MAX_DEPTH)
  if not isinstance(value, kind):
    raise ValueError(f'not a {kind.__name__}')
  return value


_READERS = {
  'integer': _integer,
  'number': _number,
  'boolean': lambda text: _BOOLEANS[text.lower()],
  'object': lambda text: _json(text, dict),
  'array': lambda text: _json(text, list),
}
