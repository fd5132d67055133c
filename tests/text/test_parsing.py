"""The parser: inverts the template, ignores chunking, types values, never raises."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.text import chat, markup
from m2jax.text.parsing import Status

PLAIN = st.text('ab \n<>[]~é🙂', max_size=12)
GENERATED = st.lists(
  st.sampled_from(
    [
      *markup.SPECIAL_TOKENS,
      '\n',
      '\n\n',
      '<invoke name="sh">',
      '<invoke name=typed>',
      '</invoke>',
      '<parameter name="cmd">',
      '<parameter name="n">',
      '</parameter>',
      '<min',
      '[e~',
      '</thi',
      ' word',
      '7',
      'null',
    ]
  )
  | PLAIN,
  max_size=14,
).map(''.join)
TOOLS = [
  {'name': 'sh', 'parameters': {'properties': {'cmd': {'type': 'string'}}}},
  {
    'function': {
      'name': 'typed',
      'parameters': {'properties': {'n': {'type': 'integer'}}},
    }
  },
]


def call_text(name='sh', **parameters):
  lines = [f'<parameter name="{k}">{v}</parameter>\n' for k, v in parameters.items()]
  return f'<minimax:tool_call>\n<invoke name="{name}">\n{"".join(lines)}</invoke>\n' + (
    '</minimax:tool_call>'
  )


@settings(deadline=None, max_examples=150)
@given(reasoning=PLAIN, content=PLAIN, commands=st.lists(PLAIN, max_size=3))
def test_parse_inverts_render(reasoning, content, commands):
  """What the template writes must be read back, whitespace of prose included."""
  calls = [
    {'function': {'name': 'sh', 'arguments': {'cmd': command}}} for command in commands
  ]
  messages = [
    {'role': 'user', 'content': 'x'},
    {
      'role': 'assistant',
      'content': content,
      'reasoning_content': 'r' + reasoning,
      'tool_calls': calls,
    },
  ]
  text = ''.join(p.text for p in chat.segments(messages) if p.owned)
  message = chat.parse(text, TOOLS)
  assert message.reasoning == 'r' + reasoning
  assert message.content == content
  assert [c.arguments for c in message.tool_calls] == [
    {'cmd': command.strip()} for command in commands
  ]
  assert message.status == 'ok'


@settings(deadline=None, max_examples=400)
@given(GENERATED, st.data())
def test_chunking_changes_nothing(text, data):
  """A stream must end with what the whole text says, wherever the network cut it."""
  cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)) | {0})
  parser = chat.StreamParser(TOOLS)
  deltas = []
  for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
    deltas += parser.feed(text[start:end])
  deltas += parser.finish()
  whole = chat.parse(text, TOOLS)
  assert parser.message == whole
  joined = {'reasoning_content': '', 'content': ''}
  for delta in deltas:
    if delta.kind != 'tool_call':
      joined[delta.kind] += delta.text
  assert joined == {'reasoning_content': whole.reasoning, 'content': whole.content}
  calls = [delta.call for delta in deltas if delta.kind == 'tool_call']
  assert calls == list(whole.tool_calls)


@settings(deadline=None, max_examples=300)
@given(GENERATED)
def test_any_text_gives_a_message_that_can_be_sent(text):
  """The policy writes anything early in training; the gateway must answer in JSON."""
  message = chat.parse(text, TOOLS)
  sent = json.loads(json.dumps(message.to_openai()))
  for call in sent.get('tool_calls', []):
    assert isinstance(json.loads(call['function']['arguments']), dict)
  assert (message.status == 'ok') <= (not message.broken_calls)


def test_stream_sends_text_as_soon_as_it_cannot_be_markup():
  """Streaming that waits for the end would not be streaming."""
  parser = chat.StreamParser()
  assert parser.feed('I think') == [('reasoning_content', 'I think', None)]
  assert parser.feed('.\n</th') == [('reasoning_content', '.', None)]
  assert parser.feed('ink>\n\nFour') == [('content', 'Four', None)]
  assert parser.feed(' < five\n') == [('content', ' < five', None)]
  assert parser.feed('[e~[') == [('content', '\n', None)]
  assert parser.finish() == []
  with pytest.raises(ValueError, match='after finish'):
    parser.feed('more')


@pytest.mark.parametrize(
  ('text', 'status', 'calls', 'broken'),
  [
    ('r</think>done[e~[', Status.OK, 0, 0),
    ('r</think>' + call_text(cmd='ls'), Status.OK, 1, 0),
    ('r</think>' + call_text('typed', n='many'), Status.INVALID_JSON, 1, 0),
    (
      'r</think><minimax:tool_call></minimax:tool_call>',
      Status.MALFORMED_STRUCTURE,
      0,
      1,
    ),
    ('r</think>' + call_text(cmd='a') + ' and then', Status.MALFORMED_STRUCTURE, 1, 1),
    (
      'r</think>' + call_text(cmd='a').replace('</parameter>', ''),
      Status.MALFORMED_STRUCTURE,
      0,
      1,
    ),
    (
      'r</think>' + call_text(cmd='a').replace('</invoke>\n', '</invoke> so\n'),
      Status.MALFORMED_STRUCTURE,
      1,
      1,
    ),
    ('r</think>' + call_text(cmd='a')[:-9], Status.UNCLOSED_BLOCK, 0, 1),
    (
      'r</think>' + call_text(cmd='a') + call_text(cmd='b')[:-9],
      Status.UNCLOSED_BLOCK,
      1,
      1,
    ),
    ('never closed', Status.UNCLOSED_THINKING, 0, 0),
    ('go\n' + call_text(cmd='a'), Status.UNCLOSED_THINKING, 1, 0),
  ],
)
def test_statuses(text, status, calls, broken):
  """The process reward reads the verdict; only whole calls may reach a sandbox."""
  message = chat.parse(text, TOOLS)
  assert message.status == status
  assert len(message.tool_calls) == calls
  assert len(message.broken_calls) == broken
  assert all(c.status in ('ok', 'invalid_json') for c in message.tool_calls)


@pytest.mark.parametrize(
  ('schema', 'text', 'value'),
  [
    ({'type': 'integer'}, '12', 12),
    ({'type': 'number'}, '2.5', 2.5),
    ({'type': 'number'}, '2.0', 2),
    ({'type': 'boolean'}, 'Yes', True),
    ({'type': 'boolean'}, '0', False),
    ({'type': 'object'}, '{"a": [1]}', {'a': [1]}),
    ({'type': 'array'}, '["x"]', ['x']),
    ({'type': 'string'}, '12', '12'),
    ({'type': 'string'}, 'None', 'None'),
    ({'type': ['string', 'null']}, 'null', None),
    ({'type': ['string', 'null']}, 'ls', 'ls'),
    ({'type': ['string', 'integer']}, '7', 7),
    ({'type': ['string', 'integer']}, 'x', 'x'),
    ({'anyOf': [{'type': 'integer'}, {'type': 'null'}]}, 'nil', None),
    ({'anyOf': [{'type': 'integer'}, {'type': 'null'}]}, '3', 3),
    ({'enum': [1, 2]}, '2', 2),
    ({'enum': ['a', 'b']}, '2', '2'),
    ({'$ref': '#/x'}, '{"a": 1}', {'a': 1}),
    ({}, '12', '12'),
    (None, 'true', 'true'),
  ],
)
def test_types(schema, text, value):
  """An agent's tool gets the type its schema declares; a string stays a string."""
  properties = {} if schema is None else {'p': schema}
  tools = [{'name': 'f', 'parameters': {'properties': properties}}]
  message = chat.parse('r</think>' + call_text('f', p=text), tools)
  (call,) = message.tool_calls
  assert call.arguments == {'p': value}
  assert type(call.arguments['p']) is type(value)
  assert message.status == 'ok'


