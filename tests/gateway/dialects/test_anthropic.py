"""Anthropic's messages, judged by the official client."""

from __future__ import annotations

import json
import re

import anthropic
import pytest

from m2jax.gateway import dialects
from m2jax.gateway.errors import ApiError
from m2jax.text import chat
from tests.gateway import clients
from tests.gateway.conftest import HTTP, response_text

SH = {
  'name': 'sh',
  'description': 'Run a shell command.',
  'input_schema': {
    'type': 'object',
    'properties': {'cmd': {'type': 'string'}, 'n': {'type': 'integer'}},
    'required': ['cmd'],
  },
}
QUESTION = [{'role': 'user', 'content': clients.QUESTION}]
ASK = {'model': 'm2jax', 'max_tokens': 500, 'messages': QUESTION, 'tools': [SH]}


def client_of(gateway, **options):
  base_url = gateway.base_url.removesuffix('/v1')
  options = options or {'api_key': 'k'}
  options |= dict(max_retries=0, http_client=clients.ANTHROPIC_HTTP)
  return anthropic.Anthropic(base_url=base_url, **options)


def results(message):
  return [
    {
      'type': 'tool_result',
      'tool_use_id': block.id,
      'content': clients.shell(**block.input),
    }
    for block in message.content
    if block.type == 'tool_use'
  ]


@pytest.mark.parametrize('stream', [False, True])
def test_a_tool_task(serve, tok, stream):
  """Thinking, text and parallel calls go out and come back as the recorded ids."""
  gateway, engine, records = serve(clients.script(tok))
  client, messages = client_of(gateway), list(QUESTION)
  while True:
    asked = ASK | {'messages': messages, 'system': 'You count.'}
    if stream:
      with client.messages.stream(**asked) as events:
        message = events.get_final_message()
    else:
      message = client.messages.create(**asked)
    messages.append({'role': 'assistant', 'content': message.content})
    if message.stop_reason != 'tool_use':
      break
    messages.append({'role': 'user', 'content': results(message)})
  kinds = [[block.type for block in m['content']] for m in messages[1::2]]
  assert kinds == [
    ['thinking', 'text', 'tool_use'],
    ['thinking', 'tool_use', 'tool_use'],
    ['thinking', 'text'],
  ]
  assert messages[1]['content'][2].input == {'cmd': 'ls <a', 'n': 2}
  assert message.stop_reason == 'end_turn'
  assert message.content[-1].text == clients.ANSWER
  assert message.usage.input_tokens == len(records[-1].prompt_ids)
  assert message.usage.output_tokens == len(records[-1].response_ids)
  clients.assert_recorded(engine, records)
  clients.assert_extends(records)


def events_of(gateway, **fields):
  reply = HTTP.post(
    gateway.base_url + '/messages?beta=true',
    json=ASK | {'stream': True} | fields,
    headers={'x-api-key': 'k', 'anthropic-version': '2023-06-01'},
  )
  assert reply.headers['content-type'].startswith('text/event-stream')
  events = []
  for event in reply.text.removesuffix('\n\n').split('\n\n'):
    name, data = event.split('\n')
    data = json.loads(data.removeprefix('data: '))
    assert name == f'event: {data["type"]}'
    events.append(data)
  return events


@pytest.mark.parametrize('stream', [False, True])
def test_text_after_a_call(serve, tok, stream):
  """Blocks come in the order in which they were sampled, and back as one completion."""
  invoke = '<invoke name="sh">\n<parameter name="cmd">ls</parameter>\n</invoke>\n'
  block = f'<minimax:tool_call>\n{invoke}</minimax:tool_call>'
  gateway, engine, records = serve(f'so\n</think>\n\na\n{block}\nb{block}c[e~[')
  client, messages = client_of(gateway), list(QUESTION)
  for _ in range(3):
    if stream:
      with client.messages.stream(**ASK | {'messages': messages}) as events:
        message = events.get_final_message()
    else:
      message = client.messages.create(**ASK | {'messages': messages})
    kinds = [block.type for block in message.content]
    assert kinds == ['thinking', 'text', 'tool_use', 'text', 'tool_use', 'text']
    messages.append({'role': 'assistant', 'content': message.content})
    messages.append({'role': 'user', 'content': results(message)})
  clients.assert_recorded(engine, records)
  clients.assert_extends(records)


