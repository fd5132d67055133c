"""Validates OpenAI chat-completions requests and converts them to plain records.

Source: the traffic of real agents (facts/pipelines.md §2). Validation is by hand rather
than by pydantic models: it runs once per completion, on a CPU that the engine needs.

Treatment of each field:
- used: model, messages, tools, max_completion_tokens (or max_tokens), stream,
  stream_options.include_usage, logprobs and top_logprobs (not with stream), tool_choice
  'auto' and 'none' ('none' omits the tools from the prompt);
- sampling (temperature, top_p, top_k, seed, frequency_penalty, presence_penalty,
  repetition_penalty, min_p, logit_bias): overridden and counted in a training session
  (law 4; a seed would make the samples of a group identical), and honoured in an
  evaluation session;
- rejected, because ignoring them would change the meaning: n other than 1, stop,
  response_format other than text, functions, function_call, audio, image or other
  non-text content;
- accepted as 'auto' and counted: tool_choice 'required' or a named function (the engine
  does not constrain its output);
- ignored: all others, because real agents send many additional fields.

All fields, including ignored ones, must be JSON that `strict_json` accepts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from m2jax.gateway import history as history_lib
from m2jax.gateway import sampling
from m2jax.gateway.errors import ApiError, invalid
from m2jax.gateway.fields import flag, integer
from m2jax.text import strict_json

# Created once: json.dumps with options creates an encoder on every call.
dumps = json.JSONEncoder(ensure_ascii=False).encode

ROLES = ('system', 'user', 'assistant', 'tool')
_NAME = re.compile(r'[A-Za-z0-9_.-]{1,64}')

# Minimum bytes that the template renders per message, call, argument or tool.
_PART_BYTES = len('<tool></tool>')
_UNSUPPORTED = ('stop', 'functions', 'function_call', 'audio')
MAX_TOP_LOGPROBS = 20  # OpenAI's


@dataclasses.dataclass(frozen=True)
class ChatRequest:
  """A checked request, without the text of its messages.

  Attributes:
    model: the requested model.
    history: digests of its messages.
    tools: OpenAI tool dicts, or None if there are none.
    tools_digest: equal iff the prompt's tools are; b'' without tools.
    max_tokens: requested response limit, or None.
    sampling: the sampling fields that are present and not null, as sent.
    stream, include_usage, logprobs, top_logprobs: as OpenAI defines them.
    ignored: names of fields accepted without effect that are worth counting.
  """

  model: str
  history: history_lib.History
  tools: list[dict] | None
  tools_digest: bytes
  max_tokens: int | None
  sampling: dict[str, Any]
  stream: bool
  include_usage: bool
  logprobs: bool
  top_logprobs: int = 0
  ignored: tuple[str, ...] = ()


def parse_request(body: bytes | bytearray | str) -> tuple[ChatRequest, list[dict]]:
  """Checks a request body.

  Returns:
    The request, and its messages: OpenAI dicts as for `text.chat`, with 'developer'
    replaced by 'system' and the arguments of calls as objects.

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
  return _checked(data)


def _checked(data: dict) -> tuple[ChatRequest, list[dict]]:
  model = data.get('model')
  if not isinstance(model, str):
    raise invalid('must be a string', 'model')
  for field in _UNSUPPORTED:
    if data.get(field) not in (None, [], '', {}, 0, False):
      raise invalid('is not supported; omit it', field, 'unsupported_parameter')
  if data.get('n') not in (None, 1):
    raise invalid('must be 1; send n requests instead', 'n', 'unsupported_parameter')
  response_format = data.get('response_format')
  if response_format is not None and response_format != {'type': 'text'}:
    raise invalid(
      "must be {'type': 'text'}: output is not constrained",
      'response_format',
      'unsupported_parameter',
    )
  stream = flag(data, 'stream')
  stream_options = data.get('stream_options') or {}
  if not isinstance(stream_options, dict):
    raise invalid('must be an object', 'stream_options')
  logprobs = flag(data, 'logprobs')
  if logprobs and stream:
    raise invalid('is not supported with stream', 'logprobs', 'unsupported_parameter')
  tools = _tools(data.get('tools'))
  tools, ignored = _tool_choice(data.get('tool_choice'), tools)
  messages = _messages(data.get('messages'))
  request = ChatRequest(
    model=model,
    history=history_lib.of(messages),
    tools=tools,
    tools_digest=history_lib.digest(dumps(tools).encode()) if tools else b'',
    max_tokens=_max_tokens(data),
    sampling=sampling.read(data),
    stream=stream,
    include_usage=stream and flag(stream_options, 'include_usage'),
    logprobs=logprobs,
    top_logprobs=_top_logprobs(data, logprobs),
    ignored=ignored,
  )
  return request, messages


