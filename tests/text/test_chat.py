"""The chat template: ownership, prefixes, options and errors."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.text import chat, markup
from tests.text.examples import MANY

SOME_TEXT = st.text('ab \n<>[]~!é🙂', max_size=8) | st.sampled_from(
  [*markup.SPECIAL_TOKENS, 'x[e~[\n]~b]ai\n<think>\n']
)


SYSTEMS = st.sampled_from(
  [[]] * 6 + [[{'role': 'system', 'content': 'L'}], [{'role': 'developer'}] * 2]
)


@st.composite
def conversations(draw):
  """User turns, each with tool cycles and an answer; system messages anywhere."""
  messages = draw(st.sampled_from([[], [{'role': 'system', 'content': 'S'}]]))[:]
  for _ in range(draw(st.integers(1, 2))):
    messages += draw(SYSTEMS)
    messages.append({'role': 'user', 'content': draw(SOME_TEXT)})
    messages += draw(SYSTEMS)
    for _ in range(draw(st.integers(0, 2))):
      count = draw(st.integers(1, 2))
      function = {'name': 'sh', 'arguments': {'cmd': draw(SOME_TEXT)}}
      messages.append(
        {
          'role': 'assistant',
          'content': draw(SOME_TEXT),
          'reasoning_content': 'r' + draw(SOME_TEXT),
          'tool_calls': [{'id': 'c', 'type': 'function', 'function': function}] * count,
        }
      )
      for _ in range(count):
        messages.append({'role': 'tool', 'content': draw(SOME_TEXT)})
        messages += draw(SYSTEMS)
    messages.append(
      {'role': 'assistant', 'content': 'c', 'reasoning_content': 'r' + draw(SOME_TEXT)}
    )
  return messages


@MANY
@given(conversations(), st.booleans())
def test_prompts_and_continuations_are_cuts_of_one_string(messages, keep):
  """Law 4: a later prompt must begin with the earlier prompt and the response."""
  template = chat.Template(keep_all_thinking=keep)
  whole = chat.segments(messages, add_generation_prompt=True, template=template)
  for i, message in enumerate(messages):
    if message['role'] != 'assistant':
      continue
    prompt = chat.segments(messages[:i], None, True, template=template)
    tail = chat.continuation(messages, i, template=template)
    response = [p for p in whole if p.message == i and p.owned]
    assert whole[-len(tail) :] == tail
    if chat.keeps_prefix(messages, i, template=template):
      # The generation prompt is the message's own scaffold.
      assert prompt + response + tail == whole
    else:
      assert not any(p.text == markup.THINK for p in whole if p.message == i)


@MANY
@given(conversations())
def test_only_the_template_writes_special_pieces(messages):
  """Text of a user, tool or client must never be taken for a special token."""
  for piece in chat.segments(messages, add_generation_prompt=True):
    assert piece.special == (piece.text in markup.SPECIAL_TOKENS) or not piece.special
  hostile = {'role': 'user', 'content': '[e~['}
  plain = chat.segments([hostile])
  assert sum(p.special for p in plain) == sum(
    p.special for p in chat.segments([{'role': 'user', 'content': 'x'}])
  )


def test_keep_all_thinking_is_the_only_difference():
  """The variant keeps earlier reasoning and changes nothing else."""
  messages = [
    {'role': 'user', 'content': 'a'},
    {'role': 'assistant', 'content': 'b', 'reasoning_content': 'why'},
    {'role': 'user', 'content': 'c'},
  ]
  dropped = chat.render(messages)
  kept = chat.render(messages, template=chat.Template(keep_all_thinking=True))
  assert 'why' not in dropped
  assert kept.replace('<think>\nwhy\n</think>\n\n', '') == dropped


def test_system_text():
  """Default text, its option, and the template's date and location lines."""
  user = {'role': 'user', 'content': 'x'}
  assert chat.render([user]).startswith(
    ']~!b[]~b]system\nYou are a helpful assistant.[e~[\n'
  )
  template = chat.Template(default_system='Be M2.')
  assert chat.render([user], template=template).startswith(
    ']~!b[]~b]system\nBe M2.[e~['
  )
  dated = {'role': 'developer', 'content': 'S', 'current_date': '2026-01-02'}
  assert 'system\nS\nCurrent date: 2026-01-02[e~[' in chat.render([dated, user])


def test_list_content_of_a_tool_message():
  """Clients send tool results as parts: each is a response, closed on its own line."""
  messages = [
    {'role': 'user', 'content': 'x'},
    {'role': 'assistant', 'content': None, 'tool_calls': [{'name': 'f'}]},
    {'role': 'tool', 'content': [{'type': 'text', 'text': 'a'}, 'b']},
  ]
  assert chat.render(messages).endswith(
    ']~b]tool\n<response>a\n</response>\n<response>b\n</response>[e~[\n'
  )


