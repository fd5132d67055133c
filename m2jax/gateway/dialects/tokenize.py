"""POST /tokenize, as vLLM has it: the token ids of messages or of a text.

Source: vLLM's API reference. Of messages, the prompt that the engine gets for them; of
a text, its ids, where the text of a special token is that token. A prompt longer than
the context is only counted: its lists would hold the gateway's loop.
"""

from __future__ import annotations

import functools

import numpy as np

from m2jax.gateway import fields, protocol, schemas
from m2jax.gateway.dialects import openai_chat
from m2jax.gateway.dialects.base import Counting
from m2jax.gateway.errors import ApiError, invalid, too_large, unsupported
from m2jax.text.tokenizer import Tokenizer

# A text is encoded on the gateway's loop, which it must not hold for long.
MAX_PROMPT_CHARACTERS = 16 << 10


_COMMON = {'model': fields.REQUIRED_TEXT, 'return_token_strs': fields.FLAG}
_MESSAGES = fields.Body(
  _COMMON, **{name: openai_chat.request.BODY[name] for name in ('messages', 'tools')}
)
_PROMPT = fields.Body(_COMMON, prompt=fields.REQUIRED_TEXT)


def parse(data: dict) -> protocol.Parsed:
  """Checks a body. Raises ApiError: 400 or 413, which names the invalid field."""
  if data.get('prompt') is None:
    if data.get('add_generation_prompt', True) is not True:
      raise unsupported('must be true', 'add_generation_prompt')
    body = _MESSAGES.read(data)
    # Agents also count what ends with calls that they have not yet run.
    request, messages = openai_chat.request.parse(data, complete=False)
  elif data.get('messages') is not None:
    raise invalid('send either messages or prompt', 'prompt')
  else:
    body = _PROMPT.read(data)
    if len(body['prompt']) > MAX_PROMPT_CHARACTERS:
      raise too_large(
        f'prompt: must have at most {MAX_PROMPT_CHARACTERS} characters; messages may '
        'be longer'
      )
    request, messages = protocol.parsed(
      [], None, model=body['model'], max_tokens=None, sampling={}, stream=False
    )
  request.echo.update(prompt=body.get('prompt'), strings=body['return_token_strs'])
  return request, messages


def body(
  request: protocol.ChatRequest,
  ids: np.ndarray,
  context_tokens: int,
  tokenizer: Tokenizer,
) -> dict:
  """The response object."""
  listed = strings = None
  if len(ids) <= context_tokens:
    listed = ids.tolist()
    if request.echo['strings']:
      text = functools.cache(lambda token: tokenizer.decode([token]))
      strings = [text(token) for token in listed]
  return {
    'count': len(ids),
    'max_model_len': context_tokens,
    'tokens': listed,
    'token_strs': strings,
  }


DIALECT = Counting(
  name='tokenize', path='/tokenize', parse=parse, body=body, error=ApiError.body,
  schema=lambda model: schemas.any_(_MESSAGES.schema(model), _PROMPT.schema(model)),
)  # fmt: skip
