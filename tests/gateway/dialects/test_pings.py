"""A stream is never silent for longer than `ping_s`, whatever it waits for."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from m2jax.gateway import dialects
from tests.gateway import clients
from tests.gateway.conftest import HTTP, SH, response_text
from tests.gateway.dialects import test_anthropic, test_responses

CHAT = {
  'model': 'm2jax',
  'messages': [{'role': 'user', 'content': clients.QUESTION}],
  'tools': [SH],
}
BODIES = {
  'openai_chat': CHAT,
  'anthropic': test_anthropic.ASK,
  'responses': test_responses.ASK,
}
PINGS = ('event: ping', ': ping')


def events_of(gateway, dialect):
  reply = HTTP.post(
    gateway.base_url.removesuffix('/v1') + dialects.DIALECTS[dialect].path,
    json=BODIES[dialect] | {'stream': True},
    headers={'authorization': 'Bearer k'},
    timeout=60,
  )
  assert reply.status_code == 200, reply.text
  return [event.startswith(PINGS) for event in reply.text.split('\n\n')[:-1]]


@pytest.mark.parametrize('dialect', BODIES)
def test_tokens_without_an_event_are_silence(serve, dialect):
  """A long call gives tokens all the time, and its event at its end."""
  long = response_text('t', 'ok', [('sh', {'cmd': 'x~' * 60})])
  gateway, engine, _ = serve(long, ping_s=0.03, engine_options={'delay_s': 0.01})
  pinged = events_of(gateway, dialect)
  [(_, result)] = engine.results
  assert len(result.tokens) / engine.piece_tokens * engine.delay_s > 6 * 0.03
  assert sum(pinged) >= 3
  assert not pinged[-1]


@pytest.mark.parametrize('dialect', BODIES)
def test_waiting_for_the_record_is_silence(serve, dialect):
  """The database may be away when the response is complete."""
  written = concurrent.futures.Future()

  def record(completion):
    threading.Timer(0.2, written.set_result, [None]).start()
    return written

  gateway, _, _ = serve(response_text('t', 'ok'), record=record, ping_s=0.03)
  assert sum(events_of(gateway, dialect)) >= 3
