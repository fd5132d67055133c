"""Law 9 for every dialect: any JSON is read or refused, and the error has its form."""

from __future__ import annotations

import copy
import json
import socket

import h11
import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.gateway import dialects, prompts
from m2jax.gateway.errors import ApiError
from tests.gateway.conftest import HTTP, SH, response_text

CALL_ID = 'call_' + '0' * 32 + '_0'
FULL = {
  'openai_chat': {
    'model': 'm2jax',
    'messages': [
      {'role': 'user', 'content': [{'type': 'text', 'text': 'u'}]},
      {'role': 'assistant', 'reasoning_content': 'r', 'tool_calls': [
        {'id': 'a', 'function': {'name': 'sh', 'arguments': '{"cmd": "x"}'}}]},
      {'role': 'tool', 'tool_call_id': 'a', 'content': 'x'},
    ],
    'tools': [SH], 'tool_choice': 'auto', 'n': 2, 'stop': ['x'],
    'stream_options': {}, 'response_format': {'type': 'text'},
  },
  'anthropic': {
    'model': 'm2jax', 'max_tokens': 5,
    'system': [{'type': 'text', 'text': 's'}],
    'messages': [
      {'role': 'user', 'content': [{'type': 'text', 'text': 'u'}]},
      {'role': 'assistant', 'content': [
        {'type': 'thinking', 'thinking': 't', 'signature': 's'},
        {'type': 'text', 'text': 'u'},
        {'type': 'tool_use', 'id': 'a', 'name': 'sh', 'input': {'cmd': 'x'}}]},
      {'role': 'user', 'content': [
        {'type': 'tool_result', 'tool_use_id': 'a', 'is_error': True,
         'content': [{'type': 'text', 'text': 'u'}]}]},
    ],
    'tools': [{'name': 'sh', 'description': 'd', 'input_schema': {'type': 'object'}}],
    'tool_choice': {'type': 'tool', 'name': 'sh'}, 'stop_sequences': ['x'],
    'thinking': {'type': 'enabled'},
    'context_management': {'edits': [{'keep': 'all'}]},
    'output_config': {'effort': 'high'},
  },
  'responses': {
    'model': 'm2jax', 'instructions': 'i',
    'input': [
      {'role': 'user', 'content': [{'type': 'input_text', 'text': 'u'}]},
      {'type': 'reasoning', 'summary': [{'type': 'summary_text', 'text': 's'}],
       'content': [{'type': 'reasoning_text', 'text': 's'}],
       'encrypted_content': 'm2jax:eA=='},
      {'type': 'message', 'role': 'assistant',
       'content': [{'type': 'output_text', 'text': 'u'}]},
      {'type': 'function_call', 'call_id': CALL_ID, 'name': 'sh', 'arguments': '{}'},
      {'type': 'function_call_output', 'call_id': CALL_ID, 'output': 'x'},
      {'type': 'custom_tool_call', 'call_id': CALL_ID, 'name': 'c', 'input': 'x',
       'namespace': 'n'},
      {'type': 'custom_tool_call_output', 'call_id': CALL_ID,
       'output': [{'type': 'input_text', 'text': 'x'}]},
    ],
    'tools': [
      {'type': 'function', **SH['function']},
      {'type': 'namespace', 'name': 'n', 'tools': [
        {'type': 'custom', 'name': 'c', 'format': {
          'type': 'grammar', 'syntax': 'lark', 'definition': 'x'}}]},
    ],
    'tool_choice': {'type': 'custom', 'name': 'c', 'namespace': 'n'},
    'text': {'format': {'type': 'text'}}, 'include': ['reasoning.encrypted_content'],
  },
  'tokenize': {'model': 'm2jax', 'prompt': 'x', 'return_token_strs': True},
}  # fmt: skip
FULL['anthropic_count'] = FULL['anthropic']

any_json = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(max_size=3),
  lambda inner: (
    st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(['type', 'role', 'text', 'name', 'x']), inner)
  ),
  max_leaves=4,
)


def places(value, path=()):
  """The paths of all values inside a value."""
  keys = range(len(value)) if isinstance(value, list) else value
  for key in keys if isinstance(value, dict | list) else ():
    yield (*path, key)
    yield from places(value[key], (*path, key))


