"""Who may ask, how their requests are sampled, and what is remembered of them."""

import dataclasses
import socket
import threading
import time

import httpx
import pytest

from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.rollout.api import SamplingParams
from tests.gateway.conftest import HTTP, SH, response_text
from tests.gateway.scripted_engine import ScriptedEngine
from tests.waiting import wait_until

ANSWER = response_text('t', 'fine')


def ask(gateway, key='k', **fields):
  body = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'hi'}]} | fields
  return HTTP.post(
    f'{gateway.base_url}/chat/completions',
    json=body,
    headers={'authorization': f'Bearer {key}'},
  )


BENT = {
  'temperature': 0.2,
  'top_p': 0.5,
  'top_k': 3,
  'frequency_penalty': 1,
  'presence_penalty': 1,
  'repetition_penalty': 1.1,
  'min_p': 0.1,
  'logit_bias': {'5': 3},
}


def test_training_samples_the_policy_itself(serve):
  """Law 4: training samples untruncated at temperature 1, and counts overrides."""
  gateway, engine, records = serve(ANSWER, accept_unknown_keys=False)
  gateway.sessions.open('k', 'training')
  assert ask(gateway, **BENT, seed=3, max_tokens=9).status_code == 200
  assert (
    ask(gateway, temperature=1, top_p=1.0, top_k=-1, logit_bias={}).status_code == 200
  )
  assert ask(gateway).status_code == 200
  for request in engine.requests:
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert sampling.seed is None
  assert engine.requests[0].sampling.max_tokens == 9
  assert set(records[0].overrides) == {*BENT, 'seed'}
  assert records[1].overrides == records[2].overrides == ()
  for field in (*BENT, 'seed'):
    assert gateway.counters()[f'overrides_total{{field="{field}"}}'] == 1


def test_evaluation_samples_as_asked(serve, tok):
  """Evaluation applies every sampling field; absent ones have the defaults."""
  gateway, engine, records = serve(ANSWER, temperature=0.9, top_p=0.8, top_k=7)
  gateway.sessions.open('k', 'evaluation')
  assert ask(gateway).status_code == 200
  assert ask(gateway, temperature=0, top_p=0.3, top_k=0, seed=5).status_code == 200
  assert ask(gateway, **BENT).status_code == 200
  first, second, third = (dataclasses.asdict(r.sampling) for r in engine.requests)
  off = dataclasses.asdict(SamplingParams(1))
  shared = {'max_tokens': first['max_tokens'], 'stop_ids': (tok.eos_id,)}
  assert first == off | shared | {'temperature': 0.9, 'top_p': 0.8, 'top_k': 7}
  assert second == off | shared | {'temperature': 0, 'top_p': 0.3, 'seed': 5}
  assert third == off | shared | BENT | {'logit_bias': ((5, 3.0),)}
  assert [r.overrides for r in records] == [(), (), ()]


def test_keys(serve):
  """Only open keys are served; closing one ends its access at once."""
  gateway, _, _ = serve(ANSWER, accept_unknown_keys=False)
  assert ask(gateway).status_code == 401
  gateway.sessions.open('k')
  with pytest.raises(ValueError, match='open already'):
    gateway.sessions.open('k')
  assert ask(gateway).status_code == 200
  gateway.sessions.close('k')
  gateway.sessions.close('k')  # closing twice is no error: cleanup runs where it likes
  assert ask(gateway).status_code == 401
  for key in ('', 'a b', 'é', 'x' * 257, 'a\n'):
    with pytest.raises(ValueError, match='printable ASCII'):
      gateway.sessions.open(key)
  with pytest.raises(ValueError, match='training'):
    gateway.sessions.open('k2', 'train')


def test_unknown_sessions_are_bounded(serve):
  """A server open to any key forgets the least recently used, never the registered."""
  gateway, _, records = serve(ANSWER, max_unknown_sessions=2)
  gateway.sessions.open('mine', 'training')
  keys = ('mine', 'a', 'b', 'a', 'c', 'a', 'b', 'mine')
  for key in keys:
    assert ask(gateway, key).status_code == 200
  assert [record.turn for record in records] == [0, 0, 0, 1, 0, 2, 0, 1]
  names = dict.fromkeys(record.session for record in records)
  # b was forgotten, so that its last request is of a session of its own.
  mine, a, b, c, again = names
  assert [record.session for record in records] == [mine, a, b, a, c, a, again, mine]
  assert mine == 'mine' and not names.keys() & {'a', 'b', 'c'}
  assert len(gateway.sessions) == 3


def test_what_is_refused_evicts_nobody(serve):
  """A session begins when the engine has a request of it: errors open none, and so
  push none out."""
  gateway, engine, records = serve(
    ANSWER, max_unknown_sessions=2, engine_options={'context_tokens': 300}
  )
  for key in ('a', 'b'):
    assert ask(gateway, key).status_code == 200
  orphan = [{'role': 'user', 'content': 'x'}, {'role': 'tool', 'content': 'of no call'}]
  long = [{'role': 'user', 'content': 'a b ' * 200}]
  for i in range(20):
    for status, fields in (
      (404, {'model': 'other'}),
      (400, {'messages': []}),
      (400, {'messages': orphan}),
      (400, {'messages': long}),
      (400, {'logit_bias': {'five': 3}}),
    ):
      assert ask(gateway, f'unknown{i}', **fields).status_code == status
  engine.alive = False
  assert ask(gateway, 'unknown').status_code == 503
  engine.alive = True
  assert len(gateway.sessions) == 2
  for key in ('a', 'b'):
    assert ask(gateway, key).status_code == 200
  assert [record.turn for record in records] == [0, 0, 1, 1]


