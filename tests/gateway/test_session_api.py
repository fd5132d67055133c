"""Sessions that another process opens: with the secret only, bounded, not for ever."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
import types

import pytest

from m2jax.gateway import session_api
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.gateway.session_api import RemoteSessions
from tests.gateway.conftest import HTTP, response_text
from tests.gateway.scripted_engine import ScriptedEngine

CHAT = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'hi'}]}


@pytest.fixture
def start(tok):
  """start(**RemoteSessions fields): (post to /sessions, chat with a key, gateway)."""
  with contextlib.ExitStack() as stack:

    def make(record=lambda c: None, **fields):
      engine = ScriptedEngine(lambda r: tok.encode(response_text('so', 'yes')))
      stack.callback(engine.close)
      settings = RemoteSessions('secret', **fields)
      gateway = Gateway(GatewayConfig(), tok, engine, record, settings)
      stack.enter_context(gateway)

      def post(body, secret='secret', method='POST'):
        headers = {'authorization': f'Bearer {secret}'}
        return HTTP.request(
          method, gateway.base_url + '/sessions', headers=headers, json=body
        )

      def chat(key):
        headers = {'authorization': f'Bearer {key}'}
        url = gateway.base_url + '/chat/completions'
        return HTTP.post(url, headers=headers, json=CHAT)

      return post, chat, gateway

    yield make


@pytest.mark.parametrize('key', ['mine', '../a/b?c=%2F#d'])
def test_a_session_from_opening_to_closing(start, key):
  post, chat, gateway = start()
  assert chat(key).status_code == 401
  assert post({'key': key, 'mode': 'training'}).status_code == 201
  assert chat(key).status_code == 200
  assert post({'key': key}).status_code == 409
  close = functools.partial(post, {'key': key}, method='DELETE')
  for wrong in ('guess', key):  # a session's key is good for sampling only
    assert (
      close(secret=wrong).status_code == post({'key': 'b'}, wrong).status_code == 401
    )
  assert chat(key).status_code == 200
  assert [close().status_code, close().status_code] == [200, 200]
  assert chat(key).status_code == 401


@pytest.mark.parametrize(
  'body, status, part',
  [
    ([], 400, 'object'),
    ({}, 400, 'key'),
    ({'key': 3}, 400, 'key'),
    ({'key': 'a b'}, 400, 'key'),
    ({'key': 'x' * 257}, 400, 'key'),
    ({'key': 'a', 'mode': 'root'}, 400, 'mode'),
    ({'key': 'a' * 5000}, 413, 'larger'),
  ],
)
def test_malformed(start, body, status, part):
  post, _, gateway = start()
  response = post(body)
  assert response.status_code == status and part in response.text
  assert len(gateway.sessions) == 0


def test_only_with_the_secret(start):
  post, _, gateway = start()
  for secret in ('', 'Secret', 'mine'):
    assert post({'key': 'a'}, secret or 'x').status_code == 401
  assert len(gateway.sessions) == 0
  with pytest.raises(ValueError, match='RemoteSessions.secret'):
    RemoteSessions('')


def test_a_gateway_without_remote_sessions_has_no_such_route(serve):
  gateway, _, _ = serve('x')
  headers = {'authorization': 'Bearer secret'}
  url = gateway.base_url + '/sessions'
  assert HTTP.post(url, headers=headers, json={'key': 'a'}).status_code == 404


def test_bounds(start, monkeypatch):
  """Sessions of agents that were killed are closed at an age; others are limited."""
  now_s = [100.0]
  clock = types.SimpleNamespace(monotonic=lambda: now_s[0])
  monkeypatch.setattr(session_api, 'time', clock)
  post, chat, gateway = start(max_open=2, max_age_s=0.3)
  assert [post({'key': k}).status_code for k in 'abc'] == [201, 201, 503]
  now_s[0] += 0.35
  assert post({'key': 'c'}).status_code == 201
  assert len(gateway.sessions) == 1
  assert [chat(key).status_code for key in 'abc'] == [401, 401, 200]


def test_the_response_waits_for_a_durable_record(start):
  """Agents must not report an episode whose completions are not committed yet."""
  written = concurrent.futures.Future()
  post, chat, _ = start(lambda completion: written)
  post({'key': 'mine'})
  answers = []
  thread = threading.Thread(target=lambda: answers.append(chat('mine').status_code))
  thread.start()
  thread.join(0.1)
  assert not answers
  written.set_result(None)
  thread.join(10)
  assert answers == [200]


def test_a_record_that_is_not_written_is_no_answer(start):
  failed = concurrent.futures.Future()
  failed.set_exception(OSError('disk full'))
  post, chat, _ = start(lambda completion: failed)
  post({'key': 'mine'})
  assert chat('mine').status_code == 500
