"""The OpenAPI document of the gateway: GET /openapi.json.

The schemas name the fields that are used or rejected; each dialect's module says what
happens to the others. They are what the tests generate requests from (schemathesis),
and what clients are generated from: each operation has an id, each schema one type,
perhaps with null.
"""

from __future__ import annotations

from typing import Any

from m2jax.gateway import protocol

_TEXT = {'type': 'string'}
_COUNT = {'type': 'integer', 'minimum': 1, 'maximum': 2**31 - 1}
_FLAG = {'type': 'boolean'}
_ANY_OBJECT = {'type': 'object'}


def _object(required: str, **properties: Any) -> dict[str, Any]:
  """An object schema; `required` are names, separated by spaces."""
  return {'type': 'object', 'properties': properties, 'required': required.split()}


def _list(items: Any, least: int = 0) -> dict[str, Any]:
  return {'type': 'array', 'items': items, 'minItems': least, 'maxItems': 8}


def _constant(*values: str) -> dict[str, Any]:
  return {'type': 'string', 'enum': list(values)}


def _any(*schemas: dict[str, Any]) -> dict[str, Any]:
  return {'anyOf': list(schemas)}


def _number(low: float, high: float) -> dict[str, Any]:
  return {'type': 'number', 'minimum': low, 'maximum': high}


_NULL = {'type': 'null'}
_SCALAR = _any({'type': ['string', 'null']}, _FLAG, _number(-(2**63), 2**63 - 1))


def _input(required: str, **properties: Any) -> dict[str, Any]:
  """An object of a request. Its other fields are ignored, but must be JSON that
  `strict_json` accepts: integers of at most 64 bits, for example."""
  return _object(required, **properties) | {'additionalProperties': _SCALAR}


def _part(*types: str) -> dict[str, Any]:
  return _input('type text', type=_constant(*types), text=_TEXT)


_NAME = {'type': 'string', 'pattern': '^[A-Za-z0-9_.-]{1,64}$'}
_SCHEMA = _input(
  '',
  type=_constant('object'),
  properties={'type': 'object', 'additionalProperties': _input('')},
)
_SAMPLING = {'temperature': _number(0, 2), 'top_p': _number(0.01, 1)}
_STOPS = _list({'type': 'string', 'minLength': 1, 'maxLength': 64})


def _chat(model: str) -> dict[str, Any]:
  content = _any(_TEXT, _list(_part('text'), 1))
  roles = _constant('user', 'system', 'developer')
  message = _input('role content', role=roles, content=content)
  tool = _input(
    'type function',
    type=_constant('function'),
    function=_input('name', name=_NAME, description=_TEXT, parameters=_SCHEMA),
  )
  return _input(
    'model messages',
    model=_constant(model),
    messages=_list(message, 1),
    tools=_list(tool),
    tool_choice=_constant('auto', 'none'),
    max_tokens=_COUNT,
    max_completion_tokens=_COUNT,
    n={'type': 'integer', 'minimum': 1, 'maximum': 4},
    stop=_STOPS,
    stream=_FLAG,
    stream_options=_input('', include_usage=_FLAG),
    logprobs=_FLAG,
    response_format=_input('type', type=_constant('text')),
    context_edit=_any(_constant(*protocol.CONTEXT_EDITS), _NULL),
    **_SAMPLING,
  )


def _anthropic(model: str, required: str) -> dict[str, Any]:
  # Also tool results, which need calls of the assistant before them.
  blocks = _list(_part('text'), 1)
  content = _any(_TEXT, blocks)
  message = _input('role content', role=_constant('user', 'system'), content=content)
  tool = _input(
    'name input_schema', name=_NAME, description=_TEXT, input_schema=_SCHEMA
  )
  return _input(
    required,
    model=_constant(model),
    max_tokens=_COUNT,
    system=_any(_TEXT, _list(_part('text'), 1)),
    messages=_list(message, 1),
    tools=_list(tool),
    tool_choice=_input('type', type=_constant('auto', 'none')),
    stop_sequences=_STOPS,
    stream=_FLAG,
    **_SAMPLING,
  )