def converse(gateway, key, turns, messages=None):
  """Turns of one conversation, each with a tool's output; gives the messages."""
  messages = list(messages or [{'role': 'user', 'content': f'begin {key}'}])
  for _ in range(turns):
    reply = ask(gateway, key, messages=messages, tools=[SH])
    assert reply.status_code == 200, reply.text
    message = reply.json()['choices'][0]['message']
    call = message['tool_calls'][0]['id']
    messages += [message, {'role': 'tool', 'tool_call_id': call, 'content': 'x' * 50}]
  return messages


CALL = response_text('look', '', [('sh', {'cmd': 'ls'})])


def test_a_turn_keeps_its_new_tokens(serve):
  """What a session keeps grows with its text, not with the square of its turns."""
  gateway, _, records = serve(CALL, engine_options={'context_tokens': 1_000_000})
  session = gateway.sessions.open('k', 'training')
  messages, kept = None, []
  for _ in range(4):
    messages = converse(gateway, 'k', 25, messages)
    kept.append(session.size_bytes)
  assert all(record.parent for record in records[1:])
  steps = [b - a for a, b in zip(kept, kept[1:], strict=False)]
  assert max(steps) - min(steps) <= 0.02 * max(steps)
  assert kept[-1] < 4 * len(records[-1].prompt_ids) + 100 * 2000


def test_a_session_forgets_its_oldest_conversation(serve):
  """Beyond its limits a session forgets conversations, the least recently extended
  first: a request that would extend one is answered all the same, as a counted fork."""
  gateway, _, records = serve(CALL, max_session_completions=6)
  gateway.sessions.open('k', 'training')
  texts = [[{'role': 'user', 'content': name}] for name in 'abc']
  first = converse(gateway, 'k', 2, texts[0])
  second = converse(gateway, 'k', 2, texts[1])
  first = converse(gateway, 'k', 1, first)
  converse(gateway, 'k', 2, texts[2])  # the seventh: `second` is forgotten
  first = converse(gateway, 'k', 1, first)
  assert records[-1].parent == records[4].id
  converse(gateway, 'k', 1, second)
  assert (records[-1].parent, records[-1].fork_reason) == (None, 'forgotten')
  assert gateway.counters()['forks_total{reason="forgotten"}'] == 1
  assert [record.turn for record in records] == list(range(len(records)))


def test_bytes_of_sessions_are_bounded(serve):
  """One conversation beyond a session's bytes starts over; unknown sessions beyond
  what they may keep together are forgotten, the least recently used first."""
  gateway, _, records = serve(
    CALL,
    max_session_bytes=20_000,
    max_unknown_bytes=30_000,
    engine_options={'context_tokens': 1_000_000},
  )
  session = gateway.sessions.open('mine', 'training')
  converse(gateway, 'mine', 40)
  assert 'forgotten' in {record.fork_reason for record in records}
  assert session.size_bytes <= 20_000
  assert [record.turn for record in records] == list(range(40))
  history = {key: converse(gateway, key, 5) for key in 'abcdef'}
  assert 1 < len(gateway.sessions) < 7
  converse(gateway, 'f', 1, history['f'])
  assert records[-1].turn == 5
  converse(gateway, 'a', 1, history['a'])
  assert records[-1].turn == 0


def test_a_session_closed_in_flight_stays_closed(serve):
  """An episode that ends while its agent still asks leaves nothing behind."""
  gateway, engine, records = serve(CALL, engine_options={'delay_s': 0.1})
  gateway.sessions.open('k', 'training')
  thread = threading.Thread(target=lambda: ask(gateway, 'k'))
  thread.start()
  wait_until(lambda: engine.requests)
  gateway.sessions.close('k')
  thread.join()
  assert len(records) == 1 and len(gateway.sessions) == 0


def test_bad_config_names_the_field():
  """Law 9 for the config."""
  for field, value in (
    ('port', -1),
    ('top_p', 0),
    ('unknown_key_mode', 'x'),
    ('max_body_bytes', 0),
    ('max_unfinished_bytes', 1000),
    ('header_timeout_s', 0),
    ('read_memory_bytes', 1 << 20),
    ('inline_bytes', -1),
  ):
    with pytest.raises(ValueError, match=f'GatewayConfig.{field}='):
      GatewayConfig(**{field: value})


def test_port_taken(serve, tok):
  """A port in use is an error at the start, not a server that never answers."""
  gateway, engine, _ = serve(ANSWER)
  port = int(gateway.base_url.split(':')[-1].split('/')[0])
  with pytest.raises(OSError):
    Gateway(GatewayConfig(port=port), tok, engine, print).start()
  assert ask(gateway).status_code == 200


def test_stop_ends_everything(tok):
  """Stopping with a request in flight cancels it in the engine and frees the port."""
  engine = ScriptedEngine(lambda r: tok.encode('on ' * 5000), delay_s=0.01)
  gateway = Gateway(
    GatewayConfig(accept_unknown_keys=True, stop_timeout_s=0), tok, engine, print
  ).start()
  port = int(gateway.base_url.split(':')[-1].split('/')[0])
  outcome = []

  def client():
    try:
      outcome.append(ask(gateway, max_tokens=5000).status_code)
    except httpx.TransportError as error:
      outcome.append(error)

  thread = threading.Thread(target=client)
  thread.start()
  while not engine.requests:
    time.sleep(0.01)
  started = time.monotonic()
  gateway.stop()
  gateway.stop()
  thread.join(10)
  assert time.monotonic() - started < 8
  assert len(outcome) == 1 and outcome[0] != 200
  engine.close()  # waits for the request: it must have been cancelled
  assert engine.cancelled['requests'] == 1
  with socket.socket() as probe:
    assert probe.connect_ex(('127.0.0.1', port)) != 0
  with pytest.raises(RuntimeError, match='not running'):
    _ = gateway.base_url
