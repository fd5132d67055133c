"""The Jinja template of exported folders against `chat.render`."""

import json
import pathlib

import jinja2.sandbox
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.text import chat, chat_template

GOLDEN = pathlib.Path(__file__).parent / 'golden'
CASES = json.loads((GOLDEN / 'render.json').read_text(encoding='utf-8'))


class Refused(ValueError):
  """What the template raises."""


def _refuse(message):
  raise Refused(message)


def _compiled():
  """As transformers sets Jinja up: sandboxed, blocks trimmed, plain JSON."""
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True
  )
  environment.filters['tojson'] = lambda x: json.dumps(x, ensure_ascii=False)
  environment.globals['raise_exception'] = _refuse
  return environment.from_string(chat_template.source())


TEMPLATE = _compiled()


def render(messages, tools=None, add_generation_prompt=False):
  return TEMPLATE.render(
    messages=messages, tools=tools, add_generation_prompt=add_generation_prompt
  )


def with_objects(messages):
  """Arguments as objects: what is sent as JSON text only a client knows to parse."""
  messages = json.loads(json.dumps(messages))
  for message in messages:
    for call in message.get('tool_calls') or ():
      function = call.get('function', call)
      if isinstance(function.get('arguments'), str):
        function['arguments'] = json.loads(function['arguments'] or '{}')
  return messages


@pytest.mark.parametrize('case', CASES, ids=lambda case: case['name'])
def test_golden(case):
  """An exported folder prompts the model as it was trained, by an outside authority."""
  messages = with_objects(case['messages'])
  assert render(messages, case['tools'], case['add_generation_prompt']) == case['text']


_text = st.text(st.characters(codec='utf-8'), max_size=12)
_content = st.one_of(
  st.none(),
  _text,
  st.lists(st.one_of(_text, st.builds(lambda t: {'type': 'text', 'text': t}, _text))),
  st.builds('{}<think>\n{}\n</think>\n{}'.format, _text, _text, _text),
)
_values = st.one_of(_text, st.integers(), st.booleans(), st.lists(_text), st.none())
_function = st.fixed_dictionaries(
  {'name': st.text('abc', min_size=1)},
  optional={'arguments': st.dictionaries(st.text('xyz', min_size=1), _values)},
)
_call = st.one_of(_function, st.builds(lambda f: {'function': f}, _function))
_assistant = st.fixed_dictionaries(
  {'role': st.just('assistant'), 'content': _content},
  optional={'reasoning_content': _text, 'tool_calls': st.lists(_call, max_size=2)},
)


def _message(role):
  return st.fixed_dictionaries({'role': st.just(role), 'content': _content})


@st.composite
def _chats(draw):
  messages = []
  for _ in range(draw(st.integers(0, 2))):
    system = draw(_message(draw(st.sampled_from(['system', 'developer']))))
    if draw(st.booleans()):
      system['current_date'] = draw(_text)
    messages.append(system)
  called = False
  for _ in range(draw(st.integers(not messages, 6))):
    roles = ['user', 'assistant', 'system', 'tool']
    role = draw(st.sampled_from(roles[: 4 if called else 3]))
    messages.append(draw(_assistant if role == 'assistant' else _message(role)))
    if role == 'assistant':
      called = bool(messages[-1].get('tool_calls'))
  return messages


_tools = st.lists(
  st.fixed_dictionaries(
    {'name': st.text('abc', min_size=1), 'description': _text, 'strict': st.none()}
  ),
  max_size=2,
)


@given(_chats(), _tools, st.booleans())
def test_it_renders_what_chat_does(messages, tools, prompt):
  """The gateway and a program with the exported folder send the same prompt."""
  assert render(messages, tools, prompt) == chat.render(messages, tools, prompt)


@pytest.mark.parametrize(
  ('messages', 'match'),
  [
    ([{'role': 'user', 'content': [{'type': 'image'}]}], 'text parts only'),
    ([{'role': 'tool', 'content': 'a'}], 'tool_calls before it'),
    (
      [{'role': 'assistant', 'tool_calls': [{'name': 'f', 'arguments': '{}'}]}],
      'arguments of f',
    ),
  ],
)
def test_what_cannot_be_expressed_is_refused(messages, match):
  """Nothing is dropped in silence."""
  with pytest.raises(Refused, match=match):
    render(messages)
