"""OpenAI's responses."""

from m2jax.gateway.dialects.base import Completing
from m2jax.gateway.dialects.responses import answer, request

DIALECT = Completing(
  name='responses',
  path='/v1/responses',
  schema=request.BODY.schema,
  parse=request.parse,
  body=answer.body,
  stream=answer.Stream,
  error=answer.error,
  refuse=answer.refuse,
)
