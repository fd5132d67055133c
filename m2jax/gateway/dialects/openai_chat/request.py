"""Requests of OpenAI's chat completions.

Source: the traffic of real agents (facts/pipelines.md §2), and OpenAI's API reference.

Treatment of each field:
- used: those of BODY with a type; max_completion_tokens before max_tokens; tool_choice
  'none' omits the tools from the prompt;
- used, and not OpenAI's: context_edit, the name of an edit that the agent made to its
  messages (`protocol.CONTEXT_EDITS`);
- sampling: overridden and counted in a training session (law 4), and honoured in an
  evaluation session;
- response_format, tool_choice 'required' or a named function (`formats`): rejected in a
  training session; with both, the call has no content to be formatted;
- rejected, because ignoring them would change the meaning: `refused`, image or other
  non-text content, tool_choice 'allowed_tools';
- without effect, as the model and its prompt know nothing of the kind, and counted:
  `no_effect`, other stream_options, and fields of a tool besides its name, description
  and parameters;
- ignored and counted as 'unknown': all others, because real agents send many
  additional fields.

All fields, including ignored ones, must be JSON that `strict_json` accepts.
"""

from __future__ import annotations

from typing import Any

from m2jax.gateway import fields, formats, protocol, sampling, schemas
from m2jax.gateway import messages as messages_lib
from m2jax.gateway.errors import invalid, unsupported

ROLES = ('system', 'user', 'assistant', 'tool')
MAX_TOP_LOGPROBS = 20  # OpenAI's
MAX_N = 16


def _context_edit(value: Any, where: str) -> str:
  if value not in protocol.CONTEXT_EDITS:
    raise invalid(f'must be one of {", ".join(protocol.CONTEXT_EDITS)}', where)
  return value


_TOOL = schemas.input_(
  'type function', type=schemas.constant('function'),
  function=schemas.input_(
    'name', name=schemas.TOOL_NAME, description=schemas.TEXT,
    parameters=schemas.TOOL_SCHEMA,
  ),
)  # fmt: skip
_MESSAGE = schemas.message('text', 'user', 'system', 'developer')
BODY = fields.Body(
  model=fields.REQUIRED_TEXT,
  messages=fields.Field(schemas.list_(_MESSAGE, 1), required=True),
  tools=fields.Field(schemas.list_(_TOOL)),
  tool_choice=fields.Field(schemas.constant('auto', 'none')),
  max_tokens=fields.integer(1),
  max_completion_tokens=fields.integer(1),
  stream=fields.FLAG,
  stream_options=fields.nested(fields.Body(include_usage=fields.FLAG)),
  logprobs=fields.FLAG,
  top_logprobs=fields.integer(0, MAX_TOP_LOGPROBS),
  n=fields.integer(1, MAX_N, '; send several requests'),
  stop=fields.STOPS,
  response_format=formats.field('json_schema'),
  context_edit=fields.Field(
    schemas.any_(schemas.constant(*protocol.CONTEXT_EDITS), schemas.NULL), _context_edit
  ),
  **sampling.FIELDS,
  refused='functions function_call audio web_search_options',
  no_effect='metadata modalities moderation parallel_tool_calls prediction '
  'prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort '
  'safety_identifier service_tier store user verbosity',
)


def parse(data: dict, *, complete: bool = True) -> protocol.Parsed:
  """Checks a body. Raises ApiError: 400, which names the invalid field.

  `complete`: see `chat.in_call_order`.
  """
  body, ignored = BODY.read(data), list(BODY.ignored(data))
  if body['top_logprobs'] and not body['logprobs']:
    raise invalid('needs logprobs: true', 'top_logprobs')
  options = data.get('stream_options') or {}
  ignored += fields.ignored_in(options, ('include_usage',), 'stream_options')
  tools = _tools(body['tools'], ignored)
  tools, call = _tool_choice(body['tool_choice'], tools)
  messages, dropped = messages_lib.normalised(body['messages'])
  return protocol.parsed(
    _messages(messages),
    tools,
    complete=complete,
    model=body['model'],
    max_tokens=body['max_completion_tokens'] or body['max_tokens'],
    sampling=sampling.read(body),
    stream=body['stream'],
    include_usage=body['stream'] and body['stream_options']['include_usage'],
    logprobs=body['logprobs'],
    top_logprobs=body['top_logprobs'] or 0,
    n=body['n'] or 1,
    format=call or body['response_format'],
    stop=body['stop'],
    context_edit=body['context_edit'],
    ignored=(*ignored, *dropped),
  )


