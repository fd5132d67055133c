"""The OpenAPI document of the gateway: GET /openapi.json.

Each dialect declares the fields of its requests (`fields.Body`), which are checked and
documented by the same declaration. Each operation has an id.
"""

from __future__ import annotations

from typing import Any

from m2jax.gateway.dialects import DIALECTS, Completing
from m2jax.gateway.schemas import (
  ANY_OBJECT,
  INTEGER,
  NULL,
  TEXT,
  any_,
  constant,
  list_,
  object_,
)

_EVENT = object_('data', event=TEXT, data=TEXT)
_ERROR = object_('message type', message=TEXT, type=TEXT)
_OPENAI_ERROR = object_('error', error=_ERROR)
_ANTHROPIC_ERROR = object_('type error', type=constant('error'), error=_ERROR)
_USAGE = {'type': 'object', 'additionalProperties': any_(INTEGER, ANY_OBJECT)}
_COMPLETION = object_(
  'id object created model choices usage',
  id=TEXT,
  object=constant('chat.completion'),
  created=INTEGER,
  model=TEXT,
  choices=list_(
    object_(
      'index message finish_reason',
      index=INTEGER,
      message=ANY_OBJECT,
      finish_reason=constant('stop', 'length', 'tool_calls'),
    ),
    1,
    16,
  ),
  usage=_USAGE,
)
_MESSAGE = object_(
  'id type role model content stop_reason usage',
  id=TEXT,
  type=constant('message'),
  role=constant('assistant'),
  model=TEXT,
  content={'type': 'array', 'items': ANY_OBJECT},
  stop_reason=constant(
    'end_turn', 'max_tokens', 'stop_sequence', 'tool_use',
    'model_context_window_exceeded',
  ),
  usage=_USAGE,
)  # fmt: skip
_RESPONSE = object_(
  'id object created_at status model output usage',
  id=TEXT,
  object=constant('response'),
  created_at=INTEGER,
  status=constant('completed', 'incomplete', 'failed'),
  model=TEXT,
  output={'type': 'array', 'items': ANY_OBJECT},
  usage=_USAGE,
)
_TOKENS = object_(
  'count max_model_len tokens',
  count=INTEGER,
  max_model_len=INTEGER,
  tokens=any_({'type': 'array', 'items': INTEGER}, NULL),
)

# By dialect: the operation, what it does, its response and an error.
_ANSWERS = {
  'openai_chat': (
    'createChatCompletion', "OpenAI's chat completions", _COMPLETION, _OPENAI_ERROR
  ),
  'responses': ('createResponse', "OpenAI's responses", _RESPONSE, _OPENAI_ERROR),
  'anthropic': ('createMessage', "Anthropic's messages", _MESSAGE, _ANTHROPIC_ERROR),
  'anthropic_count': (
    'countTokens', 'Number of tokens of a prompt',
    object_('input_tokens', input_tokens=INTEGER), _ANTHROPIC_ERROR,
  ),
  'tokenize': ('tokenize', 'Token ids of a prompt', _TOKENS, _OPENAI_ERROR),
}  # fmt: skip


def _content(kind: str, schema: dict) -> dict[str, Any]:
  return {'content': {kind: {'schema': schema}}}


def _operation(
  name: str, summary: str, response: dict, error: dict, request: dict | None = None,
  *, streams: bool = False, secured: bool = True,
) -> dict[str, Any]:  # fmt: skip
  ok = _content('application/json', response)
  if streams:
    ok['content'] |= _content('text/event-stream', _EVENT)['content']
  statuses = {}
  if secured:
    statuses = {400: 'the request is invalid', 401: 'no such key'}
  if request:
    statuses |= {404: 'no such model', 413: 'too large', 429: 'too busy'}
  statuses |= {500: 'internal error', 503: 'the engine is not available'}
  failed = _content('application/json', error)
  operation: dict[str, Any] = {
    'operationId': name,
    'summary': summary,
    'responses': {'200': {'description': 'the answer', **ok}}
    | {str(k): {'description': text, **failed} for k, text in statuses.items()},
  }
  if request:
    operation['requestBody'] = {
      'required': True, **_content('application/json', request)
    }  # fmt: skip
  if secured:
    operation['security'] = [{'bearer': []}, {'x_api_key': []}]
  return operation


def document(model: str) -> dict[str, Any]:
  """The document of a gateway that serves a model of this name."""
  name = constant(model)
  post = {
    each.path: _operation(
      *_ANSWERS[each.name], each.schema(name), streams=isinstance(each, Completing)
    )
    for each in DIALECTS.values()
  }
  models = object_('object data', object=constant('list'), data=list_(ANY_OBJECT, 1))
  get = {
    '/v1/models': _operation('listModels', 'The model served', models, _OPENAI_ERROR),
    '/health': _operation(
      'health', 'Whether the engine is running', object_('status', status=TEXT),
      object_('status', status=TEXT), secured=False,
    ),
  }  # fmt: skip
  return {
    'openapi': '3.1.0',
    'info': {'title': 'm2jax gateway', 'version': '1'},
    'paths': {path: {'post': each} for path, each in post.items()}
    | {path: {'get': each} for path, each in get.items()},
    'components': {
      'securitySchemes': {
        'bearer': {'type': 'http', 'scheme': 'bearer'},
        'x_api_key': {'type': 'apiKey', 'in': 'header', 'name': 'x-api-key'},
      }
    },
  }
