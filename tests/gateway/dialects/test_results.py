"""The results of parallel calls: M2's template knows by their order whose they are."""

from __future__ import annotations

import pytest

from m2jax.gateway import dialects
from m2jax.gateway.errors import ApiError
from tests.gateway.conftest import SH

IDS = ('a', 'b')
USER = {'role': 'user', 'content': 'q'}


def chat(*results):
  calls = [
    {'id': i, 'type': 'function', 'function': {'name': 'sh', 'arguments': '{}'}}
    for i in IDS
  ]
  said = [{'role': 'tool', 'tool_call_id': i, 'content': text} for i, text in results]
  return {'messages': [USER, {'role': 'assistant', 'tool_calls': calls}, *said]}


def messages(*results):
  calls = [{'type': 'tool_use', 'id': i, 'name': 'sh', 'input': {}} for i in IDS]
  said = [
    {'type': 'tool_result', 'tool_use_id': i, 'content': text} for i, text in results
  ]
  reminder = {'type': 'text', 'text': '<system-reminder>r</system-reminder>'}
  said = [{'role': 'user', 'content': [*said, reminder]}]
  return {
    'max_tokens': 5,
    'messages': [USER, {'role': 'assistant', 'content': calls}, *said],
  }


def responses(*results):
  calls = [
    {'type': 'function_call', 'call_id': i, 'name': 'sh', 'arguments': '{}'}
    for i in IDS
  ]
  said = [
    {'type': 'function_call_output', 'call_id': i, 'output': text}
    for i, text in results
  ]
  return {'input': [USER, *calls, *said]}


BODIES = {'openai_chat': chat, 'anthropic': messages, 'responses': responses}
RIGHT, WRONG = (('a', 'A'), ('b', 'B')), (('b', 'B'), ('a', 'A'))


def parse(dialect, *results):
  body = {'model': 'm2jax', **BODIES[dialect](*results)}
  return dialects.DIALECTS[dialect].parse(body)


@pytest.mark.parametrize('dialect', BODIES)
def test_results_have_the_order_of_the_calls(dialect):
  """In whatever order they arrive: the prompt and the history are the same."""
  (request, shown), (other, again) = parse(dialect, *RIGHT), parse(dialect, *WRONG)
  assert [m['content'] for m in again if m['role'] == 'tool'] == ['A', 'B']
  assert again == shown and request.history == other.history
  if dialect == 'anthropic':  # a reminder joins the last result, whichever that is
    assert [m['role'] for m in again[2:]] == ['tool', 'tool', 'system']


@pytest.mark.parametrize(
  'results, match',
  [
    ((), "tool_calls.0.*result of 'a'"),
    ((('b', 'B'),), "tool_calls.0.*result of 'a'"),
    ((('a', 'A'),), "tool_calls.1.*result of 'b'"),
    ((('a', 'A'), ('z', 'Z')), "'z' is none of the calls"),
    ((('a', 'A'), ('a', 'A'), ('b', 'B')), "'a' is none of the calls"),
    ((*RIGHT, ('z', 'Z')), "'z' is none of the calls"),
    ((('a', 'A'), ('', 'B')), 'must not be empty'),
    ((('a', 'A'), (None, 'B')), 'must be a string'),
  ],
)
@pytest.mark.parametrize('dialect', BODIES)
def test_a_missing_or_unknown_result_is_refused(dialect, results, match):
  """As by the real services: another call's result would be read in its place."""
  with pytest.raises(ApiError, match=match) as found:
    parse(dialect, *results)
  assert found.value.status == 400


def test_a_call_without_an_id_is_refused():
  body = {'model': 'm2jax', **chat(*RIGHT)}
  del body['messages'][1]['tool_calls'][1]['id']
  with pytest.raises(ApiError) as found:
    dialects.DIALECTS['openai_chat'].parse(body)
  assert found.value.param == 'messages[1].tool_calls[1].id'


@pytest.mark.parametrize('dialect', BODIES)
def test_ids_may_return_in_a_later_turn(dialect):
  """Some agents count the calls of each turn anew."""
  body = {'model': 'm2jax', 'tools': [SH], **BODIES[dialect](*WRONG)}
  key = 'input' if dialect == 'responses' else 'messages'
  if dialect != 'openai_chat':
    del body['tools']
  body[key] = [*body[key], *body[key]]
  _, shown = dialects.DIALECTS[dialect].parse(body)
  assert [m['content'] for m in shown if m['role'] == 'tool'] == ['A', 'B'] * 2
