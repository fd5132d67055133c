"""Bugs of other servers, one case each, so that they are never ours.

Source: facts/clients-and-peers.md §1 and facts/rl-systems.md §5, row 13. The gateway's
are in tests/gateway/test_prefixes.py.
"""

import json

import pytest

from m2jax.text import chat
from m2jax.text.parsing import pieces

USER = {'role': 'user', 'content': 'x'}


def parameters(**properties):
  return [{'name': 'f', 'parameters': {'properties': properties}}]


def call(**values):
  lines = ''.join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in values.items())
  invoke = f'<invoke name="f">\n{lines}</invoke>\n'
  return f'<minimax:tool_call>\n{invoke}</minimax:tool_call>'


def stream(text, tools=None):
  """Kinds and texts of the deltas, fed a character at a time."""
  parser = chat.StreamParser(tools)
  deltas = []
  for piece in pieces(text):
    for part in [piece.text] if piece.special else piece.text:
      deltas += parser.feed([chat.Piece(part, piece.special)])
  return deltas + parser.finish()


def joined(deltas, kind):
  return ''.join(delta.text for delta in deltas if delta.kind == kind)


@pytest.mark.parametrize(
  ('text', 'reasoning', 'content'),
  [
    ('a\nb\n</think>\n\nc', 'a\nb', 'c'),
    ('</think>c', '', 'c'),
    ('a</think>c <think>d', 'a', 'c <think>d'),
    ('a\n', 'a\n', ''),
    ('a</think>\n\n\n<minimax:tool_call></minimax:tool_call>', 'a', ''),
  ],
)
def test_thinking_is_neither_swallowed_nor_misplaced(text, reasoning, content):
  """sglang#26795, sglang#25876: deltas of the thinking lost, or sent as content."""
  deltas = stream(text)
  assert joined(deltas, 'reasoning_content') == reasoning
  assert joined(deltas, 'content') == content


def test_thinking_opens_after_a_tool_result():
  """vllm#35349: after a tool result the prompt had no <think>, so none was parsed."""
  calls = [{'function': {'name': 'f', 'arguments': {}}}]
  messages = [USER, {'role': 'assistant', 'tool_calls': calls}]
  messages.append({'role': 'tool', 'content': 'r'})
  assert chat.render(messages, add_generation_prompt=True).endswith(
    '<response>r</response>[e~[\n]~b]ai\n<think>\n'
  )


@pytest.mark.parametrize('text', ['none', 'None', 'nil', 'NULL', 'Null'])
def test_only_null_is_null(text):
  """vllm#39599: strings that look like other languages' null became None."""
  for schema in ({'type': 'string'}, {'type': ['string', 'null']}, {'type': 'any'}):
    (parsed,) = chat.parse('</think>' + call(p=text), parameters(p=schema)).tool_calls
    assert parsed.arguments == {'p': text}


@pytest.mark.parametrize('text', ['12', '1.0', 'true', '[1]', '{"a": 1}', '1e5'])
def test_strings_stay_strings(text):
  """smg#1743: arguments of type string were read as numbers, booleans, JSON."""
  tools = parameters(p={'type': 'string'})
  (parsed,) = chat.parse('</think>' + call(p=text, q=text), tools).tool_calls
  assert parsed.arguments == {'p': text, 'q': text}


def test_a_call_has_its_name_and_its_arguments_once():
  """sglang#23071: a null name, and arguments repeated in later deltas."""
  deltas = [d for d in stream('</think>' + call(p='1') + call(p='2')) if d.call]
  assert [json.loads(d.call.to_openai()['function']['arguments']) for d in deltas] == [
    {'p': '1'},
    {'p': '2'},
  ]
  assert {d.call.name for d in deltas} == {'f'}
  assert len({d.call.id for d in deltas}) == 2


def test_a_raw_closing_tag_is_kept():
  """vllm#44060: a </parameter> inside a value cut it short (M2.1: test_invokes)."""
  value = "grep '</parameter>' a.xml && ls"
  (parsed,) = chat.parse('</think>' + call(p=value)).tool_calls
  assert parsed.arguments == {'p': value}


def test_servers_fields_of_a_tool_are_not_in_the_prompt():
  """A tool's `strict` cost 150 tokens where 41 do, and changed the prompt."""
  function = {'name': 'f', 'description': 'd', 'parameters': {'type': 'object'}}
  tool = {'type': 'function', 'function': function}
  extra = {'strict': True, 'cache_control': {'type': 'ephemeral'}, 'defer_loading': 1}
  noisy = {'type': 'function', 'function': function | extra, **extra}
  assert chat.render([USER], [noisy]) == chat.render([USER], [tool])
  assert chat.render([USER], [function | extra]) == chat.render([USER], [tool])


def test_a_late_system_message_stays_late():
  """ollama#18431, vllm#44602: moved to the front it changes every prompt's start."""
  calls = [{'function': {'name': 'f', 'arguments': {}}}]
  cycle = [
    USER,
    {'role': 'assistant', 'reasoning_content': 'why', 'tool_calls': calls},
    {'role': 'tool', 'content': 'r'},
  ]
  late = [*cycle, {'role': 'system', 'content': '<total_tokens>9</total_tokens>'}]
  before, after = chat.render(cycle), chat.render(late)
  assert after == before.replace('r</resp', 'r\n\n<total_tokens>9</total_tokens></resp')
  assert '<think>\nwhy' in after


@pytest.mark.parametrize('version', ['m2', 'm2.1'])
def test_strings_keep_white_space_at_their_ends(version):
  """vllm#48846: tools that edit files match a text exactly. Other types ignore it."""
  types = {'s': 'string', 'n': 'integer', 'o': 'object', 'x': ['integer', 'string']}
  tools = parameters(**{key: {'type': kind} for key, kind in types.items()}, any={})
  text = '    if ready:\n        go()\n'
  values = {'s': text, 'n': '\n3 ', 'o': ' {"a": 1}\n', 'x': ' 3', 'any': '[1]\n'}
  (found,) = chat.parse('</think>' + call(**values), tools, version).tool_calls
  typed = {'n': 3, 'o': {'a': 1}}
  assert found.arguments == values | typed and found.status == 'ok'