@pytest.mark.parametrize(
  ('kind', 'text'),
  [
    ('integer', 'x'),
    ('number', 'nan'),
    ('number', '1e999'),
    ('boolean', 'maybe'),
    ('object', '[1]'),
    ('array', '[' * 100_000),
    ('object', '{"a": NaN}'),
    ('object', '{"a": "\\ud800"}'),
  ],
)
def test_unfit_values_stay_text(kind, text):
  """What cannot be typed is delivered as text and counted, and never breaks JSON."""
  tools = [{'name': 'f', 'parameters': {'properties': {'p': {'type': kind}}}}]
  message = chat.parse('r</think>' + call_text('f', p=text), tools)
  (call,) = message.tool_calls
  assert call.status == message.status == 'invalid_json'
  assert call.arguments['p'] == text or kind == 'object' and text == '[1]'
  json.loads(json.dumps(call.to_openai())).items()


def test_hostile_text_takes_linear_time():
  """A response of a million characters must not stop the gateway."""
  for text in (
    'r</think><minimax:tool_call>' + '<invoke name=' * 80_000 + '</minimax:tool_call>',
    'r</think><minimax:tool_call><invoke name="a">'
    + '<parameter name="b">' * 50_000
    + '</invoke></minimax:tool_call>',
    '<minimax:tool_call>' * 50_000,
    '\n' * 1_000_000,
  ):
    start = time.process_time()
    chat.parse(text, TOOLS)
    assert time.process_time() - start < 2