def _responses(model: str) -> dict[str, Any]:
  parts = _list(_part('input_text'), 1)
  message = _input(
    'role content',
    type=_constant('message'),
    role=_constant('user', 'system', 'developer'),
    content=_any(_TEXT, parts),
  )
  function = _input(
    'type name', type=_constant('function'), name=_NAME, parameters=_SCHEMA
  )
  custom = _input('type name', type=_constant('custom'), name=_NAME, description=_TEXT)
  return _input(
    'model input',
    model=_constant(model),
    input=_any(_TEXT, _list(message, 1)),
    instructions=_TEXT,
    tools=_list(_any(function, custom)),
    tool_choice=_constant('auto', 'none'),
    max_output_tokens=_COUNT,
    store={'type': 'boolean', 'const': False},
    stream=_FLAG,
    **_SAMPLING,
  )


def _tokenize(model: str) -> dict[str, Any]:
  chat = _chat(model)['properties']
  messages = _input(
    'model messages', model=chat['model'], messages=chat['messages'],
    tools=chat['tools'], return_token_strs=_FLAG,
  )  # fmt: skip
  text = _input(
    'model prompt', model=chat['model'], prompt=_TEXT, return_token_strs=_FLAG
  )
  return _any(messages, text)


_EVENT = _object('data', event=_TEXT, data=_TEXT)
_OPENAI_ERROR = _object(
  'error', error=_object('message type', message=_TEXT, type=_TEXT)
)
_ANTHROPIC_ERROR = _object(
  'type error', type=_constant('error'),
  error=_object('type message', type=_TEXT, message=_TEXT),
)  # fmt: skip
_USAGE = {
  'type': 'object',
  'additionalProperties': _any({'type': 'integer'}, _ANY_OBJECT),
}
_COMPLETION = _object(
  'id object created model choices usage',
  id=_TEXT,
  object=_constant('chat.completion'),
  created={'type': 'integer'},
  model=_TEXT,
  choices=_list(
    _object(
      'index message finish_reason',
      index={'type': 'integer'},
      message=_ANY_OBJECT,
      finish_reason=_constant('stop', 'length', 'tool_calls'),
    ),
    1,
  )
  | {'maxItems': 16},
  usage=_USAGE,
)
_MESSAGE = _object(
  'id type role model content stop_reason usage',
  id=_TEXT,
  type=_constant('message'),
  role=_constant('assistant'),
  model=_TEXT,
  content={'type': 'array', 'items': _ANY_OBJECT},
  stop_reason=_constant(
    'end_turn', 'max_tokens', 'stop_sequence', 'tool_use',
    'model_context_window_exceeded',
  ),
  usage=_USAGE,
)  # fmt: skip
_RESPONSE = _object(
  'id object created_at status model output usage',
  id=_TEXT,
  object=_constant('response'),
  created_at={'type': 'integer'},
  status=_constant('completed', 'incomplete', 'failed'),
  model=_TEXT,
  output={'type': 'array', 'items': _ANY_OBJECT},
  usage=_USAGE,
)
_TOKENS = _object(
  'count max_model_len tokens',
  count={'type': 'integer'},
  max_model_len={'type': 'integer'},
  tokens=_any({'type': 'array', 'items': {'type': 'integer'}}, _NULL),
)


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
  post = {
    '/v1/chat/completions': _operation(
      'createChatCompletion', "OpenAI's chat completions", _COMPLETION,
      _OPENAI_ERROR, _chat(model), streams=True,
    ),
    '/v1/responses': _operation(
      'createResponse', "OpenAI's responses", _RESPONSE, _OPENAI_ERROR,
      _responses(model), streams=True,
    ),
    '/v1/messages': _operation(
      'createMessage', "Anthropic's messages", _MESSAGE, _ANTHROPIC_ERROR,
      _anthropic(model, 'model max_tokens messages'), streams=True,
    ),
    '/v1/messages/count_tokens': _operation(
      'countTokens', 'Number of tokens of a prompt',
      _object('input_tokens', input_tokens=_COUNT),
      _ANTHROPIC_ERROR, _anthropic(model, 'model messages'),
    ),
    '/tokenize': _operation(
      'tokenize', 'Token ids of a prompt', _TOKENS, _OPENAI_ERROR, _tokenize(model)
    ),
  }  # fmt: skip
  models = _object('object data', object=_constant('list'), data=_list(_ANY_OBJECT, 1))
  get = {
    '/v1/models': _operation('listModels', 'The model served', models, _OPENAI_ERROR),
    '/health': _operation(
      'health', 'Whether the engine is running', _object('status', status=_TEXT),
      _object('status', status=_TEXT), secured=False,
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
