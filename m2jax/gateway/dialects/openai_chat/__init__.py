"""OpenAI's chat completions."""

from m2jax.gateway.dialects.base import Completing
from m2jax.gateway.dialects.openai_chat import answer, request
from m2jax.gateway.errors import ApiError

DIALECT = Completing(
  name='openai_chat',
  path='/v1/chat/completions',
  schema=request.BODY.schema,
  parse=request.parse,
  body=answer.body,
  stream=answer.Stream,
  error=ApiError.body,
)
