"""OpenAI's responses, judged by the official client."""

from __future__ import annotations

import json

import openai
import pytest

from m2jax.gateway import dialects
from m2jax.gateway.errors import ApiError
from tests.gateway import clients
from tests.gateway.conftest import HTTP, response_text
from tests.gateway.conftest import SH as CHAT_SH

SH = {'type': 'function', 'strict': False, **CHAT_SH['function']}
QUESTION = [{'role': 'user', 'content': clients.QUESTION}]
ASK = {'model': 'm2jax', 'input': QUESTION, 'tools': [SH]}


def outputs(response):
  return [
    {
      'type': 'function_call_output',
      'call_id': item.call_id,
      'output': clients.shell(**json.loads(item.arguments)),
    }
    for item in response.output
    if item.type == 'function_call'
  ]


def codex(items):
  """Items as Codex sends them back: reasoning only as encrypted content, no ids."""
  for item in items:
    item = item.model_dump(exclude_none=True, exclude={'id', 'status'})
    if item['type'] == 'reasoning':
      del item['content']
    yield item


@pytest.mark.parametrize('client_kind', ['plain', 'stream', 'codex'])
def test_a_tool_task(serve, tok, client_kind):
  """Reasoning, text and parallel calls go out and come back as the recorded ids."""
  gateway, engine, records = serve(clients.script(tok))
  client = clients.openai_of(gateway)
  items, kinds = [{'role': 'developer', 'content': 'Be brief.'}, *QUESTION], []
  asked = ASK | {'instructions': 'You count.', 'store': False}
  if client_kind == 'codex':
    asked['include'] = ['reasoning.encrypted_content']
  while True:
    if client_kind == 'plain':
      response = client.responses.create(**asked | {'input': items})
    else:
      with client.responses.stream(**asked | {'input': items}) as stream:
        response = stream.get_final_response()
    kinds.append([item.type for item in response.output])
    items += codex(response.output) if client_kind == 'codex' else response.output
    if not (answers := outputs(response)):
      break
    items += answers
  assert kinds == [
    ['reasoning', 'message', 'function_call'],
    ['reasoning', 'function_call', 'function_call'],
    ['reasoning', 'message'],
  ]
  assert response.status == 'completed'
  assert response.output_text == clients.ANSWER
  usage = response.usage
  assert usage.input_tokens == len(records[-1].prompt_ids)
  assert usage.output_tokens == len(records[-1].response_ids)
  assert usage.output_tokens_details.reasoning_tokens == len(tok.encode('I think\n'))
  clients.assert_recorded(engine, records)
  clients.assert_extends(records)


INVOKES = {
  name: f'<invoke name="sh">\n<parameter name="cmd">{name}</parameter>\n</invoke>\n'
  for name in ('ls', 'wc', 'du')
}


def block(*names):
  invokes = ''.join(INVOKES[name] for name in names)
  return f'\n<minimax:tool_call>\n{invokes}</minimax:tool_call>'


# Text before, between and after calls, and what cannot be read as one.
MIXED = {
  'after': 'so\n</think>\n\nfirst' + block('ls') + '\nthen wait[e~[',
  'between': 'so\n</think>\n\none' + block('ls', 'wc') + 'two' + block('du') + 'e[e~[',
  'only after': 'so\n</think>\n\n' + block('ls', 'wc') + 'done é[e~[',
  'no thinking': '</think>\n\na' + block('ls') + 'b[e~[',
  'unread': 'so\n</think>\n\na'
  + block('ls')
  + '\nb<minimax:tool_call>c</minimax:tool_call>[e~[',
}


def interleaved(response):
  """Each output right behind its call."""
  found = iter(outputs(response))
  for item in response.output:
    yield item
    if item.type == 'function_call':
      yield next(found)


def without_ids(items):
  for item in items:
    if isinstance(item, dict):
      yield item
    elif item.type == 'function_call':
      yield item
    else:
      yield item.model_dump(exclude={'id', 'status'}, exclude_none=True)


BACK = {
  'as they came': lambda response: [*response.output, *outputs(response)],
  'outputs between': interleaved,
  'without ids': lambda r: without_ids([*r.output, *outputs(r)]),
  'codex': lambda response: [*codex(response.output), *outputs(response)],
}


