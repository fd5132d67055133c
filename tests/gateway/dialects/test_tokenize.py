"""POST /tokenize: the ids that the engine would get."""

from __future__ import annotations

from tests.gateway.conftest import HTTP, SH, response_text

CHAT = {
  'model': 'm2jax',
  'messages': [{'role': 'user', 'content': 'hi é'}],
  'tools': [SH],
}


def post(gateway, path, body, key='k'):
  return HTTP.post(
    gateway.base_url.removesuffix('/v1') + path,
    json=body,
    headers={'authorization': f'Bearer {key}'},
  )


def test_messages(serve, tok):
  gateway, engine, records = serve(response_text('t', 'x'))
  reply = post(gateway, '/tokenize', CHAT | {'return_token_strs': True}).json()
  assert not records and len(gateway.sessions) == 0
  post(gateway, '/v1/chat/completions', CHAT)
  assert reply['tokens'] == list(engine.requests[0].prompt_ids)
  assert reply['count'] == len(reply['tokens'])
  assert reply['max_model_len'] == engine.context_tokens
  assert reply['token_strs'] == [tok.decode([i]) for i in reply['tokens']]


def test_a_text(serve, tok):
  gateway, _, _ = serve('x')
  reply = post(gateway, '/tokenize', {'model': 'm2jax', 'prompt': 'né[e~['}).json()
  assert reply['tokens'] == tok.encode('né[e~[')
  assert reply['token_strs'] is None


def test_a_prompt_that_no_engine_takes_is_counted(serve):
  """Lists of its millions of tokens would hold the loop for seconds."""
  gateway, engine, _ = serve('x', engine_options={'context_tokens': 500})
  message = {'role': 'user', 'content': 'é q!' * 500}
  body = CHAT | {'messages': [message], 'return_token_strs': True}
  reply = post(gateway, '/tokenize', body).json()
  assert reply['count'] > reply['max_model_len'] == engine.context_tokens
  assert reply['tokens'] is None and reply['token_strs'] is None


def test_refused(serve):
  gateway, _, _ = serve('x', accept_unknown_keys=False)
  assert post(gateway, '/tokenize', CHAT).status_code == 401
  gateway.sessions.open('k')
  for body, status, part in (
    ({'prompt': 'x'}, 400, 'model'),
    ({'model': 'other', 'prompt': 'x'}, 404, 'model'),
    (CHAT | {'prompt': 'x'}, 400, 'prompt'),
    (CHAT | {'add_generation_prompt': False}, 400, 'add_generation_prompt'),
    ({'model': 'm2jax', 'prompt': 'x' * 20_000}, 413, 'prompt'),
  ):
    reply = post(gateway, '/tokenize', body)
    assert reply.status_code == status
    assert part in reply.json()['error']['message']
