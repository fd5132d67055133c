"""Who may ask, how their requests are sampled, and what is remembered of them."""

import socket
import threading
import time

import httpx
import pytest

from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from tests.gateway.conftest import response_text
from tests.gateway.scripted_engine import ScriptedEngine

ANSWER = response_text('t', 'fine')
HTTP = httpx.Client(trust_env=False)


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
  """Law 4: whatever a client asks, training draws untruncated at 1, and counts that."""
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
  """Evaluation honours what the engine can do and refuses what it cannot."""
  gateway, engine, records = serve(ANSWER, temperature=0.9, top_p=0.8, top_k=7)
  gateway.sessions.open('k', 'evaluation')
  assert ask(gateway).status_code == 200
  assert ask(gateway, temperature=0, top_p=0.3, top_k=0, seed=5).status_code == 200
  seen = [
    (r.sampling.temperature, r.sampling.top_p, r.sampling.top_k)
    for r in engine.requests
  ]
  assert seen == [(0.9, 0.8, 7), (0, 0.3, 0)]
  assert [r.sampling.seed for r in engine.requests] == [None, 5]
  assert engine.requests[0].sampling.stop_ids == (tok.eos_id,)
  for field in ('frequency_penalty', 'logit_bias', 'min_p', 'repetition_penalty'):
    reply = ask(gateway, **{field: BENT[field]})
    assert (reply.status_code, reply.json()['error']['param']) == (400, field)
  assert [r.overrides for r in records] == [(), ()]


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
  for key in ('mine', 'a', 'b', 'a', 'c', 'a', 'b', 'mine'):
    assert ask(gateway, key).status_code == 200
  turns = [(record.session, record.turn) for record in records]
  assert turns == [
    ('mine', 0), ('a', 0), ('b', 0), ('a', 1),
    ('c', 0), ('a', 2), ('b', 0), ('mine', 1),
  ]  # fmt: skip
  assert len(gateway.sessions) == 3


def test_bad_config_names_the_field():
  """Law 9 for the config."""
  for field, value in (
    ('port', -1),
    ('top_p', 0),
    ('unknown_key_mode', 'x'),
    ('max_body_bytes', 0),
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