@pytest.mark.parametrize(
  'stream, back',
  [
    (False, 'as they came'),
    (True, 'as they came'),
    (False, 'outputs between'),
    (True, 'without ids'),
    (True, 'codex'),
  ],
)
@pytest.mark.parametrize('turn', MIXED)
def test_items_in_any_order_come_back_as_one_completion(serve, tok, turn, stream, back):
  """Law 4: the next prompt begins with the whole prompt and response."""

  def answer(request):
    last = len(engine.requests) == 3
    return tok.encode(response_text('t', 'end') if last else MIXED[turn])

  gateway, engine, records = serve(answer)
  client, items = clients.openai_of(gateway), list(QUESTION)
  asked = ASK | {'include': ['reasoning.encrypted_content']}
  while True:
    if stream:
      with client.responses.stream(**asked | {'input': items}) as events:
        response = events.get_final_response()
    else:
      response = client.responses.create(**asked | {'input': items})
    if not outputs(response):
      break
    items += BACK[back](response)
  assert len(records) == 3
  clients.assert_recorded(engine, records)
  clients.assert_extends(records)


@pytest.mark.parametrize('turn', MIXED)
def test_plain_and_streamed_items_have_one_order(serve, tok, turn):
  """It is that in which they were sampled."""
  gateway, _, records = serve(MIXED[turn])
  events = events_of(gateway)
  streamed = json.dumps(events[-1]['response']['output'])
  assert build(events) == events[-1]['response']['output']
  plain = (
    clients.openai_of(gateway).responses.create(**ASK).model_dump(exclude_unset=True)
  )
  ids = [record.id.removeprefix('chatcmpl-') for record in records]
  assert plain['output'] == json.loads(streamed.replace(*ids))


def test_turns_of_one_kind_are_not_one_message():
  """Completions without a call or a user between them stay apart, with ids or not."""

  def said(text, kind, number, ids):
    part = {'type': 'output_text' if kind == 'msg' else 'reasoning_text', 'text': text}
    item = (
      {'type': 'message', 'role': 'assistant'}
      if kind == 'msg'
      else {'type': 'reasoning'}
    )
    return item | {'content': [part]} | ({'id': f'{kind}_{number:032x}'} if ids else {})

  parse = dialects.DIALECTS['responses'].parse
  for ids in (True, False):
    items = [
      said(f'{kind}{number}', kind, number, ids)
      for number in (1, 2)
      for kind in ('rs', 'msg')
    ]
    _, messages = parse(ASK | {'input': [*QUESTION, *items]})
    assert [(m['reasoning_content'], m['content']) for m in messages[1:]] == [
      ('rs1', 'msg1'),
      ('rs2', 'msg2'),
    ]


def test_parallel_calls_with_their_outputs_between(serve, tok):
  """A client that puts each output after its call continues the same completion."""
  gateway, _, records = serve(clients.TURNS[1])
  response = clients.openai_of(gateway).responses.create(**ASK)
  reasoning, *calls = response.output
  one, two = outputs(response)
  items = [*QUESTION, reasoning, calls[0], one, calls[1], two]
  clients.openai_of(gateway).responses.create(**ASK | {'input': items})
  clients.assert_extends(records)


def events_of(gateway, **fields):
  reply = HTTP.post(
    gateway.base_url + '/responses',
    json=ASK | {'stream': True} | fields,
    headers={'authorization': 'Bearer k'},
  )
  assert reply.status_code == 200, reply.text
  events = []
  for event in reply.text.removesuffix('\n\n').split('\n\n'):
    if event.startswith(':'):
      continue
    name, data = event.split('\n')
    data = json.loads(data.removeprefix('data: '))
    assert name == f'event: {data["type"]}'
    events.append(data)
  assert [e['sequence_number'] for e in events] == list(range(len(events)))
  return events


def build(events):
  """The output that a client builds of the events alone."""
  items, texts = [], {}
  for event in events:
    kind = event['type'].removeprefix('response.')
    if kind == 'output_item.added':
      assert event['output_index'] == len(items)
      items.append(event['item'])
    elif kind.endswith('.delta'):
      key = event['item_id']
      assert key == items[event['output_index']]['id']
      texts[key] = texts.get(key, '') + event['delta']
    elif kind in ('output_text.done', 'reasoning_text.done'):
      assert texts[event['item_id']] == event['text']
    elif kind == 'function_call_arguments.done':
      assert texts[event['item_id']] == event['arguments']
    elif kind == 'output_item.done':
      item = event['item']
      assert items[event['output_index']]['id'] == item['id']
      said = item.get('arguments', item.get('input'))
      assert texts[item['id']] == (said or item['content'][0]['text'])
      items[event['output_index']] = item
  return items


