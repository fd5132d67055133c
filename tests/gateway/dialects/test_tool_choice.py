"""`tool_choice` in every dialect: honoured, or refused with an error; never ignored."""

from __future__ import annotations

import numpy as np
import pytest

from m2jax.gateway import dialects
from tests.gateway.conftest import HTTP, response_text

ASK = 'go'
NAMES = ('sh', 'read')
SCHEMA = {'type': 'object', 'properties': {'cmd': {'type': 'string'}}}


def chat(choice, name=None):
  kinds = {'none': 'none', 'auto': 'auto', 'any': 'required'}
  function = {'type': 'function', 'function': {'name': name}}
  return {
    'model': 'm2jax',
    'messages': [{'role': 'user', 'content': ASK}],
    'tools': [
      {'type': 'function', 'function': {'name': n, 'parameters': SCHEMA}} for n in NAMES
    ],
    'tool_choice': kinds.get(choice, function),
  }


def anthropic(choice, name=None):
  named = {'type': 'tool', 'name': name}
  return {
    'model': 'm2jax',
    'max_tokens': 99,
    'messages': [{'role': 'user', 'content': ASK}],
    'tools': [{'name': n, 'input_schema': SCHEMA} for n in NAMES],
    'tool_choice': named if choice == 'named' else {'type': choice},
  }


def responses(choice, name=None):
  kinds = {'none': 'none', 'auto': 'auto', 'any': 'required'}
  return {
    'model': 'm2jax',
    'input': ASK,
    'tools': [{'type': 'function', 'name': n, 'parameters': SCHEMA} for n in NAMES],
    'tool_choice': kinds.get(choice, {'type': 'function', 'name': name}),
  }


MAKE = {'openai_chat': chat, 'anthropic': anthropic, 'responses': responses}


def post(gateway, dialect, body, key='k'):
  return HTTP.post(
    gateway.base_url.removesuffix('/v1') + dialects.DIALECTS[dialect].path,
    json=body,
    headers={'authorization': f'Bearer {key}'},
  )


def allows(grammar, tok, text):
  """Whether a model under the grammar can write the text, in some tokens."""
  words = [tok.decode([token]) for token in range(tok.vocab_size)]
  matcher = grammar.start()
  while text:
    mask = np.zeros(-(-tok.vocab_size // 32), np.int32)
    matcher.allow(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder='little')[: tok.vocab_size]
    fits = [t for t in np.flatnonzero(bits).tolist() if text.startswith(words[t])]
    if not fits:
      return False
    token = max(fits, key=lambda t: len(words[t]))
    matcher.advance([token])
    text = text.removeprefix(words[token])
  return True


CALLS = {
  name: response_text('so', '', [(name, {'cmd': 'ls <a\n\n"b"'}), ('sh', {})])
  for name in (*NAMES, 'rm')
}
TEXT = response_text('so', 'no call')


@pytest.mark.parametrize('dialect', MAKE)
def test_auto_and_none(serve, tok, dialect):
  gateway, engine, _ = serve(TEXT)
  for choice in ('auto', 'none'):
    assert post(gateway, dialect, MAKE[dialect](choice)).status_code == 200
  auto, none = (tok.decode(request.prompt_ids) for request in engine.requests)
  assert '"read"' in auto and '"read"' not in none
  assert [request.grammar for request in engine.requests] == [None, None]


@pytest.mark.parametrize('dialect', MAKE)
def test_a_call_is_forced(serve, tok, dialect):
  """A call of one of the tools, or of the named one; thinking stays free."""
  gateway, engine, _ = serve(CALLS['sh'])
  for body in (MAKE[dialect]('any'), MAKE[dialect]('named', 'sh')):
    reply = post(gateway, dialect, body)
    assert reply.status_code == 200, reply.text
  some, named = (request.grammar for request in engine.requests)
  found = {n: (allows(some, tok, t), allows(named, tok, t)) for n, t in CALLS.items()}
  assert found == {'sh': (True, True), 'read': (True, False), 'rm': (False, False)}
  assert not allows(some, tok, TEXT)
  assert not allows(some, tok, response_text('so', '', []))
  assert not any('tool_choice' in name for name in gateway.counters())


@pytest.mark.parametrize('dialect', MAKE)
def test_a_training_session_refuses_to_force(serve, dialect):
  """It would bend the sampled distribution (law 4)."""
  gateway, engine, _ = serve(CALLS['sh'])
  gateway.sessions.open('t', 'training')
  for body in (MAKE[dialect]('any'), MAKE[dialect]('named', 'sh')):
    reply = post(gateway, dialect, body, 't')
    assert reply.status_code == 400
    assert 'tool_choice' in reply.text and 'training session' in reply.text
  for choice in ('auto', 'none'):
    assert post(gateway, dialect, MAKE[dialect](choice), 't').status_code == 200
  assert len(engine.requests) == 2


@pytest.mark.parametrize(
  'dialect, choice',
  [
    ('openai_chat', {'type': 'allowed_tools', 'allowed_tools': {'mode': 'auto'}}),
    ('responses', {'type': 'allowed_tools', 'mode': 'auto', 'tools': []}),
    ('responses', {'type': 'web_search'}),
  ],
)
def test_what_cannot_be_honoured_is_refused(serve, dialect, choice):
  gateway, engine, _ = serve(TEXT)
  reply = post(gateway, dialect, MAKE[dialect]('auto') | {'tool_choice': choice})
  assert reply.status_code == 400 and reply.json()['error']['param'] == 'tool_choice'
  assert not engine.requests