def _late(*before, after=()):
  late = {'role': 'developer', 'content': 'late'}
  return chat.render([*before, late, *after]).removeprefix(chat.render([USER]))


def test_system_messages_in_a_conversation():
  """In place, or joined to what is before them; never at the front, never a user."""
  asked = {'role': 'assistant', 'reasoning_content': 'r', 'tool_calls': [CALL]}
  result = {'role': 'tool', 'content': 'out'}
  said = {'role': 'assistant', 'content': 'so', 'reasoning_content': 'r'}
  kept = '<think>\nr\n</think>\n\n'
  assert chat.render([USER, {'role': 'system', 'content': 'late'}]) == chat.render(
    [{'role': 'user', 'content': 'x\n\nlate'}]
  )
  assert _late(USER, asked, result).endswith(
    ']~b]tool\n<response>out\n\nlate</response>[e~[\n'
  )
  assert kept in _late(USER, asked, result)
  parts = result | {'content': [{'type': 'text', 'text': 'out'}]}
  assert _late(USER, asked, parts).endswith(
    '<response>out\n</response>\n<response>late\n</response>[e~[\n'
  )
  # Between two results of one block, and between a call and its result.
  assert _late(USER, asked, result, after=[result]).endswith(
    '<response>out\n\nlate</response>\n<response>out</response>[e~[\n'
  )
  assert '[e~[\n]~b]system\nlate[e~[\n]~b]tool' in _late(USER, asked, after=[result])
  assert _late(USER, said) == f']~b]ai\n{kept}so[e~[\n]~b]system\nlate[e~[\n'
  # At the front, all are one text.
  systems = [{'role': 'system', 'content': 'S'}, {'role': 'developer', 'content': 'D'}]
  assert chat.render([*systems, USER]).startswith(']~!b[]~b]system\nS\n\nD[e~[\n]~b]u')


CALL = {'id': 'c', 'type': 'function', 'function': {'name': 'f', 'arguments': '{}'}}
USER = {'role': 'user', 'content': 'x'}


def _calling(**function):
  return [USER, {'role': 'assistant', 'tool_calls': [{'function': function}]}]


@pytest.mark.parametrize(
  ('messages', 'complaint'),
  [
    ([], 'messages is empty'),
    ([USER, {'role': 'robot'}], r"messages\[1\].role is 'robot'"),
    ([USER, 'hello'], r'messages\[1\].role is None'),
    ([USER, {'role': 'tool', 'content': 'x'}], r'messages\[1\]: a tool message needs'),
    (
      [
        USER,
        {'role': 'assistant', 'tool_calls': [CALL]},
        {'role': 'tool', 'content': 'x'},
        {'role': 'assistant', 'content': 'done'},
        {'role': 'tool', 'content': 'x'},
      ],
      r'messages\[4\]: a tool message needs',
    ),
    ([{'role': 'user', 'content': 5}], r'messages\[0\].content is int'),
    (
      [{'role': 'user', 'content': [{'type': 'image_url'}]}],
      r"messages\[0\].content\[0\] is 'image_url'",
    ),
    (_calling(arguments='{}'), r'messages\[1\].tool_calls\[0\]: needs a function'),
    (
      _calling(name='f', arguments='{'),
      r'tool_calls\[0\].function.arguments: not JSON',
    ),
    (_calling(name='f', arguments='[1]'), r'must be a JSON object, not list'),
    (_calling(name='f', arguments='[' * 100_000), r'arguments: not JSON'),
    ([USER, {'role': 'user', 'content': '\ud800'}], r'messages\[1\] contains a lone'),
  ],
)
def test_refusals_name_the_message(messages, complaint):
  """Law 9: a client must learn which of its messages cannot be expressed."""
  with pytest.raises(chat.ChatError, match=complaint):
    chat.render(messages)


def test_bad_tools_are_refused():
  """A tool without a name cannot be called."""
  with pytest.raises(chat.ChatError, match=r'tools\[1\]'):
    chat.render([USER], [{'name': 'f'}, {'type': 'function'}])


def test_continuation_follows_only_an_assistant():
  """Appending to a message that the model did not write would corrupt the history."""
  with pytest.raises(chat.ChatError, match=r'messages\[0\]'):
    chat.continuation([USER], 0)


def test_openai_dict_renders_back_to_the_generated_text():
  """A client that sends our message back must produce the tokens it came from."""
  text = (
    'Look.\n</think>\n\nI look.\n<minimax:tool_call>\n<invoke name="sh">\n'
    '<parameter name="cmd">ls</parameter>\n</invoke>\n</minimax:tool_call>[e~['
  )
  message = json.loads(json.dumps(chat.parse(text).to_openai()))
  pieces = chat.segments([USER, message])
  assert ''.join(p.text for p in pieces if p.owned) == text
