"""Dialects: the wire formats in which clients talk to the gateway.

Each package turns a JSON body into the one checked request (`protocol`), and answers,
streams and errors into its own form. Sessions, prompts and records know none of them.
"""

from __future__ import annotations

from m2jax.gateway import fields
from m2jax.gateway.dialects import anthropic, openai_chat, responses, tokenize
from m2jax.gateway.dialects.base import Completing, Counting, Dialect
from m2jax.gateway.protocol import Parsed

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
  return DIALECTS[dialect].parse(fields.body(body))