@pytest.mark.parametrize('turn', [0, 1, 3])
def test_events_build_the_final_output(serve, turn):
  """Items and ids of the stream are those of the last event."""
  gateway, _, records = serve(clients.TURNS[turn])
  events = events_of(gateway)
  order = [e['type'].removeprefix('response.') for e in events]
  assert order[:2] == ['created', 'in_progress'] and order[-1] == 'completed'
  assert build(events) == events[-1]['response']['output']
  plain = (
    clients.openai_of(gateway).responses.create(**ASK).model_dump(exclude_unset=True)
  )
  strip = (
    records[0].id.removeprefix('chatcmpl-'),
    records[1].id.removeprefix('chatcmpl-'),
  )
  streamed = json.loads(json.dumps(events[-1]['response']).replace(*strip))
  assert plain['output'] == streamed['output']
  assert plain.keys() == streamed.keys()
  for item in ('reasoning_text.delta', 'content_part.added', 'content_part.done'):
    assert item in order


def test_incomplete(serve):
  gateway, _, _ = serve(response_text('t', 'one two three four'))
  for limit, last in ((2, 'reasoning'), (8, 'message')):
    asked = {'max_output_tokens': limit}
    response = clients.openai_of(gateway).responses.create(**ASK | asked)
    assert response.status == 'incomplete'
    assert response.incomplete_details.reason == 'max_output_tokens'
    assert (response.output[-1].type, response.output[-1].status) == (
      last,
      'incomplete',
    )
    events = events_of(gateway, **asked)
    assert events[-1]['type'] == 'response.incomplete'
    assert build(events) == events[-1]['response']['output']


TOOLS = [
  SH,
  {
    'type': 'namespace',
    'name': 'mcp__files',
    'description': 'Files.',
    'tools': [
      {'type': 'function', 'name': 'read', 'parameters': {'properties': {'path': {}}}}
    ],
  },
  {
    'type': 'custom',
    'name': 'apply_patch',
    'description': 'Patch.',
    'format': {'type': 'grammar', 'syntax': 'lark', 'definition': 'start: "x"'},
  },
  {'type': 'web_search'},
]


PATCH = '*** Begin\n-a\n+b "c"\n'


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize(
  'arguments, patch',
  [
    ({'input': PATCH}, PATCH),
    ({'patch': PATCH}, PATCH),  # openai/codex#16397: models name it otherwise
    ({'why': 'x', 'input': PATCH}, PATCH),
    ({'why': 'x', 'patch': PATCH}, json.dumps({'why': 'x', 'patch': PATCH})),
    ({}, ''),
  ],
)
def test_tools_come_back_as_they_were_declared(serve, tok, stream, arguments, patch):
  """Namespaces and custom tools are the model's functions, and the client's own."""
  calls = [('mcp__files__read', {'path': 'x'}), ('apply_patch', arguments)]
  gateway, _, records = serve(response_text('t', '', calls))
  items = [*QUESTION]
  for _ in range(2):
    asked = {'tools': TOOLS, 'input': items}
    if stream:
      response = events_of(gateway, **asked)[-1]['response']
    else:
      made = clients.openai_of(gateway).responses.create(**ASK | asked)
      response = made.model_dump(exclude_unset=True)
    read, custom = response['output'][-2:]
    assert (read['type'], read['namespace'], read['name']) == (
      'function_call', 'mcp__files', 'read'
    )  # fmt: skip
    assert read['arguments'] == '{"path": "x"}'
    assert (custom['type'], custom['name']) == ('custom_tool_call', 'apply_patch')
    assert custom['input'] == patch
    assert response['tools'] == TOOLS
    items += response['output']
    items += [
      {'type': 'function_call_output', 'call_id': read['call_id'], 'output': 'y'},
      {
        'type': 'custom_tool_call_output',
        'call_id': custom['call_id'],
        'output': [
          {'type': 'input_text', 'text': 'do'},
          {'type': 'text', 'text': 'ne'},
        ],
      },
    ]
  clients.assert_extends(records)
  prompt = tok.decode(records[1].prompt_ids)
  assert 'start: \\"x\\"' in prompt and 'Files.' in prompt and 'done' in prompt
  assert 'strict' not in prompt and 'web_search' not in prompt
  assert gateway.counters()['ignored_total{field="tools.web_search"}'] == 2