def _top_logprobs(data: dict, logprobs: bool) -> int:
  count = integer(data, 'top_logprobs') or 0
  if not 0 <= count <= MAX_TOP_LOGPROBS:
    raise invalid(f'must be between 0 and {MAX_TOP_LOGPROBS}', 'top_logprobs')
  if count and not logprobs:
    raise invalid('needs logprobs: true', 'top_logprobs')
  return count


def check_count(
  messages: list[dict],
  request: ChatRequest,
  context_tokens: int,
  longest_token_bytes: int,
) -> None:
  """Rejects more messages, calls, arguments and tools than fit into the context.

  The template renders at least _PART_BYTES for each, so that no text is inspected.

  Raises:
    ApiError: 400.
  """
  parts = len(messages) + len(request.tools or ())
  for message in messages:
    content = message['content']
    parts += len(content) if isinstance(content, list) else 0
    for call in message.get('tool_calls', ()):
      parts += 1 + len(call['function']['arguments'])
  if parts * _PART_BYTES > context_tokens * longest_token_bytes:
    raise too_long(
      f'the request has {parts} messages, tools, calls and arguments', context_tokens
    )


def too_long(what: str, context_tokens: int) -> ApiError:
  """The error of a prompt that cannot fit into the context."""
  return invalid(
    f'{what}; the context holds {context_tokens} tokens: shorten the messages',
    'messages',
    'context_length_exceeded',
  )


def _max_tokens(data: dict) -> int | None:
  for field in ('max_completion_tokens', 'max_tokens'):
    value = integer(data, field)
    if value is not None:
      if value < 1:
        raise invalid('must be at least 1', field)
      return value
  return None


def _text(value: Any, where: str) -> str:
  if not isinstance(value, str):
    raise invalid('must be a string', where)
  return value


def _content(value: Any, where: str, *, keep_parts: bool) -> str | list[dict]:
  """A message's text; or its parts, which the template renders for tool messages."""
  if value is None:
    return ''
  if isinstance(value, str):
    return _text(value, where)
  if not isinstance(value, list):
    raise invalid('must be a string or a list of text parts', where)
  texts = []
  for i, part in enumerate(value):
    if not isinstance(part, dict) or part.get('type') != 'text':
      raise invalid("must be a part of type 'text'", f'{where}[{i}]')
    texts.append(_text(part.get('text'), f'{where}[{i}].text'))
  if keep_parts:
    return [{'type': 'text', 'text': text} for text in texts]
  return ''.join(texts)


def _messages(value: Any) -> list[dict]:
  if not isinstance(value, list) or not value:
    raise invalid('must be a non-empty list', 'messages')
  return [_message(message, f'messages[{i}]') for i, message in enumerate(value)]


