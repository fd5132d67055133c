"""Converts tool-call parameters to the types of the tool's JSON schema.

Source: facts/m2-and-forge.md §2.2 and facts/clients-and-peers.md §1. The rules:

- a parameter that the schema does not declare is a string (the official guide);
- a schema that names no type, or `any`, accepts every JSON value: a text that is JSON
  is that value, other text a string. A text such as `12` is ambiguous there, because
  the template writes the string and the number alike;
- otherwise the first type that matches is used, in the order integer, number, boolean,
  object, array, string (as in vLLM). If the schema also allows strings, the other types
  match only JSON's own spelling: `yes`, `007` and `1_000` stay strings;
- a string is verbatim. White space around a value of another type is ignored, unless
  the schema also allows strings: then such a text is one;
- only the text `null` becomes None, and only if the schema allows null: a type, enum or
  const of null, `nullable: true`, `default: null`, or a branch of anyOf, oneOf or allOf
  with one of these;
- an integer keeps all of its digits under `integer` and `number`;
- values that a client could not send back (`strict_json`: NaN, lone surrogates,
  integers beyond 64 bits, depth) do not match.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from m2jax.text import strict_json

# An argument is one level below the object of all arguments.
_MAX_DEPTH = strict_json.MAX_DEPTH - 1

ANY = 'any'
_UNDECLARED = frozenset({'string'})
# Each may nest as deep as strict_json allows; all together stay within Python's stack.
_MAX_REFERENCES = 8


def parameter_schemas(
  tools: Sequence[Mapping[str, Any]] | None,
) -> dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]:
  """Tool name → (parameter name → schema, the schema that `$ref`s refer to).

  Args:
    tools: OpenAI tool dicts, with or without their envelope.
  """
  schemas = {}
  for tool in tools or ():
    function = tool.get('function', tool)
    parameters = function.get('parameters')
    if not isinstance(parameters, Mapping):
      continue
    properties = parameters.get('properties')
    if isinstance(properties, Mapping):
      schemas[function.get('name')] = properties, parameters
  return schemas


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


def types(schema: Any, root: Mapping[str, Any] | None = None) -> frozenset[str]:
  """The types that a parameter's schema allows; ANY among them if it names none.

  Args:
    schema: a JSON schema, or None if the tool does not declare the parameter.
    root: the schema that `$ref`s of the form `#/…` refer to.
  """
  if schema is None:
    return _UNDECLARED
  return frozenset(_types(schema, root or {}, set()) or {ANY})


def _types(
  schema: Any, root: Mapping[str, Any], seen: set[str], depth: int = 0
) -> set[str]:
  """`types`, but empty if the schema names none.

  Args:
    seen: the references followed so far, each once.
    depth: number of references around this schema, up to _MAX_REFERENCES.
  """
  if not isinstance(schema, Mapping):
    return set()
  found = set(_declared(schema))
  for key in ('anyOf', 'oneOf', 'allOf'):
    branches = schema.get(key)
    for branch in branches if isinstance(branches, list) else ():
      of_branch = _types(branch, root, seen, depth)
      # A branch of anyOf without a type allows all; one of allOf restricts nothing.
      found |= of_branch or (set() if key == 'allOf' else {ANY})
  reference = schema.get('$ref')
  if isinstance(reference, str) and reference not in seen:
    seen.add(reference)
    target = _target(reference, root) if depth < _MAX_REFERENCES else None
    # What cannot be resolved is assumed to be a structured type.
    found |= {'object'} if target is None else _types(target, root, seen, depth + 1)
  if schema.get('nullable') is True or schema.get('default', 0) is None:
    # Without a declared type, all types remain allowed.
    found |= {'null'} if found else {'null', ANY}
  return found


def _declared(schema: Mapping[str, Any]) -> Iterator[str]:
  """Types that `type`, `enum` and `const` name."""
  declared = schema.get('type')
  for kind in declared if isinstance(declared, list) else [declared]:
    if isinstance(kind, str):
      yield _ALIASES.get(kind.lower(), kind.lower())
  values = schema.get('enum')
  values = list(values) if isinstance(values, list) else []
  for value in [*values, *([schema['const']] if 'const' in schema else ())]:
    yield next((name for kind, name in _PYTHON_TYPES if isinstance(value, kind)), ANY)


def _target(reference: str, root: Mapping[str, Any]) -> Any:
  """The schema that a local reference names, or None."""
  if reference != '#' and not reference.startswith('#/'):
    return None
  target: Any = root
  for part in reference.split('/')[1:]:
    part = part.replace('~1', '/').replace('~0', '~')
    target = target.get(part) if isinstance(target, Mapping) else None
  return target


def typed(text: str, types: frozenset[str]) -> tuple[Any, bool]:
  """A parameter's value by the types of its schema, and whether it matches one."""
  unknown = not types <= _KNOWN  # ANY, or a type that is not JSON Schema's
  strings = unknown or 'string' in types
  if text != (stripped := text.strip()):
    if strings:
      return text, True
    text = stripped
  if text == 'null' and not types.isdisjoint(('null', ANY)):
    return None, True
  readers = _STRICT if strings else _READERS
  for kind, read in readers.items():
    if kind in types:
      try:
        return read(text), True
      except (ValueError, KeyError):
        continue
  if 'string' in types:
    return text, True
  try:
    value = _json(text)
  except ValueError:
    return text, unknown
  # A value of another type is delivered; null only where the schema allows it.
  return (text if value is None else value), unknown


_INTEGER = re.compile(r'[+-]?[0-9]+')
_FLOAT = re.compile(r'[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?')
# Integers of more characters are beyond 64 bits; int() takes quadratic time.
_MAX_INTEGER_CHARS = 64


def _integer(text: str) -> int:
  if not _INTEGER.fullmatch(text) or len(text) > _MAX_INTEGER_CHARS:
    raise ValueError(text)
  value = int(text)
  if not strict_json.is_int64(value):
    raise ValueError('beyond 64 bits')
  return value


def _number(text: str) -> int | float:
  """A number; integral ones as int, with all digits."""
  digits, point, zeros = text.partition('.')
  if not point or not zeros.strip('0'):
    if _INTEGER.fullmatch(digits):
      return _integer(digits)
  if not _FLOAT.fullmatch(text):
    raise ValueError(text)
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(text)
  return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _json(text: str, *kinds: type) -> Any:
  value = strict_json.loads(text, _MAX_DEPTH)
  if kinds and type(value) not in kinds:
    raise ValueError(f'not of {kinds}')
  return value


def _container(kind: type):
  return lambda text: _json(text, kind)


_READERS = {
  'integer': _integer,
  'number': _number,
  'boolean': lambda text: _BOOLEANS[text.lower()],
  'object': _container(dict),
  'array': _container(list),
}
# Where a string is allowed too.
_STRICT = _READERS | {
  'integer': _container(int),
  'number': lambda text: _json(text, int, float),
  'boolean': _container(bool),
}
_KNOWN = frozenset({*_READERS, 'string', 'null'})