@pytest.mark.parametrize('name', dialects.DIALECTS)
def test_any_json_is_read_or_refused(tok, name):
  """Of a request with everything in it, one or two values are replaced."""
  whole = prompts.Part(-1, False, 0, 100_000)

  @given(st.data())
  def check(data):
    body = copy.deepcopy(FULL[name])
    for _ in range(data.draw(st.integers(1, 2))):
      *path, last = data.draw(st.sampled_from(list(places(body))))
      at = body
      for key in path:
        at = at[key]
      at[last] = data.draw(any_json)
    try:
      request, messages = dialects.parse(json.dumps(body), name)
      if messages:
        ids = prompts.encode(messages, request.tools, whole, tok)
        assert ids.dtype == np.int32
    except ApiError as error:
      assert error.status in (400, 413)
      assert json.dumps(dialects.DIALECTS[name].error(error))

  request, messages = dialects.parse(json.dumps(FULL[name]), name)
  if messages:
    prompts.encode(messages, request.tools, whole, tok)
  check()


@pytest.mark.parametrize('name', dialects.DIALECTS)
def test_errors_before_a_body_is_read(serve, name):
  """Keys, JSON and the engine's end have the form of the dialect, and its headers."""
  gateway, engine, _ = serve(response_text('t', 'x'), accept_unknown_keys=False)
  gateway.sessions.open('k', 'evaluation')
  dialect = dialects.DIALECTS[name]
  url = gateway.base_url.removesuffix('/v1') + dialect.path

  def post(content, headers=None):
    reply = HTTP.post(url, content=content, headers=headers or {'x-api-key': 'k'})
    body = reply.json()
    assert (body.get('type') == 'error') == name.startswith('anthropic')
    assert body['error']['message'] and body['error']['type']
    return reply

  assert post('{}', {'accept': '*/*'}).status_code == 401
  assert post('{}', {'x-api-key': 'other'}).status_code == 401
  assert post('{}', {'authorization': 'Bearer other'}).status_code == 401
  assert post('{').status_code == 400
  assert post('[]').status_code == 400
  if isinstance(dialect, dialects.Completing):
    engine.alive = False
    reply = post(json.dumps(FULL[name]))
    assert (reply.status_code, reply.headers['retry-after']) == (503, '1')


def _raw(gateway, request: bytes) -> tuple[int, dict[bytes, bytes], dict]:
  """Status, headers and body of the response to bytes on a connection."""
  port = httpx.URL(gateway.base_url).port
  with socket.create_connection(('127.0.0.1', port), timeout=10) as sock:
    sock.sendall(request)
    response = h11.Connection(h11.CLIENT)
    response.send(h11.Request(method='GET', target='/', headers=[('host', 'a')]))
    response.send(h11.EndOfMessage())
    head, body = None, b''
    while True:
      event = response.next_event()
      if event is h11.NEED_DATA:
        response.receive_data(sock.recv(65536))
      elif isinstance(event, h11.Response):
        head = event
      elif isinstance(event, h11.Data):
        body += event.data
      else:
        return head.status_code, dict(head.headers), json.loads(body or b'{}')


HEAD = b'x-api-key: k\r\nhost: evil.example\r\n'
RAW = {  # what a request has, before or besides its JSON: the status
  'flood': (431, b'POST', b'', HEAD + b'x-a: b\r\n' * 2000),
  'lengths': (400, b'POST', b'', HEAD + b'content-length: 1\r\ncontent-length: 2\r\n'),
  'negative': (400, b'POST', b'', HEAD + b'content-length: -5\r\n'),
  'smuggling': (
    400, b'POST', b'', HEAD + b'content-length: 1\r\ntransfer-encoding: chunked\r\n'
  ),
  'slow': (408, b'POST', b'', HEAD + b'content-length: 9\r\n'),
  'get': (405, b'GET', b'', HEAD),
  'put': (405, b'PUT', b'', HEAD + b'content-length: 0\r\n'),
  # A redirect would go to the host that the client names.
  'slash': (404, b'POST', b'/', HEAD + b'content-length: 0\r\n'),
}  # fmt: skip


@pytest.mark.parametrize('name', ['anthropic', 'responses'])
def test_http_that_no_dialect_reads(serve, name):
  """Rejected before the dialect's code runs, the error still has a form it knows."""
  gateway, *_ = serve(
    response_text('t', 'x'), body_timeout_s=0.1, hosts=('evil.example',)
  )
  gateway.sessions.open('k')
  path = dialects.DIALECTS[name].path.encode()
  for label, (expected, method, suffix, headers) in RAW.items():
    request = b'%b %b HTTP/1.1\r\n%b\r\n' % (method, path + suffix, headers)
    status, found, body = _raw(gateway, request)
    assert status == expected, label
    assert body['error']['message'] and body['error']['type'], label
    assert name != 'anthropic' or body.get('type') == 'error', label
    assert b'evil.example' not in b''.join(found.values()) + json.dumps(body).encode()
