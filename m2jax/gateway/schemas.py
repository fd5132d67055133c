"""JSON schemas, for the OpenAPI document (`openapi`).

Clients and the tests' requests are generated from them: each has one type, perhaps with
null, and an enum is one of strings.
"""

from __future__ import annotations

from typing import Any

TEXT = {'type': 'string'}
FLAG = {'type': 'boolean'}
INTEGER = {'type': 'integer'}
NULL = {'type': 'null'}
ANY_OBJECT = {'type': 'object'}


def object_(required: str, **properties: Any) -> dict[str, Any]:
  """An object; `required` are names, separated by spaces."""
  return {'type': 'object', 'properties': properties, 'required': required.split()}


def list_(items: Any, least: int = 0, most: int = 8) -> dict[str, Any]:
  return {'type': 'array', 'items': items, 'minItems': least, 'maxItems': most}


def constant(*values: str) -> dict[str, Any]:
  return {'type': 'string', 'enum': list(values)}


def any_(*schemas: dict[str, Any]) -> dict[str, Any]:
  return {'anyOf': list(schemas)}


def number(low: float, high: float) -> dict[str, Any]:
  return {'type': 'number', 'minimum': low, 'maximum': high}


_SCALAR = any_({'type': ['string', 'null']}, FLAG, number(-(2**63), 2**63 - 1))


def input_(required: str, **properties: Any) -> dict[str, Any]:
  """An object of a request. Its other fields are ignored, but must be JSON that
  `strict_json` accepts: integers of at most 64 bits, for example."""
  return object_(required, **properties) | {'additionalProperties': _SCALAR}


def message(kind: str, *roles: str, **more: Any) -> dict[str, Any]:
  """A message with a text, or parts of a kind. The document names the roles that need
  no other message before them."""
  part = input_('type text', type=constant(kind), text=TEXT)
  content = any_(TEXT, list_(part, 1))
  return input_('role content', role=constant(*roles), content=content, **more)


TOOL_NAME = {'type': 'string', 'pattern': '^[A-Za-z0-9_.-]{1,64}$'}
TOOL_SCHEMA = input_(
  '',
  type=constant('object'),
  properties={'type': 'object', 'additionalProperties': input_('')},
)