@pytest.mark.parametrize('piece_tokens', [1, 5])
def test_events(serve, piece_tokens):
  """Blocks open and close one after the other; the text comes token by token."""
  gateway, _, _ = serve(clients.TURNS[0], engine_options={'piece_tokens': piece_tokens})
  events = events_of(gateway)
  order = [e['type'] for e in events]
  assert order[:2] == ['message_start', 'ping']
  assert order[-2:] == ['message_delta', 'message_stop']
  assert events[0]['message']['content'] == []
  open_block, blocks = None, 0
  for event in events:
    match event['type']:
      case 'content_block_start':
        assert open_block is None and event['index'] == blocks
        open_block = event['content_block']['type']
      case 'content_block_delta':
        kind = event['delta']['type']
        assert event['index'] == blocks
        allowed = {
          'thinking': ('thinking_delta', 'signature_delta'),
          'text': ('text_delta',),
          'tool_use': ('input_json_delta',),
        }
        assert kind in allowed[open_block]
      case 'content_block_stop':
        open_block, blocks = None, blocks + 1
  assert blocks == 3 and open_block is None
  if piece_tokens == 1:
    assert order.count('content_block_delta') > 6
  assert events[-2]['delta'] == {'stop_reason': 'tool_use', 'stop_sequence': None}


def test_pings_fill_silence(serve):
  gateway, _, _ = serve(clients.TURNS[3], ping_s=0.05, engine_options={'delay_s': 0.2})
  assert [e['type'] for e in events_of(gateway)].count('ping') >= 3


@pytest.mark.parametrize('stream', [False, True])
def test_stop_reasons(serve, stream):
  gateway, _, records = serve(
    response_text('t', 'one two STOP three'), engine_options={'context_tokens': 400}
  )
  client = client_of(gateway)

  def ask(**fields):
    asked = {'model': 'm2jax', 'max_tokens': 300, 'messages': QUESTION} | fields
    if not stream:
      return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
      return events.get_final_message()

  message = ask(stop_sequences=['STOP'])
  assert (message.stop_reason, message.stop_sequence) == ('stop_sequence', 'STOP')
  assert message.content[-1].text == 'one two '
  assert ask(max_tokens=3).stop_reason == 'max_tokens'
  assert ask().stop_reason == 'end_turn'
  assert records[0].finish_reason == 'stop'


def test_errors_have_the_services_form_and_wording(serve):
  """The client maps them to its classes; Claude Code reads the numbers of a long
  prompt."""
  gateway, _, _ = serve(
    clients.TURNS[3],
    accept_unknown_keys=False,
    engine_options={'context_tokens': 300},
  )
  gateway.sessions.open('k')
  client = client_of(gateway)
  with pytest.raises(anthropic.AuthenticationError) as error:
    client_of(gateway, api_key='other').messages.create(**ASK)
  assert error.value.body['error']['type'] == 'authentication_error'
  with pytest.raises(anthropic.NotFoundError) as error:
    client.messages.create(**ASK | {'model': 'claude'})
  assert error.value.body['error']['type'] == 'not_found_error'
  for size in (150, 3000):
    with pytest.raises(anthropic.BadRequestError) as error:
      client.messages.create(
        **ASK | {'messages': [{'role': 'user', 'content': '~ ' * size}]}
      )
    message = error.value.body['error']['message']
    found = re.fullmatch(r'prompt is too long: (\d+) tokens > 300 maximum', message)
    assert int(found[1]) >= 300
  image = [{'type': 'image', 'source': {}}]
  with pytest.raises(anthropic.BadRequestError) as error:
    client.messages.create(**ASK | {'messages': [{'role': 'user', 'content': image}]})
  assert error.value.body['type'] == 'error'
  assert error.value.body['error']['message'].startswith('messages.0.content.0: ')


BAD = [
  ({'max_tokens': None}, 'max_tokens'),
  ({'max_tokens': 0}, 'max_tokens'),
  ({'model': 3}, 'model'),
  ({'messages': []}, 'messages'),
  ({'messages': [{'role': 'tool', 'content': 'x'}]}, 'messages[0].role'),
  ({'messages': [{'role': 'user'}]}, 'messages[0].content'),
  ({'messages': [*QUESTION, {'role': 'assistant', 'content': 'Sure'}]}, 'messages[1]'),
  (
    {'messages': [{'role': 'user', 'content': [{'type': 'tool_result'}]}]},
    'messages[0].content[0].tool_use_id',
  ),
  ({'system': 3}, 'system'),
  ({'system': [{'type': 'image'}]}, 'system[0]'),
  ({'tools': [{'type': 'web_search_20250305', 'name': 'web_search'}]}, 'tools[0].type'),
  ({'tools': [SH, SH]}, 'tools[1].name'),
  ({'tools': [{'name': 'f'}]}, 'tools[0].input_schema'),
  ({'tool_choice': {'type': 'tool', 'name': 'g'}}, 'tool_choice.name'),
  ({'tools': [], 'tool_choice': {'type': 'any'}}, 'tool_choice'),
  ({'thinking': {'type': 'maybe'}}, 'thinking.type'),
  ({'thread': {'type': 'create'}}, 'thread'),
  ({'stop_sequences': 3}, 'stop_sequences'),
  ({'mcp_servers': [{}]}, 'mcp_servers'),
  (
    {'output_config': {'format': {'type': 'json_schema'}}},
    'output_config.format.schema',
  ),
]