BAD = [
  ({'model': None}, 'model'),
  ({'input': None}, 'input'),
  ({'input': []}, 'input'),
  ({'input': [3]}, 'input[0]'),
  ({'input': [{'role': 'tool', 'content': 'x'}]}, 'input[0].role'),
  ({'input': [{'role': [], 'content': 'x'}]}, 'input[0].role'),
  ({'input': [{'role': 'user', 'content': [{'type': 'input_image'}]}]},
   'input[0].content[0]'),
  ({'input': [{'type': 'item_reference', 'id': 'x'}]}, 'input[0]'),
  ({'input': [{'type': 'computer_call'}]}, 'input[0].type'),
  ({'input': [{'type': 'function_call', 'name': 'f', 'call_id': 'a',
               'arguments': '[1]'}]}, 'input[0].arguments'),
  ({'input': [{'type': 'function_call_output', 'output': 'x'}]}, 'input[0].call_id'),
  ({'previous_response_id': 'resp_1'}, 'previous_response_id'),
  ({'store': True}, 'store'),
  ({'background': True}, 'background'),
  ({'conversation': 'c'}, 'conversation'),
  ({'text': {'format': {'type': 'json_schema'}}}, 'text.format.schema'),
  ({'include': ['message.output_text.logprobs']}, 'include'),
  ({'top_logprobs': 2}, 'top_logprobs'),
  ({'tools': [{'type': 'wish'}]}, 'tools[0].type'),
  ({'tools': [SH, SH]}, 'tools[1].name'),
  ({'tools': [{'type': 'custom', 'name': 'x', 'format': {'type': 'y'}}]},
   'tools[0].format.type'),
  ({'tool_choice': 'maybe'}, 'tool_choice'),
  ({'tool_choice': 'function'}, 'tool_choice'),
  ({'tool_choice': {'type': 'function', 'name': 'g'}}, 'tool_choice.name'),
  ({'max_output_tokens': 0}, 'max_output_tokens'),
]  # fmt: skip


@pytest.mark.parametrize('fields, param', BAD)
def test_bad_requests_name_the_field(fields, param):
  with pytest.raises(ApiError) as error:
    dialects.DIALECTS['responses'].parse(ASK | fields)
  assert (error.value.status, error.value.param) == (400, param)


def test_developer_items_stay_in_their_places():
  """Those at the beginning join the instructions; a later one is not hoisted."""
  late = {'type': 'message', 'role': 'developer', 'content': 'late'}
  items = [{'role': 'developer', 'content': 'b'}, *QUESTION]
  items += [{'role': 'assistant', 'content': [{'type': 'output_text', 'text': 'c'}]}]
  parse = dialects.DIALECTS['responses'].parse
  _, messages = parse(ASK | {'instructions': 'a', 'input': [*items, late]})
  assert [(m['role'], m['content']) for m in messages] == [
    ('system', 'a\n\nb'),
    ('user', clients.QUESTION),
    ('assistant', 'c'),
    ('system', 'late'),
  ]


def test_what_has_no_effect_is_counted():
  request, _ = dialects.DIALECTS['responses'].parse(
    ASK
    | {
      'include': ['reasoning.encrypted_content', 'web_search_call.results'],
      'text': {'verbosity': 'low'},
      'parallel_tool_calls': True,
      'prompt_cache_key': 'k',
      'tools': [SH | {'strict': True}],
      'new': 1,
    }
  )
  assert sorted(request.ignored) == [
    'include', 'parallel_tool_calls', 'prompt_cache_key', 'text', 'tools', 'unknown'
  ]  # fmt: skip
  request, _ = dialects.DIALECTS['responses'].parse(ASK)  # strict: False is what it is
  assert request.ignored == ()


def test_reasoning_of_others():
  """A summary counts as reasoning; what another server encrypted is counted as lost."""
  parse = dialects.DIALECTS['responses'].parse
  summary = {'summary': [{'type': 'summary_text', 'text': 'short'}]}
  for extra, reasoning, ignored in (
    ({}, 'short', ()),
    ({'encrypted_content': 'gAAAA'}, 'short', ('encrypted_content',)),
    ({'encrypted_content': 'm2jax:?'}, 'short', ('encrypted_content',)),
    ({'content': [{'type': 'reasoning_text', 'text': 'long'}]}, 'long', ()),
  ):
    item = {'type': 'reasoning', 'id': 'x', **summary, **extra}
    request, messages = parse(ASK | {'input': [*QUESTION, item]})
    assert messages[-1]['reasoning_content'] == reasoning
    assert request.ignored == ignored


def test_errors_have_the_codes_that_codex_reads(serve):
  gateway, engine, _ = serve(
    RuntimeError('device lost'), engine_options={'context_tokens': 300}
  )
  client = clients.openai_of(gateway)
  long = [{'role': 'user', 'content': '~ ' * 3000}]
  with pytest.raises(openai.BadRequestError) as error:
    client.responses.create(**ASK | {'input': long})
  assert error.value.code == 'context_length_exceeded'
  created, failed = events_of(gateway, input=long)
  assert created['type'] == 'response.created'
  assert failed['type'] == 'response.failed'
  assert failed['response']['error']['code'] == 'context_length_exceeded'
  assert '300' in failed['response']['error']['message']
  short = [{'role': 'user', 'content': 'hi'}]
  *_, failed = events_of(gateway, input=short, tools=[])
  assert failed['type'] == 'response.failed'
  assert failed['response']['error']['code'] == 'server_error'
