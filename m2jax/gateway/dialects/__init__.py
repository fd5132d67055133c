"""Dialects: the wire formats in which clients talk to the gateway.

Each package turns a JSON body into the one checked request (`protocol`), and answers,
streams and errors into its own form. Sessions, prompts and records know none of them.
"""

from __future__ import annotations

from m2jax.gateway.dialects import anthropic, openai_chat, responses, tokenize
from m2jax.gateway.dialects.base import Completing, Counting, Dialect
from m2jax.gateway.errors import invalid
from m2jax.gateway.protocol import Parsed
from m2jax.text import strict_json

__all__ = ('DIALECTS', 'Completing', 'Counting', 'Dialect', 'parse')

DIALECTS: dict[str, Dialect] = {
  dialect.name: dialect
  for dialect in (
    openai_chat.DIALECT,
    anthropic.DIALECT,
    anthropic.COUNT,
    responses.DIALECT,
    tokenize.DIALECT,
  )
}


def parse(body: bytes | bytearray | str, dialect: str) -> Parsed:
  """Checks a request body.

  Raises:
    ApiError: 400, which names the invalid field.
  """
  try:
    data = strict_json.loads(body)
  except strict_json.JsonFault as fault:
    code = None if fault.path else 'invalid_json'
    message = fault.reason if fault.path else f'the body: {fault.reason}'
    raise invalid(message, fault.path or None, code) from None
  if not isinstance(data, dict):
    raise invalid('the body must be a JSON object', None, 'invalid_json')
  return DIALECTS[dialect].parse(data)