def _message(message: Any, where: str) -> dict:
  if not isinstance(message, dict):
    raise invalid('must be an object', where)
  role = message.get('role')
  if role == 'developer':
    role = 'system'
  if role not in ROLES:
    raise invalid(
      f'unknown role {role!r}; use one of {", ".join(ROLES)}', f'{where}.role'
    )
  content = message.get('content')
  if content is None and role != 'assistant':
    raise invalid(f'is required in a {role} message', f'{where}.content')
  checked: dict[str, Any] = {
    'role': role,
    'content': _content(content, f'{where}.content', keep_parts=role == 'tool'),
  }
  if role == 'assistant':
    reasoning = message.get('reasoning_content')
    if reasoning is not None:
      checked['reasoning_content'] = _text(reasoning, f'{where}.reasoning_content')
    calls = message.get('tool_calls')
    if calls:
      checked['tool_calls'] = _tool_calls(calls, f'{where}.tool_calls')
  elif role == 'tool' and message.get('tool_call_id') is not None:
    checked['tool_call_id'] = _text(message['tool_call_id'], f'{where}.tool_call_id')
  return checked


def _tool_calls(calls: Any, where: str) -> list[dict]:
  if not isinstance(calls, list):
    raise invalid('must be a list', where)
  checked = []
  for i, call in enumerate(calls):
    function = call.get('function') if isinstance(call, dict) else None
    if not isinstance(function, dict):
      raise invalid('must be an object', f'{where}[{i}].function')
    name = _text(function.get('name'), f'{where}[{i}].function.name')
    arguments = function.get('arguments') or '{}'
    if isinstance(arguments, str):
      try:
        arguments = strict_json.loads(arguments)
      except strict_json.JsonFault as fault:
        raise invalid(
          f'must be a JSON object, as a string; {fault}',
          f'{where}[{i}].function.arguments',
        ) from None
    if not isinstance(arguments, dict):
      raise invalid(
        'must be a JSON object, as a string', f'{where}[{i}].function.arguments'
      )
    checked.append(
      {
        'id': call.get('id'),
        'type': 'function',
        'function': {'name': name, 'arguments': arguments},
      }
    )
  return checked


def _tools(value: Any) -> list[dict] | None:
  if value is None or value == []:
    return None
  if not isinstance(value, list):
    raise invalid('must be a list', 'tools')
  names = set()
  for i, tool in enumerate(value):
    where = f'tools[{i}]'
    if not isinstance(tool, dict) or tool.get('type') != 'function':
      raise invalid("must be an object of type 'function'", where)
    function = tool.get('function')
    if not isinstance(function, dict):
      raise invalid('must be an object', f'{where}.function')
    name = function.get('name')
    if not isinstance(name, str) or not _NAME.fullmatch(name):
      raise invalid(
        'must be 1 to 64 letters, digits, underscores, dots or dashes',
        f'{where}.function.name',
      )
    if name in names:
      raise invalid(f'{name!r} is defined twice', f'{where}.function.name')
    names.add(name)
    parameters = function.get('parameters')
    if parameters is not None:
      _schema(parameters, f'{where}.function.parameters')
  return value


def _schema(schema: Any, where: str):
  """Checks what the tool-call parser uses of an object schema."""
  if not isinstance(schema, dict):
    raise invalid('must be a JSON schema object', where)
  if schema.get('type', 'object') != 'object':
    raise invalid("must have type 'object'", f'{where}.type')
  properties = schema.get('properties', {})
  if not isinstance(properties, dict):
    raise invalid('must be an object', f'{where}.properties')
  for name, value in properties.items():
    if not isinstance(value, dict | bool):
      raise invalid('must be a JSON schema', f'{where}.properties.{name}')


def _tool_choice(
  choice: Any, tools: list[dict] | None
) -> tuple[list[dict] | None, tuple[str, ...]]:
  if choice is None or choice == 'auto':
    return tools, ()
  if choice == 'none':
    return None, ()
  if tools is None:
    raise invalid('needs tools', 'tool_choice')
  if choice == 'required':
    return tools, ('tool_choice',)
  function = choice.get('function') if isinstance(choice, dict) else None
  if isinstance(function, dict):
    if function.get('name') in [tool['function']['name'] for tool in tools]:
      return tools, ('tool_choice',)
  raise invalid(
    "must be 'auto', 'none', 'required' or name one of the tools", 'tool_choice'
  )
