"""Anthropic's messages."""

from m2jax.gateway.dialects.anthropic import answer, request
from m2jax.gateway.dialects.base import Completing, Counting

DIALECT = Completing(
  name='anthropic',
  path='/v1/messages',
  schema=request.BODY.schema,
  parse=request.parse,
  body=answer.body,
  stream=answer.Stream,
  error=answer.error,
)

# The same body, without max_tokens.
COUNT = Counting(
  name='anthropic_count',
  path='/v1/messages/count_tokens',
  schema=request.COUNT.schema,
  parse=lambda data: request.parse(data, request.COUNT),
  body=lambda request, ids, context_tokens, tokenizer: {'input_tokens': len(ids)},
  error=answer.error,
)
