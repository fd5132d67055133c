"""Requests of Anthropic's messages, and of its counting of tokens.

Source: Anthropic's API reference, and the traffic of Claude Code
(facts/clients-and-peers.md §1).

Treatment of each field:
- used: those of COUNT with a type; temperature, top_p and top_k as in `sampling`;
- rejected, because conversations are not stored here: thread;
- rejected, because ignoring them would change the meaning: `refused`, images,
  documents, tools that Anthropic's servers execute, a last message of the assistant
  (prefill);
- output_config.format and output_format, tool_choice 'any' and 'tool' (`formats`):
  rejected in a training session; with both, the call has no text to be formatted;
- accepted and counted: thinking of the type 'disabled', or with a budget (M2 always
  thinks, as long as it likes), disable_parallel_tool_use, context_management that edits
  the context, `is_error`, redacted thinking, and fields that the real service lacks;
- without effect, as the model and its prompt know nothing of the kind, and counted:
  `no_effect`, other fields of output_config and of tools; not counted: cache_control of
  blocks and tools, which Claude Code sends in each request.

What separates a client from its prefix:
- a billing header, which Claude Code puts first into `system` and which differs in each
  request, is dropped and counted;
- a `role: system` message stays where it is (`text.chat` renders it there);
- a system reminder beside tool results, which Claude Code sends as text of the user, is
  such a message too: as a user's turn it would end the turn of the assistant, and the
  template would drop its thinking. All other text beside tool results is the user's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from m2jax.gateway import fields, formats, protocol, sampling, schemas
from m2jax.gateway import messages as messages_lib
from m2jax.gateway.errors import invalid, unsupported

NO_THREADS = 'thread_unsupported_request'
REMINDER = '<system-reminder>'
_LONGEST_NAME = 128
_TOOL = ('name', 'description', 'input_schema', 'type', 'cache_control')
_TOOL_SHOWN = schemas.input_(
  'name input_schema', name=schemas.TOOL_NAME, description=schemas.TEXT,
  input_schema=schemas.TOOL_SCHEMA,
)  # fmt: skip
_CHOICE = schemas.input_('type', type=schemas.constant('auto', 'none'))
_MESSAGE = schemas.message('text', 'user', 'system')


def _thread(value: Any, where: str) -> None:
  # The client then sends its messages itself.
  message = 'conversations are not stored here; send all messages'
  raise invalid(message, where, NO_THREADS)


COUNT = fields.Body(
  model=fields.REQUIRED_TEXT,
  messages=fields.Field(schemas.list_(_MESSAGE, 1), required=True),
  system=fields.Field(_MESSAGE['properties']['content']),
  max_tokens=fields.integer(1),
  tools=fields.Field(schemas.list_(_TOOL_SHOWN)),
  tool_choice=fields.Field(_CHOICE, fields.options, {}),
  stop_sequences=fields.STOPS,
  stream=fields.FLAG,
  thinking=fields.Field(None, fields.options, {}),
  context_management=fields.Field(None, fields.options, {}),
  output_config=fields.nested(fields.Body(format=formats.field())),
  output_format=formats.field(),
  thread=fields.Field(None, _thread),
  **{name: sampling.FIELDS[name] for name in ('temperature', 'top_p', 'top_k')},
  refused='mcp_servers container compaction',
  no_effect='betas billing_policy cache_control diagnostics fallback_credit_token '
  'fallbacks inference_geo metadata service_tier speed user_profile_id workspace_id',
)
BODY = fields.Body(
  COUNT, max_tokens=dataclasses.replace(COUNT['max_tokens'], required=True)
)


def parse(data: dict, declared: fields.Body = BODY) -> protocol.Parsed:
  """Checks a body. Raises ApiError: 400, which names the invalid field."""
  body, ignored = declared.read(data), list(declared.ignored(data))
  config = data.get('output_config') or {}
  ignored += fields.ignored_in(config, ('format',), 'output_config')
  _note_thinking(body, ignored)
  tools = _tools(body['tools'], ignored)
  tools, call = _tool_choice(body['tool_choice'], tools, ignored)
  messages = _system(body['system'], ignored) + _messages(body['messages'], ignored)
  return protocol.parsed(
    messages,
    tools,
    model=body['model'],
    max_tokens=body['max_tokens'],
    sampling=sampling.read(body),
    stream=body['stream'],
    stop=body['stop_sequences'],
    format=call or body['output_config']['format'] or body['output_format'],
    ignored=tuple(ignored),
  )


def _note_thinking(body: dict, ignored: list[str]) -> None:
  thinking = body['thinking']
  if thinking.get('type') not in (None, 'enabled', 'adaptive', 'disabled'):
    raise invalid("must be 'enabled', 'adaptive' or 'disabled'", 'thinking.type')
  if thinking.get('type') == 'disabled' or thinking.get('budget_tokens'):
    ignored.append('thinking')
  where = 'context_management'
  edits = fields.listed(body[where].get('edits') or [], f'{where}.edits')
  if any(not isinstance(edit, dict) or edit.get('keep') != 'all' for edit in edits):
    ignored.append(where)


def _system(value: Any, ignored: list[str]) -> list[dict]:
  """The system message, if there is one, without the billing header."""
  if value is None:
    return []
  if not isinstance(value, str | list):
    raise invalid('must be a string or a list of text blocks', 'system')
  texts = [value] if isinstance(value, str) else [
    fields.part(block, f'system[{i}]', ('text',)) for i, block in enumerate(value)
  ]  # fmt: skip
  kept = [messages_lib.without_billing(text) for text in texts]
  ignored += [messages_lib.BILLING] * sum(map(str.__ne__, kept, texts))
  kept = list(filter(None, kept))
  return [{'role': 'system', 'content': '\n\n'.join(kept)}] if kept else []


def _messages(value: Any, ignored: list[str]) -> list[dict]:
  if not isinstance(value, list) or not value:
    raise invalid('must be a non-empty list', 'messages')
  messages: list[dict] = []
  for i, message in enumerate(value):
    where = f'messages[{i}]'
    role = fields.mapping(message, where).get('role')
    content = message.get('content')
    if isinstance(content, str):
      content = [{'type': 'text', 'text': content}]
    elif not isinstance(content, list):
      raise invalid('must be a string or a list of blocks', f'{where}.content')
    where = f'{where}.content'
    if role == 'user':
      messages += _user(content, where, ignored)
    elif role == 'assistant':
      messages.append(_assistant(content, where, ignored))
    elif role == 'system':
      messages.append({'role': 'system', 'content': _texts(content, where)})
    else:
      raise invalid(
        f"unknown role {role!r}; use 'user', 'assistant' or 'system'",
        f'messages[{i}].role',
      )
  if messages[-1]['role'] == 'assistant':
    raise unsupported(
      'This model does not support assistant message prefill. The conversation must '
      'end with a user message.',
      f'messages[{len(value) - 1}]',
    )
  return messages


def _texts(blocks: list, where: str) -> str:
  texts = (fields.part(b, f'{where}[{i}]', ('text',)) for i, b in enumerate(blocks))
  return '\n'.join(texts)


def _user(blocks: list, where: str, ignored: list[str]) -> list[dict]:
  """Tool results, reminders beside them, then the text of the user."""
  results, reminders, texts = [], [], []
  for i, block in enumerate(blocks):
    at = f'{where}[{i}]'
    if isinstance(block, dict) and block.get('type') == 'tool_result':
      results.append(_tool_result(block, at, ignored))
    else:
      texts.append(fields.part(block, at, ('text', 'tool_result')))
  if results:
    reminders = [text for text in texts if text.lstrip().startswith(REMINDER)]
    texts = [text for text in texts if not text.lstrip().startswith(REMINDER)]
  messages = results + [{'role': 'system', 'content': text} for text in reminders]
  if texts or not results:
    messages.append({'role': 'user', 'content': '\n'.join(texts)})
  return messages


def _tool_result(block: dict, where: str, ignored: list[str]) -> dict:
  content = block.get('content')
  if isinstance(content, list):
    content = _texts(content, f'{where}.content')
  elif content is not None and not isinstance(content, str):
    raise invalid('must be a string or a list of text blocks', f'{where}.content')
  if block.get('is_error'):
    ignored.append('is_error')
  return {
    'role': 'tool',
    'content': content or '',
    'tool_call_id': fields.name(block.get('tool_use_id'), f'{where}.tool_use_id'),
  }


def _assistant(blocks: list, where: str, ignored: list[str]) -> dict:
  message: dict[str, Any] = {'role': 'assistant'}
  texts, thinking, calls = [], [], []
  for i, block in enumerate(blocks):
    at = f'{where}[{i}]'
    match fields.mapping(block, at).get('type'):
      case 'text':
        texts.append(fields.text(block.get('text'), f'{at}.text'))
      case 'thinking':
        thinking.append(fields.text(block.get('thinking'), f'{at}.thinking'))
      case 'redacted_thinking':
        ignored.append('redacted_thinking')
      case 'tool_use':
        name = fields.text(block.get('name'), f'{at}.name')
        values = fields.mapping(block.get('input') or {}, f'{at}.input')
        calls.append(
          fields.call(fields.name(block.get('id'), f'{at}.id'), name, values)
        )
      case kind:
        raise invalid(f'unknown type {str(kind)[:100]!r} of a block', f'{at}.type')
  message['content'] = ''.join(texts)
  if thinking:
    message['reasoning_content'] = ''.join(thinking)
  if calls:
    message['tool_calls'] = calls
  return message


def _tools(value: Any, ignored: list[str]) -> list[dict] | None:
  if not value and value in (None, []):
    return None
  tools, names = [], set()
  for i, tool in enumerate(fields.listed(value, 'tools')):
    where = f'tools[{i}]'
    kind = fields.mapping(tool, where).get('type')
    if kind not in (None, 'custom'):
      raise unsupported(
        f'{str(kind)[:100]!r} is executed by Anthropic: define a tool with an '
        'input_schema',
        f'{where}.type',
      )
    name = fields.tool_name(tool.get('name'), f'{where}.name', names, _LONGEST_NAME)
    function = {'name': name}
    if tool.get('description') is not None:
      function['description'] = fields.text(tool['description'], f'{where}.description')
    fields.schema(tool.get('input_schema'), f'{where}.input_schema')
    function['parameters'] = tool['input_schema']
    if 'tools' not in ignored:
      ignored += fields.ignored_in(tool, _TOOL, 'tools')
    tools.append({'type': 'function', 'function': function})
  return tools


def _tool_choice(
  choice: dict, tools: list[dict] | None, ignored: list[str]
) -> tuple[list[dict] | None, formats.Format | None]:
  """The tools of the prompt, and the format of a response that must be a call."""
  kind = choice.get('type', 'auto')
  if kind == 'none':
    return None, None
  if kind not in ('auto', 'any', 'tool'):
    raise invalid("must be 'auto', 'any', 'tool' or 'none'", 'tool_choice.type')
  if kind != 'auto' and tools is None:
    raise invalid('needs tools', 'tool_choice')
  if choice.get('disable_parallel_tool_use'):
    ignored.append('disable_parallel_tool_use')
  if kind == 'auto':
    return tools, None
  if kind == 'any':
    return tools, formats.tool_call(tools)
  named = [tool for tool in tools if tool['function']['name'] == choice.get('name')]
  if not named:
    raise invalid('must be the name of one of the tools', 'tool_choice.name')
  return tools, formats.tool_call(named)
