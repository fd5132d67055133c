"""The template's version is a setting: what the model reads, and how it is read."""

from __future__ import annotations

import pytest

from tests.gateway.conftest import HTTP, SH, response_text

# A value with the markup that would end it: M2's rule keeps it, M2.1's cuts the call.
VALUE = 'a</parameter>b'
ASK = [{'role': 'user', 'content': 'go'}]


def ask(gateway, messages=ASK, **fields):
  body = {'model': 'm2jax', 'messages': messages, 'tools': [SH], **fields}
  headers = {'authorization': 'Bearer key'}
  return HTTP.post(f'{gateway.base_url}/chat/completions', json=body, headers=headers)


@pytest.mark.parametrize('inline_bytes', [0, 1 << 20])
@pytest.mark.parametrize('version, calls', [('m2', 1), ('m2.1', 0)])
def test_version(serve, version, calls, inline_bytes):
  """In responses, streamed or not, and in histories, here and in reader processes."""
  text = response_text('', '', [('sh', {'cmd': VALUE})])
  options = {'template_version': version, 'inline_bytes': inline_bytes}
  gateway, *_ = serve(text, **options)
  message = ask(gateway).json()['choices'][0]['message']
  assert len(message.get('tool_calls') or ()) == calls
  streamed = ask(gateway, stream=True).text
  assert ('"tool_calls": [' in streamed) == bool(calls)
  function = {'name': 'sh', 'arguments': '{"cmd": "a</parameter>b"}'}
  call = {'id': 'c', 'type': 'function', 'function': function}
  history = [
    *ASK,
    {'role': 'assistant', 'content': '', 'tool_calls': [call]},
    {'role': 'tool', 'tool_call_id': 'c', 'content': 'x'},
  ]
  reply = ask(gateway, history)
  assert reply.status_code == (200 if calls else 400), reply.text


@pytest.mark.parametrize('inline_bytes', [0, 1 << 20])
def test_default_system(serve, tok, inline_bytes):
  gateway, engine, _ = serve(
    'x', default_system='I am M2.5.', inline_bytes=inline_bytes
  )
  ask(gateway)
  assert 'I am M2.5.' in tok.decode(engine.requests[-1].prompt_ids)