@pytest.mark.parametrize('fields, param', BAD)
def test_bad_requests_name_the_field(fields, param):
  with pytest.raises(ApiError) as error:
    dialects.DIALECTS['anthropic'].parse(ASK | fields)
  assert (error.value.status, error.value.param) == (400, param)


def parse(**fields):
  return dialects.DIALECTS['anthropic'].parse(ASK | fields)


def test_a_billing_header_costs_no_prefix(serve, tok):
  """Claude Code's first system block differs in each request; the prompt does not."""
  gateway, engine, records = serve(clients.script(tok))
  client, messages = client_of(gateway), list(QUESTION)
  for turn in range(3):
    system = [
      {'type': 'text', 'text': f'x-anthropic-billing-header: cch={turn};'},
      {'type': 'text', 'text': 'You count.', 'cache_control': {'type': 'ephemeral'}},
    ]
    message = client.messages.create(**ASK | {'messages': messages, 'system': system})
    messages.append({'role': 'assistant', 'content': message.content})
    messages.append({'role': 'user', 'content': results(message)})
  clients.assert_extends(records)
  assert gateway.counters()['ignored_total{field="billing_header"}'] == 3
  assert 'billing' not in tok.decode(records[-1].prompt_ids)


def test_what_follows_tool_results():
  """Results first; a reminder is a system message there; other text is the user's."""
  reminder = '<system-reminder>be brief</system-reminder>'
  content = [
    {'type': 'text', 'text': reminder},
    {
      'type': 'tool_result',
      'tool_use_id': 'a',
      'content': [{'type': 'text', 'text': 'x'}],
    },
    {'type': 'tool_result', 'tool_use_id': 'b', 'is_error': True},
    {'type': 'text', 'text': 'go on'},
  ]
  thinking = {'type': 'thinking', 'thinking': 'hm', 'signature': 'any'}
  calls = [
    {'type': 'tool_use', 'id': name, 'name': 'sh', 'input': {'cmd': name}}
    for name in 'ab'
  ]
  request, messages = parse(
    messages=[
      *QUESTION,
      {'role': 'assistant', 'content': [thinking, *calls]},
      {'role': 'user', 'content': content},
      {'role': 'system', 'content': '<total_tokens>9</total_tokens>'},
    ]
  )
  assert [(m['role'], m['content']) for m in messages] == [
    ('user', clients.QUESTION),
    ('assistant', ''),
    ('tool', 'x'),
    ('tool', ''),
    ('system', reminder),
    ('user', 'go on'),
    ('system', '<total_tokens>9</total_tokens>'),
  ]
  assert messages[1]['reasoning_content'] == 'hm'
  assert [call['id'] for call in messages[1]['tool_calls']] == ['a', 'b']
  assert request.ignored == ('is_error',)


def test_what_has_no_effect_is_counted():
  request, _ = parse(
    thinking={'type': 'disabled'},
    tool_choice={'type': 'auto', 'disable_parallel_tool_use': True},
    context_management={'edits': [{'type': 'clear_tool_uses_20250919'}]},
    something='new',
    metadata={'user_id': 'x'},
    output_config={'effort': 'high'},
    tools=[SH | {'strict': True}, SH | {'name': 'b', 'defer_loading': True}],
  )
  assert sorted(request.ignored) == [
    'context_management', 'disable_parallel_tool_use', 'metadata', 'output_config',
    'thinking', 'tools', 'unknown',
  ]  # fmt: skip
  request, _ = parse(
    thinking={'type': 'adaptive'},
    context_management={'edits': [{'type': 'clear_thinking_20251015', 'keep': 'all'}]},
  )
  assert request.ignored == ()
  request, _ = parse(thinking={'type': 'enabled', 'budget_tokens': 1024})
  assert request.ignored == ('thinking',)
  request, _ = parse(tool_choice={'type': 'none'})
  assert request.tools is None


def test_count_tokens(serve, tok):
  """The number of tokens that the engine would get, also above its context."""
  gateway, engine, _ = serve(clients.TURNS[3], engine_options={'context_tokens': 400})
  client = client_of(gateway)
  asked = {k: v for k, v in ASK.items() if k != 'max_tokens'}
  count = client.messages.count_tokens(**asked).input_tokens
  assert not engine.requests
  client.messages.create(**ASK)
  assert count == len(engine.requests[0].prompt_ids)
  long = [{'role': 'user', 'content': '~ ' * 600}]
  assert client.messages.count_tokens(**asked | {'messages': long}).input_tokens > 600
  function = {'name': 'sh', 'description': SH['description']}
  tool = {'function': function | {'parameters': SH['input_schema']}}
  rendered = chat.render(QUESTION, [tool], add_generation_prompt=True)
  assert count == len(tok.encode(rendered))
