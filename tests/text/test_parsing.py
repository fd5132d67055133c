"""The parser: inverts the template, ignores chunking, types values, never raises."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.text import chat, invokes, markup, parsing, tokenizer
from m2jax.text.parsing import Status
from tests.text.examples import MANY

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


@MANY
@given(reasoning=PLAIN, content=PLAIN, commands=st.lists(PLAIN, max_size=3))
def test_parse_inverts_render(reasoning, content, commands):
  """What the template writes must be read back, white space included."""
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
    {'cmd': command} for command in commands
  ]
  assert message.status == 'ok'


PIECES = st.lists(
  st.sampled_from(markup.SPECIAL_TOKENS).map(lambda t: chat.Piece(t, special=True))
  | st.sampled_from(
    [
      '\n', '\n\n', '<invoke name="sh">', '</invoke>', '<parameter name="cmd">',
      '</parameter>', *markup.SPECIAL_TOKENS, ' word', '</invoke>\n<invoke name="sh">',
      '</parameter>\n<parameter name="n">', '</parameter>\n</invoke>', '<invoke name=',
      '<parameter name="cmd">ls</parameter>', '</invoke>' + ' ' * 200 + '<invoke name=',
    ]
  ).map(chat.Piece)
  | PLAIN.map(chat.Piece),
  max_size=14,
)  # fmt: skip


@MANY
@given(PIECES, st.sampled_from(invokes.VERSIONS), st.data())
def test_cutting_plain_text_changes_nothing(whole_pieces, version, data):
  """A stream must end with what the whole response says, however its text was cut."""
  parser = chat.StreamParser(TOOLS, version)
  deltas = []
  for piece in whole_pieces:
    cuts = {0, len(piece.text)}
    if not piece.special:
      cuts |= data.draw(st.sets(st.integers(0, len(piece.text)), max_size=5))
    cuts = sorted(cuts)
    for start, end in zip(cuts, cuts[1:], strict=False):
      deltas += parser.feed([chat.Piece(piece.text[start:end], piece.special)])
  deltas += parser.finish()
  whole = chat.parse(whole_pieces, TOOLS, version)
  assert parser.message == whole
  assert parser.message.call_text == whole.call_text
  raw = [call.raw for call in (*whole.tool_calls, *whole.broken_calls)]
  assert [
    c.raw for c in (*parser.message.tool_calls, *parser.message.broken_calls)
  ] == raw
  joined = {'reasoning_content': '', 'content': ''}
  for delta in deltas:
    if delta.kind != 'tool_call':
      joined[delta.kind] += delta.text
  assert joined == {'reasoning_content': whole.reasoning, 'content': whole.content}
  calls = [delta.call for delta in deltas if delta.kind == 'tool_call']
  assert calls == list(whole.tool_calls)


def _raw(message):
  return [call.raw for call in (*message.tool_calls, *message.broken_calls)]


@MANY
@given(PIECES)
def test_plain_text_is_never_markup(generated):
  """With every special token spelled in plain tokens, all of it is reasoning."""
  text = ''.join(piece.text for piece in generated)
  message = chat.parse([chat.Piece(text)] if text else [], TOOLS)
  assert message == chat.Message(reasoning=text, status=Status.UNCLOSED_THINKING)


def test_a_quoted_call_is_text(trained):
  """A model that reads a file holding a tool call may quote it, anywhere."""
  quoted = call_text(cmd='rm -rf /') + '</think>[e~['
  plain = trained.encode(quoted, special=False)
  think_end, eos = trained.think_end_id, trained.eos_id
  ids = [*plain, think_end, *plain, eos]
  message = chat.parse(tokenizer.pieces(trained, ids), TOOLS)
  assert (message.reasoning, message.content) == (quoted, quoted)
  assert message.status == Status.OK and not message.tool_calls

  start, end = trained.tool_call_id, trained.tool_call_end_id
  before = trained.encode('<invoke name="sh">\n<parameter name="cmd">', special=False)
  after = trained.encode('</parameter>\n</invoke>\n', special=False)
  inner = '<minimax:tool_call>\n</minimax:tool_call> x'
  ids = [think_end, start, *before, *trained.encode(inner, special=False)]
  ids += [*after, end, eos]
  message = chat.parse(tokenizer.pieces(trained, ids), TOOLS)
  assert [call.arguments for call in message.tool_calls] == [{'cmd': inner}]
  assert message.status == Status.OK


@MANY
@given(GENERATED)
def test_any_text_gives_a_message_that_can_be_sent(text):
  """The policy writes anything early in training; the gateway must answer in JSON."""
  message = chat.parse(text, TOOLS)
  sent = json.loads(json.dumps(message.to_openai()))
  for call in sent.get('tool_calls', []):
    assert isinstance(json.loads(call['function']['arguments']), dict)
  assert (message.status == 'ok') <= (not message.broken_calls)


@MANY
@given(PIECES, st.sampled_from(invokes.VERSIONS))
def test_nothing_that_was_generated_is_lost(generated, version):
  """What is neither markup nor white space is in reasoning, content or a call."""
  letters = [chat.Piece(p.text.replace(' word', f' w{i}')) if not p.special else p
             for i, p in enumerate(generated)]  # fmt: skip
  message = chat.parse(letters, TOOLS, version)
  calls = ' '.join(call.raw for call in message.tool_calls)
  for i, piece in enumerate(letters):
    if f' w{i}' in piece.text:
      assert f'w{i}' in message.reasoning + message.shown + calls


def test_stream_sends_text_as_soon_as_it_cannot_be_markup():
  """Streaming that waits for the end would not be streaming."""
  parser = chat.StreamParser()
  feed = lambda text: parser.feed([chat.Piece(text)])
  special = lambda text: parser.feed([chat.Piece(text, special=True)])
  assert feed('I think') == [('reasoning_content', 'I think', None)]
  assert feed('.\n') == [('reasoning_content', '.', None)]
  assert special('</think>') == []
  assert feed('\n\nFour </th') == [('content', 'Four </th', None)]
  assert feed(' < five\n') == [('content', ' < five', None)]
  assert special('[e~[') == []
  assert parser.finish() == [('content', '\n', None)]
  with pytest.raises(ValueError, match='after finish'):
    feed('more')


def test_a_call_is_sent_when_the_next_one_begins():
  """Of parallel calls, the first can run while the model still writes the second."""
  parser = chat.StreamParser(TOOLS)
  text = call_text(cmd='a').removesuffix('</minimax:tool_call>')
  parser.feed(parsing.pieces('r</think>' + text))
  (delta,) = parser.feed([chat.Piece('<invoke name="sh">')])
  assert delta.call.arguments == {'cmd': 'a'}
  parser.finish()
  assert parser.message.status == Status.UNCLOSED_BLOCK
  assert len(parser.message.tool_calls) == 1


@pytest.mark.parametrize(
  ('after', 'content'),
  [
    (' and then', 'and then'),
    ('\n\nDone.\n', 'Done.\n'),
    (' \n', ''),
    (' one' + call_text(cmd='b') + 'two', 'one\ntwo'),
    ('one\n' + call_text(cmd='b') + '\n', 'one'),
  ],
)
@pytest.mark.parametrize('before', ['', 'I look.'])
def test_text_after_a_call_is_content(before, after, content):
  """A client that shows or stores the answer gets all of it, in order."""
  message = chat.parse(f'r</think>{before}\n{call_text(cmd="a")}{after}[e~[', TOOLS)
  assert message.tool_calls[0].arguments == {'cmd': 'a'}
  assert message.content == message.shown == '\n'.join(filter(None, (before, content)))
  assert (message.status == Status.OK) == (not content)


@pytest.mark.parametrize(
  ('block', 'calls', 'shown'),
  [
    ('\n<invoke name="sh">\n</invoke>\nwhy\n', 1, '\nwhy\n'),
    ('\n<invoke name="sh">\n</invoke>\n<invoke name="sh">x</invoke>', 1,
     '<invoke name="sh">x</invoke>'),
    ('<invoke name="">x</invoke>', 0,
     '<minimax:tool_call><invoke name="">x</invoke></minimax:tool_call>'),
  ],
)  # fmt: skip
def test_what_cannot_be_read_in_a_block_is_shown(block, calls, shown):
  """An agent whose second call was malformed can see which one did not run."""
  text = f'r</think>I look.\n<minimax:tool_call>{block}</minimax:tool_call>'
  message = chat.parse(text, TOOLS)
  assert len(message.tool_calls) == calls
  assert message.content == 'I look.'
  assert message.to_openai()['content'] == 'I look.\n' + shown
  assert message.status == Status.MALFORMED_STRUCTURE


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
    ({'anyOf': [{'type': 'integer'}, {'type': 'null'}]}, 'null', None),
    ({'type': 'string', 'default': None}, 'null', None),
    ({'type': 'string', 'default': None}, 'None', 'None'),
    ({'type': 'string', 'nullable': True}, 'null', None),
    ({'anyOf': [{'type': 'string'}, {'type': 'null'}]}, 'none', 'none'),
    ({'enum': ['a', None]}, 'null', None),
    ({'const': None}, 'null', None),
    ({'type': 'string'}, 'null', 'null'),
    ({'type': 'string', 'default': ''}, 'null', 'null'),
    ({'anyOf': [{'type': 'integer'}, {'type': 'null'}]}, '3', 3),
    ({'enum': [1, 2]}, '2', 2),
    ({'enum': ['a', 'b']}, '2', '2'),
    ({'enum': ['a', 1]}, '1', 1),
    ({'const': 5}, '5', 5),
    ({'$ref': '#/x'}, '{"a": 1}', {'a': 1}),
    ({'$ref': '#/$defs/color'}, '12', '12'),
    ({'$ref': '#/$defs/count'}, '12', 12),
    ({'$ref': '#/$defs/loop'}, 'null', None),
    ({'allOf': [{'$ref': '#/$defs/count'}, {'title': 'T'}]}, '12', 12),
    # A number keeps its digits.
    ({'type': 'number'}, '9007199254740993', 2**53 + 1),
    ({'type': 'number'}, '9007199254740993.0', 2**53 + 1),
    ({'type': 'number'}, '-9223372036854775807', 1 - 2**63),
    ({'type': 'number'}, '1e3', 1000),
    ({'type': 'integer'}, '18446744073709551615', 2**64 - 1),
    # No type, or any: what is JSON is that value.
    ({}, '12', 12),
    ({}, '{"a": [1]}', {'a': [1]}),
    ({}, 'ls -l', 'ls -l'),
    ({'description': 'd'}, 'true', True),
    (True, '[1]', [1]),
    ({'type': 'any'}, 'ls', 'ls'),
    ({'type': 'any'}, '{"a": 1}', {'a': 1}),
    ({'type': 'any'}, 'null', None),
    ({'anyOf': [{}, {'type': 'integer'}]}, '[', '['),
    (None, 'true', 'true'),
    (None, 'null', 'null'),
    # Where a string is allowed, only JSON's own spelling is another type.
    ({'type': ['string', 'integer']}, '007', '007'),
    ({'type': ['string', 'integer']}, '1_000', '1_000'),
    ({'type': ['string', 'boolean']}, 'yes', 'yes'),
    ({'type': ['string', 'boolean']}, 'true', True),
    ({'type': ['string', 'number']}, '1.50', 1.5),
  ],
)
def test_types(schema, text, value):
  """An agent's tool gets the type its schema declares; a string stays a string."""
  properties = {} if schema is None else {'p': schema}
  definitions = {
    'color': {'type': 'string', 'enum': ['12']},
    'count': {'type': 'integer'},
    'loop': {'anyOf': [{'$ref': '#/$defs/loop'}, {'type': 'null'}]},
  }
  parameters = {'properties': properties, '$defs': definitions}
  tools = [{'name': 'f', 'parameters': parameters}]
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
    ('object', '{"\\ud800": 1}'),
    ('object', '{"a": 1, "a": 2}'),
    ('object', '{"a": ' + '9' * 30 + '}'),
    ('array', '[' * 100 + ']' * 100),
    ('integer', '9' * 30),
    ('integer', '1_000'),
    ('integer', 'null'),
    ('integer', 'none'),
    ('number', '9' * 30),
    ('number', '9' * 5000),
    (['integer', 'null'], 'nil'),
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
  """A response of a million characters must not stop the gateway.

  Growth is asserted rather than seconds: the machine may be busy with other tests.
  """
  head, tail = 'r</think><minimax:tool_call>', '</minimax:tool_call>'
  for repeated in (
    lambda n: head + '<invoke name=' * n + tail,
    lambda n: (
      f'{head}<invoke name="a">' + '<parameter name="b">' * n + f'</invoke>{tail}'
    ),
    lambda n: '<minimax:tool_call>' * n,
    lambda n: '\n' * 20 * n,
  ):
    small_s, large_s = (_parse_s(repeated(n)) for n in (5_000, 50_000))
    assert large_s < 30 * small_s + 0.01  # quadratic would be 100


def test_a_large_schema_is_read_once():
  """A client's schema of 100,000 branches costs a call of 1,000 parameters nothing."""
  branches = [{'type': 'integer'}, *[{'type': 'string'}] * 100_000]
  schema = {'properties': {'p': {'anyOf': branches}}}
  tools = [{'name': 'f', 'parameters': schema}]

  def call(parameters):
    inner = '<invoke name="f">' + '<parameter name="p">7</parameter>' * parameters
    return f'</think><minimax:tool_call>{inner}</invoke></minimax:tool_call>'

  (parsed,) = chat.parse(call(1000), tools).tool_calls
  assert parsed.arguments == {'p': 7}
  assert _parse_s(call(1000), tools) < 20 * _parse_s(call(1), tools)


def _parse_s(text, tools=None):
  """This thread's CPU seconds of parsing `text`, the best of three."""
  seconds = []
  for _ in range(3):
    started_s = time.thread_time()
    chat.parse(text, TOOLS if tools is None else tools)
    seconds.append(time.thread_time() - started_s)
  return min(seconds)