def _content(value: Any, where: str, *, keep_parts: bool) -> str | list[dict]:
  """A message's text; or its parts, which the template renders for tool messages."""
  if value is None:
    return ''
  if isinstance(value, str):
    return value
  if not isinstance(value, list):
    raise invalid('must be a string or a list of text parts', where)
  texts = [
    fields.part(part, f'{where}[{i}]', ('text',)) for i, part in enumerate(value)
  ]
  if keep_parts:
    return [{'type': 'text', 'text': text} for text in texts]
  return ''.join(texts)


def _messages(value: Any) -> list[dict]:
  if not isinstance(value, list) or not value:
    raise invalid('must be a non-empty list', 'messages')
  return [_message(message, f'messages[{i}]') for i, message in enumerate(value)]


def _message(message: Any, where: str) -> dict:
  role = fields.mapping(message, where).get('role')
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
      checked['reasoning_content'] = fields.text(
        reasoning, f'{where}.reasoning_content'
      )
    calls = message.get('tool_calls')
    if calls:
      checked['tool_calls'] = _tool_calls(calls, f'{where}.tool_calls')
  elif role == 'tool':
    call_id = message.get('tool_call_id')
    checked['tool_call_id'] = fields.name(call_id, f'{where}.tool_call_id')
  return checked


def _tool_calls(calls: Any, where: str) -> list[dict]:
  checked = []
  for i, call in enumerate(fields.listed(calls, where)):
    at = f'{where}[{i}].function'
    function = call.get('function') if isinstance(call, dict) else None
    name = fields.text(fields.mapping(function, at).get('name'), f'{at}.name')
    values = fields.arguments(function.get('arguments') or '{}', f'{at}.arguments')
    call_id = fields.name(call.get('id'), f'{where}[{i}].id')
    checked.append(fields.call(call_id, name, values))
  return checked


def _tools(value: Any, ignored: list[str]) -> list[dict] | None:
  if value is None or value == []:
    return None
  names: set[str] = set()
  for i, tool in enumerate(fields.listed(value, 'tools')):
    where = f'tools[{i}]'
    if not isinstance(tool, dict) or tool.get('type') != 'function':
      raise invalid("must be an object of type 'function'", where)
    function = fields.mapping(tool.get('function'), f'{where}.function')
    fields.tool_name(function.get('name'), f'{where}.function.name', names)
    if function.get('parameters') is not None:
      fields.schema(function['parameters'], f'{where}.function.parameters')
    if 'tools' not in ignored:
      used = ('name', 'description', 'parameters')
      ignored += fields.ignored_in(function, used, 'tools')
  return value


def _tool_choice(
  choice: Any, tools: list[dict] | None
) -> tuple[list[dict] | None, formats.Format | None]:
  """The tools of the prompt, and the format of a response that must be a call."""
  if choice is None or choice == 'auto':
    return tools, None
  if choice == 'none':
    return None, None
  if isinstance(choice, dict) and choice.get('type') == 'allowed_tools':
    raise unsupported('allowed_tools is not supported: send these tools', 'tool_choice')
  if tools is None:
    raise invalid('needs tools', 'tool_choice')
  if choice == 'required':
    return tools, formats.tool_call(tools)
  function = choice.get('function') if isinstance(choice, dict) else None
  if isinstance(function, dict):
    named = [t for t in tools if t['function']['name'] == function.get('name')]
    if named:
      return tools, formats.tool_call(named)
  raise invalid(
    "must be 'auto', 'none', 'required' or name one of the tools", 'tool_choice'
  )
