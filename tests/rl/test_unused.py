"""Which completions count as acted on, with the records of the real gateway."""

from __future__ import annotations

import itertools
import time

import httpx
import pytest

from m2jax.rl import rewards
from tests.gateway.conftest import SH, response_text, serve, tok

__all__ = ['serve', 'tok']


@pytest.fixture
def agent(serve, tok):
  """`ask(messages) -> message`, and the completions that the gateway recorded."""
  texts = (
    response_text(f'thought {i}', f'answer {i}', [('sh', {'cmd': f'wc {i}'})])
    for i in itertools.count()
  )
  gateway, _, records = serve(lambda request: tok.encode(next(texts)))

  def ask(messages, **fields):
    response = httpx.post(
      f'{gateway.base_url}/chat/completions',
      headers={'authorization': 'Bearer agent'},
      json={'model': 'm2jax', 'messages': messages, 'tools': [SH], **fields},
    )
    assert response.status_code == 200, response.text
    return response.json()['choices'][0]['message']

  return ask, records


def turns(records):
  """Turns of the completions that are trained."""
  return [c.turn for c in rewards.acted(records)]


def user(text):
  return {'role': 'user', 'content': text}


def result(message):
  """A tool message, after which the template retains thinking."""
  (made,) = message['tool_calls']
  return [{'role': 'tool', 'tool_call_id': made['id'], 'content': '3'}]


def instruction(message):
  """A user message after it, which ends that."""
  return [*result(message), user('go on')]


@pytest.mark.parametrize('after', [result, instruction])
def test_a_lost_answer_is_not_trained(agent, after):
  """A client that did not get the answer repeats the request, at the first turn and at
  a later one, whether or not the next prompt extends the recorded ids."""
  ask, records = agent
  first = [user('count')]
  ask(first)
  message = ask(first)
  second = [*first, message, *after(message)]
  ask(second)
  message = ask(second)
  ask([*second, message, *after(message)])
  assert [c.parent is None for c in records] == [True, True, *[after is not result] * 3]
  assert turns(records) == [1, 3, 4]


def test_a_clock_that_steps_back_trains_the_same_answer(agent, monkeypatch):
  """The order of requests is a counter's, and no completion ends before it starts."""
  ask, records = agent
  first, real = [user('count')], time.time
  ask(first)
  monkeypatch.setattr(time, 'time', lambda: real() - 3600)
  ask(first)
  assert turns(records) == [1]
  assert [c.request for c in records] == [0, 1]
  ask(first, n=2)
  assert sorted(c.request for c in records) == [0, 1, 2, 3]
  assert all(0 <= c.ended_s - c.started_s < 600 for c in records)
  assert records[0].started_s < records[1].started_s


@pytest.mark.parametrize('after', [result, instruction])
def test_the_best_of_three_is_trained(agent, after):
  """Three samples, of which the agent continues the first."""
  ask, records = agent
  start = [user('count')]
  best, *_ = [ask(start) for _ in range(3)]
  ask([*start, best, *after(best)])
  assert turns(records) == [0, 3]


def test_clients_that_rewrite_history_are_trained_whole(agent):
  """Dropped reasoning, a compacted context and a sub-agent fork without a repetition:
  the agent acted on every completion."""
  ask, records = agent
  start = [user('count')]
  message = ask(start)
  message.pop('reasoning_content')
  ask([*start, message, *instruction(message)])
  ask([user('a summary of the work so far')])
  ask([user('you are a sub-agent')])
  ask([user('a summary of the work so far'), user('go on')])
  assert [c.fork_reason is None for c in records] == [True] + [False] * 4
  assert turns(records) == [0, 1, 2, 3, 4]
