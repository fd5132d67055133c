"""The chat of a completion as a client sent it, in each dialect."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.agents import transcript
from m2jax.agents.transcript import Exchange
from m2jax.pool import atif
from tests.pool.test_data_pool import completion, trajectory

PATHS = {
  'openai_chat': '/v1/chat/completions',
  'anthropic': '/v1/messages',
  'responses': '/v1/responses',
}


@pytest.fixture(scope='module')
def tasks():
  """Client → the tool it has and the chat of its last request, as recorded."""
  from tests.gateway.external import recording, scripts

  found = {}
  for name, scenario in scripts.SCENARIOS.items():
    if scenario.script is scripts.task:
      client, (body, _) = scenario.command(), recording.load(name)[-1]
      exchange = Exchange(PATHS[client.dialect], body)
      found[name] = client.tool, transcript.of(exchange).messages
  return found


def test_real_clients(tasks):
  """Whatever their dialect: a call, two parallel calls, and the result of each."""
  for name, (tool, messages) in tasks.items():
    asked = [str(m['content']) for m in messages if m['role'] == 'user']
    assert any('count the lines of a.txt' in text for text in asked), name
    replies = [m for m in messages if m['role'] == 'assistant']
    called = [call for reply in replies for call in reply['tool_calls']]
    assert [len(reply['tool_calls']) for reply in replies] == [1, 2], name
    assert {call['function']['name'] for call in called} == {tool}, name
    assert 'wc -l a.txt' in called[0]['function']['arguments']
    results = [m['tool_call_id'] for m in messages if m['role'] == 'tool']
    assert results == [call['id'] for call in called], name
    if name in ('claude_code', 'codex'):
      assert [m['reasoning_content'] for m in replies] == ['I should look', 'both']
    assert trajectory('s', -1, messages=tuple(messages)).parallel_calls == (2, 3)
  assert {'claude_code', 'codex'} < set(tasks)


def test_their_replies_have_token_ids(tasks):
  """In ATIF, of the completions that the ids of the calls name."""
  for name, (_, messages) in tasks.items():
    ids = [
      'chatcmpl-' + m['tool_calls'][0]['id'].split('_')[1]
      for m in messages
      if m['role'] == 'assistant'
    ]
    ids.append('chatcmpl-last')
    turns = [completion('s', i, id=id_) for i, id_ in enumerate(ids)]
    document = atif.document(trajectory('s', -1, messages=tuple(messages)), turns)
    assert atif.unmatched(document) == (0, 1), name
    agent = [step for step in document['steps'] if step['source'] == 'agent']
    assert [len(step['observation']['results']) for step in agent] == [1, 2], name


def test_responses_of_one_completion_are_one_message():
  """Also with the outputs of its calls in between; and what was answered follows."""
  hexes = ['a' * 32, 'b' * 32]
  items = [
    {'role': 'developer', 'content': 'Use sh.'},
    {'type': 'message', 'role': 'user', 'content': [{'text': 'go'}, {'text': 'on'}]},
    {'type': 'reasoning', 'content': [{'type': 'reasoning_text', 'text': 'so'}]},
  ]
  for i in range(2):
    name = f'call_{hexes[0]}_{i}'
    items.append(
      {'type': 'function_call', 'call_id': name, 'name': 'sh', 'arguments': '{}'}
    )
    items.append({'type': 'function_call_output', 'call_id': name, 'output': f'{i}'})
  name = f'call_{hexes[1]}_0'
  items.append(
    {'type': 'custom_tool_call', 'call_id': name, 'name': 'patch', 'input': '*'}
  )
  items.append({'type': 'custom_tool_call_output', 'call_id': name, 'output': 'ok'})
  output = [{'type': 'message', 'role': 'assistant', 'content': [{'text': 'done'}]}]
  found = transcript.of(
    Exchange(PATHS['responses'], {'input': items}, {'output': output})
  ).messages
  roles = [message['role'] for message in found]
  assert roles == [
    *('system', 'user', 'assistant', 'tool', 'tool'),
    *('assistant', 'tool', 'assistant'),
  ]
  assert found[1]['content'] == 'go\non' and found[2]['reasoning_content'] == 'so'
  assert len(found[2]['tool_calls']) == 2
  [call] = found[5]['tool_calls']
  assert json.loads(call['function']['arguments']) == {'input': '*'}
  assert found[-1]['content'] == 'done'


def test_the_answer_of_anthropics():
  request = {'messages': [{'role': 'user', 'content': 'go'}]}
  response = {'content': [{'type': 'thinking', 'thinking': 'so'}, {'text': 'done'}]}
  found = transcript.of(Exchange(PATHS['anthropic'], request, response)).messages
  assert [m['role'] for m in found] == ['user', 'assistant']
  assert found[1]['content'] == 'done' and found[1]['reasoning_content'] == 'so'


ANY = st.recursive(
  st.none() | st.integers() | st.text(max_size=5),
  lambda x: st.lists(x, max_size=2) | st.dictionaries(st.text(max_size=5), x),
  max_leaves=3,
)
KINDS = (
  'message', 'reasoning', 'function_call', 'custom_tool_call', 'function_call_output',
  'text', 'thinking', 'tool_use', 'tool_result', 'x',
)  # fmt: skip
NAMES = (
  'content', 'call_id', 'name', 'arguments', 'input', 'output', 'id', 'tool_use_id',
  'thinking', 'text', 'summary',
)  # fmt: skip
BLOCK = st.fixed_dictionaries(
  {'type': st.sampled_from(KINDS) | ANY}, optional=dict.fromkeys(NAMES, ANY)
)
ITEM = st.fixed_dictionaries(
  {},
  optional={
    **dict.fromkeys(NAMES, ANY),
    'type': st.sampled_from(KINDS) | ANY,
    'role': st.sampled_from(['user', 'assistant', 'system', 'developer']) | ANY,
    'content': st.lists(BLOCK | ANY, max_size=3) | ANY,
  },
)


@given(
  st.sampled_from([PATHS['anthropic'], PATHS['responses']]),
  st.lists(ITEM | ANY, max_size=4) | ANY,
)
def test_whatever_a_client_sent(path, items):
  """Law 9: any JSON gives a chat of OpenAI messages that can be exported."""
  request = {'messages': items, 'input': items}
  response = {'content': items, 'output': items}
  found = transcript.of(Exchange(path, request, response)).messages
  t = trajectory('s', -1, messages=tuple(found))
  assert t.parallel_calls[1] >= 0
  document = json.loads(json.dumps(atif.document(t)))
  assert atif.read(document)[0].messages == t.messages
