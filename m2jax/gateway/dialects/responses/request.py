"""Requests of OpenAI's responses.

Source: OpenAI's API reference, and the traffic of Codex
(facts/clients-and-peers.md §1).

Treatment of each field:
- used: those of BODY with a type, and include 'reasoning.encrypted_content';
  temperature and top_p as in `sampling`;
- rejected, because nothing is stored here: those read by `_stored`, and items that
  refer to stored ones;
- rejected, because ignoring them would change the meaning: `refused`, images and files,
  items of tools that the real service executes;
- text.format, tool_choice 'required' or a named tool (`formats`): rejected in a
  training session; with both, the call has no text to be formatted;
- read for what it says of the request (`hints`): client_metadata;
- accepted and counted: truncation 'auto', reasoning that another server encrypted,
  fields that the real service does not have;
- without effect, as the model and its prompt know nothing of the kind, and counted:
  `no_effect`, other fields of text and of functions, other values of include.

Items become messages: those of one completion are one message, whatever their order,
and even if the client put the outputs of calls between them (`Items._turn`). Developer
and system items stay in their places.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any

from m2jax.gateway import deltas, fields, formats, hints, protocol, sampling, schemas
from m2jax.gateway.dialects.responses import tools as tools_lib
from m2jax.gateway.errors import invalid, unsupported

_ENCRYPTED = 'm2jax:'
_REASONING = 'reasoning.encrypted_content'
_FUNCTION = schemas.input_(
  'type name', type=schemas.constant('function'), name=schemas.TOOL_NAME,
  parameters=schemas.TOOL_SCHEMA,
)  # fmt: skip
_CUSTOM = schemas.input_(
  'type name', type=schemas.constant('custom'), name=schemas.TOOL_NAME,
  description=schemas.TEXT,
)  # fmt: skip
_ROLES = {'user': 'user', 'system': 'system', 'developer': 'system'}
_MESSAGE = schemas.message('input_text', *_ROLES, type=schemas.constant('message'))


def _stored(value: Any, where: str) -> None:
  """Refuses what the real service stores."""
  if value:
    previous = where == 'previous_response_id'
    raise invalid(
      'responses are not stored here; omit it, and send the whole conversation as '
      'input',
      where,
      'previous_response_not_found' if previous else 'unsupported_parameter',
    )


BODY = fields.Body(
  model=fields.REQUIRED_TEXT,
  input=fields.Field(
    schemas.any_(schemas.TEXT, schemas.list_(_MESSAGE, 1)), required=True
  ),
  instructions=fields.TEXT,
  tools=fields.Field(schemas.list_(schemas.any_(_FUNCTION, _CUSTOM))),
  tool_choice=fields.Field(schemas.constant('auto', 'none')),
  max_output_tokens=fields.integer(1),
  stream=fields.FLAG,
  include=fields.Field(),
  text=fields.nested(fields.Body(format=formats.field())),
  truncation=fields.Field(),
  store=fields.Field(schemas.FLAG | {'const': False}, _stored),
  previous_response_id=fields.Field(None, _stored),
  conversation=fields.Field(None, _stored),
  background=fields.Field(None, _stored),
  prompt=fields.Field(None, _stored),
  **{name: sampling.FIELDS[name] for name in ('temperature', 'top_p')},
  refused='top_logprobs context_management',
  no_effect='access_programs client_metadata image max_tool_calls metadata moderation '
  'parallel_tool_calls prompt_cache_key prompt_cache_options prompt_cache_retention '
  'reasoning safety_identifier service_tier stream_options user',
)
# Fields of the body that are fields of the response too, with their defaults.
_ECHOED = {
  'instructions': None,
  'max_output_tokens': None,
  'metadata': {},
  'parallel_tool_calls': True,
  'reasoning': {'effort': None, 'summary': None},
  'temperature': None,
  'text': {'format': {'type': 'text'}},
  'tool_choice': 'auto',
  'tools': [],
  'top_p': None,
  'truncation': 'disabled',
  'user': None,
}
_TEXT_PARTS = ('input_text', 'output_text', 'text')
# The ids of our items (`answer.Output`): a kind, the completion's, and a number.
_OUR_ID = re.compile(r'(?:rs|msg|fc|ctc|call)_([0-9a-f]{32})(?:_[0-9]+)?')
_CALLS = ('function_call', 'custom_tool_call')


def parse(data: dict) -> protocol.Parsed:
  """Checks a body. Raises ApiError: 400, which names the invalid field."""
  body, ignored = BODY.read(data), list(BODY.ignored(data))
  ignored += fields.ignored_in(data.get('text') or {}, ('format',), 'text')
  if body['truncation'] not in (None, 'disabled'):
    ignored.append('truncation')
  declared, names = tools_lib.parse(body['tools'], ignored)
  tools, call = tools_lib.choose(body['tool_choice'], declared, names)
  messages = Items(names, ignored).messages(body['instructions'], body['input'])
  echo = {
    'fields': {k: v if data.get(k) is None else data[k] for k, v in _ECHOED.items()},
    'names': names,
    'encrypted': _include(body['include'], ignored),
  }
  return protocol.parsed(
    messages,
    tools,
    model=body['model'],
    max_tokens=body['max_output_tokens'],
    sampling=sampling.read(body),
    stream=body['stream'],
    format=call or body['text']['format'],
    hints=hints.of_codex(data.get(hints.BODY_FIELD)),
    ignored=tuple(ignored),
    echo=echo,
  )


def _include(value: Any, ignored: list[str]) -> bool:
  """Whether the client asks for encrypted reasoning."""
  names = fields.listed(value or [], 'include')
  if 'message.output_text.logprobs' in names:
    raise unsupported('message.output_text.logprobs is not supported', 'include')
  ignored += ['include'] if any(name != _REASONING for name in names) else []
  return _REASONING in names


def encrypt(reasoning: str) -> str:
  """Reasoning in the form that a client keeps for us (it is not a secret of ours)."""
  return _ENCRYPTED + base64.b64encode(reasoning.encode()).decode()


def _decrypt(value: Any) -> str | None:
  """The inverse; None for what is not ours."""
  if not isinstance(value, str) or not value.startswith(_ENCRYPTED):
    return None
  try:
    return base64.b64decode(value.removeprefix(_ENCRYPTED), validate=True).decode()
  except (binascii.Error, ValueError):
    return None


class Items:
  """Turns the items of a request into messages."""

  def __init__(self, names: tools_lib.Names, ignored: list[str]):
    self._names, self._ignored = names, ignored
    self._messages: list[dict[str, Any]] = []
    self._begun_at: dict[str, int] = {}  # by completion, the index of its message
    self._source: str | None = None  # the completion of the last message, if known
    self._last = ''  # type of the assistant's last item

  def messages(self, instructions: str | None, value: Any) -> list[dict]:
    """The messages of a body: its instructions, then its input."""
    if instructions is not None:
      self._messages.append({'role': 'system', 'content': instructions})
    if isinstance(value, str):
      value = [{'role': 'user', 'content': value}]
    elif not isinstance(value, list) or not value:
      raise invalid('must be a string or a non-empty list of items', 'input')
    for i, item in enumerate(value):
      self._add(fields.mapping(item, f'input[{i}]'), f'input[{i}]')
    return _leading(self._messages)

  def _add(self, item: dict, where: str) -> None:
    match item.get('type', 'message'):
      case 'message':
        self._message(item, where)
      case 'reasoning':
        self._reasoning(item, where)
      case 'function_call':
        values = fields.arguments(item.get('arguments') or '{}', f'{where}.arguments')
        self._call(item, values, where)
      case 'custom_tool_call':
        text = fields.text(item.get('input'), f'{where}.input')
        self._call(item, {deltas.CUSTOM_INPUT: text}, where)
      case 'function_call_output' | 'custom_tool_call_output':
        self._output(item, where)
      case 'item_reference':
        raise unsupported('responses are not stored here: send the item itself', where)
      case kind:
        raise unsupported(
          f'items of type {str(kind)[:100]!r} are not supported', f'{where}.type'
        )

  def _message(self, item: dict, where: str) -> None:
    role = fields.text(item.get('role'), f'{where}.role')
    text = _text(item.get('content'), f'{where}.content')
    if role in _ROLES:
      self._messages.append({'role': _ROLES[role], 'content': text})
    elif role == 'assistant':
      self._turn(item)['content'] += text
    else:
      raise invalid(
        f'unknown role {role[:100]!r}; use user, assistant, system or developer',
        f'{where}.role',
      )

  def _reasoning(self, item: dict, where: str) -> None:
    text = ''
    for field, kind in (('content', 'reasoning_text'), ('summary', 'summary_text')):
      parts = fields.listed(item.get(field) or [], f'{where}.{field}')
      text = text or ''.join(
        fields.part(part, f'{where}.{field}[{i}]', (kind, 'text'))
        for i, part in enumerate(parts)
      )
      if field == 'content' and not text and item.get('encrypted_content'):
        text = _decrypt(item['encrypted_content']) or ''
        self._ignored += [] if text else ['encrypted_content']
    turn = self._turn(item)
    if text:
      turn['reasoning_content'] = turn.get('reasoning_content', '') + text

  def _call(self, item: dict, values: dict, where: str) -> None:
    name = fields.text(item.get('name'), f'{where}.name')
    namespace = item.get('namespace')
    if namespace is not None:
      namespace = fields.text(namespace, f'{where}.namespace')
    call_id = fields.name(item.get('call_id'), f'{where}.call_id')
    call = fields.call(call_id, tools_lib.known_name(name, namespace), values)
    self._turn(item).setdefault('tool_calls', []).append(call)

  def _output(self, item: dict, where: str) -> None:
    self._messages.append(
      {
        'role': 'tool',
        'content': _text(item.get('output'), f'{where}.output'),
        'tool_call_id': fields.name(item.get('call_id'), f'{where}.call_id'),
      }
    )

  def _turn(self, item: dict) -> dict:
    """The message that an item of the assistant is part of.

    Our ids have the completion's; clients may drop those of messages and reasoning, but
    not those of calls. An item without one begins a message where no completion could
    have gone on: with reasoning after anything else, or with text after text.
    """
    source, kind = _source(item), item.get('type', 'message')
    turn = self._begun(source)
    if turn is None:
      last = self._messages[-1] if self._messages else {'role': ''}
      other = source and self._source and source != self._source
      begins = {'reasoning': ('message', *_CALLS), 'message': ('message',)}
      new = other or self._last in begins.get(kind, ())
      if last['role'] == 'assistant' and not new:
        turn = last
      else:
        turn = {'role': 'assistant', 'content': ''}
        self._messages.append(turn)
        self._source = None
    self._source = source or self._source
    if source and source not in self._begun_at:
      self._begun_at[source] = len(self._messages) - 1
    self._last = kind
    return turn

  def _begun(self, source: str | None) -> dict | None:
    """The message with earlier items of a completion, if only outputs followed them.

    Text without an id between the items is the completion's too.
    """
    if (at := self._begun_at.get(source)) is None:
      return None
    turn, later = self._messages[at], self._messages[at + 1 :]
    outputs = [message for message in later if message['role'] == 'tool']
    if len(outputs) < len(later):
      texts = [m for m in later if m.keys() == {'role', 'content'}]
      mine = all(m['role'] == 'assistant' for m in texts) and self._source is None
      if not mine or len(texts) + len(outputs) < len(later):
        return None
      turn['content'] += ''.join(message['content'] for message in texts)
      self._messages[at + 1 :] = outputs
    return turn


def _source(item: dict) -> str | None:
  """The completion in the ids of an item, if they are ours."""
  for name in ('call_id', 'id'):
    value = item.get(name)
    if isinstance(value, str) and (match := _OUR_ID.fullmatch(value)):
      return match[1]
  return None


def _text(value: Any, where: str) -> str:
  """The text of a content or an output."""
  if isinstance(value, str):
    return value
  if not isinstance(value, list):
    raise invalid('must be a string or a list of text parts', where)
  texts = []
  for i, part in enumerate(value):
    if isinstance(part, dict) and part.get('type') == 'refusal':
      texts.append(fields.text(part.get('refusal'), f'{where}[{i}].refusal'))
    else:
      texts.append(fields.part(part, f'{where}[{i}]', _TEXT_PARTS))
  return ''.join(texts)


def _leading(messages: list[dict]) -> list[dict]:
  """The messages, with those of the system at the beginning as one."""
  count = 0
  while count < len(messages) and messages[count]['role'] == 'system':
    count += 1
  if count < 2:
    return messages
  text = '\n\n'.join(message['content'] for message in messages[:count])
  return [{'role': 'system', 'content': text}, *messages[count:]]
