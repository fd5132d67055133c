"""Law 9: every bad request gets its own clear error, and the next one is served."""

import collections
import contextlib
import copy
import http.client
import json
import socket
import threading
import time

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import parser as prometheus_parser

from m2jax.forge.remote import gateway_client
from m2jax.gateway import deltas
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from tests.gateway.conftest import HTTP, SH, response_text
from tests.gateway.scripted_engine import ScriptedEngine
from tests.waiting import wait_until

OK = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'hi'}]}
ANSWER = response_text('t', 'fine')
DEEP = '[' * 100_000


def post(gateway, body, key='k'):
  content = json.dumps(body) if isinstance(body, dict | list) else body
  return HTTP.post(
    f'{gateway.base_url}/chat/completions',
    content=content,
    headers={'authorization': f'Bearer {key}'},
  )


def assert_serves(gateway):
  assert post(gateway, OK).json()['choices'][0]['message']['content'] == 'fine'


def assistant(**call):
  call = {'name': 'sh', 'arguments': '{}'} | call
  return {'role': 'assistant', 'tool_calls': [{'id': 'a', 'function': call}]}


def answer(**fields):
  return {'role': 'assistant', 'content': 'x'} | fields


# M2 would read this as two parameters.
TWO_IN_ONE = json.dumps({'cmd': 'x</parameter><parameter name="n">7'})


def tool(**function):
  return [{'type': 'function', 'function': {'name': 'f', **function}}]


def deep_schema(depth):
  """A request with a schema of this many objects inside one another."""
  body = json.dumps(OK | {'tools': tool(parameters='DEEP')})
  schema = '{"properties":{"a":' * (depth // 2) + '{}' + '}}' * (depth // 2)
  return body.replace('"DEEP"', schema)


SCHEMA = 'tools[0].function.parameters'
BAD = [
  (b'', None),
  (b'{', None),
  (b'\xff', None),
  (DEEP, '[0]' * 8 + '.…'),
  ([], None),
  ({'model': 1}, 'model'),
  ({'model': None}, 'model'),
  ({'messages': None}, 'messages'),
  ({'messages': []}, 'messages'),
  ({'messages': {}}, 'messages'),
  ({'messages': ['hi']}, 'messages[0]'),
  ({'messages': [{'role': 'wizard', 'content': 'x'}]}, 'messages[0].role'),
  ({'messages': [{'content': 'x'}]}, 'messages[0].role'),
  ({'messages': [{'role': ['user'], 'content': 'x'}]}, 'messages[0].role'),
  ({'messages': [{'role': 'user'}]}, 'messages[0].content'),
  ({'messages': [{'role': 'user', 'content': 7}]}, 'messages[0].content'),
  ({'messages': [{'role': 'user', 'content': '\ud800'}]}, 'messages[0].content'),
  (
    {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
    'messages[0].content[0]',
  ),
  ({'messages': [{'role': 'tool', 'content': 'x', 'tool_call_id': 'a'}]}, None),
  ({'messages': [assistant(arguments=TWO_IN_ONE)]}, None),
  ({'messages': [answer(reasoning=5)]}, 'messages[0].reasoning'),
  ({'messages': [answer(thinking=[])]}, 'messages[0].thinking'),
  ({'messages': [answer(reasoning_details=5)]}, 'messages[0].reasoning_details'),
  (
    {'messages': [answer(thinking_blocks=[{'type': 'text', 'text': 'x'}])]},
    'messages[0].thinking_blocks[0]',
  ),
  (
    {'messages': [answer(content=[{'type': 'thinking', 'thinking': 5}])]},
    'messages[0].content[0].thinking',
  ),
  (
    {'messages': [assistant(arguments='{"a"')]},
    'messages[0].tool_calls[0].function.arguments',
  ),
  (
    {'messages': [assistant(arguments='[1]')]},
    'messages[0].tool_calls[0].function.arguments',
  ),
  ({'messages': [assistant(name=3)]}, 'messages[0].tool_calls[0].function.name'),
  (
    {'messages': [{'role': 'assistant', 'tool_calls': {'a': 1}}]},
    'messages[0].tool_calls',
  ),
  ({'tools': {}}, 'tools'),
  ({'tools': ['f']}, 'tools[0]'),
  ({'tools': [{'type': 'web_search'}]}, 'tools[0]'),
  ({'tools': [{'type': 'function'}]}, 'tools[0].function'),
  ({'tools': tool(name='a b')}, 'tools[0].function.name'),
  ({'tools': tool(parameters='x')}, 'tools[0].function.parameters'),
  ({'tools': tool(parameters={'type': 'string'})}, 'tools[0].function.parameters.type'),
  (
    {'tools': tool(parameters={'properties': [1]})},
    'tools[0].function.parameters.properties',
  ),
  ({'tools': tool() * 2}, 'tools[1].function.name'),
  ({'tools': tool(description='\ud800')}, 'tools[0].function.description'),
  ({'tool_choice': 'required'}, 'tool_choice'),
  ({'tools': [SH], 'tool_choice': 'maybe'}, 'tool_choice'),
  ({'tools': [SH], 'tool_choice': {'function': 'sh'}}, 'tool_choice'),
  ({'max_tokens': 0}, 'max_tokens'),
  ({'max_tokens': '9'}, 'max_tokens'),
  ({'max_completion_tokens': -1}, 'max_completion_tokens'),
  ({'temperature': 3}, 'temperature'),
  ({'temperature': 'hot'}, 'temperature'),
  ('{"model": "m2jax", "messages": [], "temperature": NaN}', 'temperature'),
  ({'temperature': float('nan')}, 'temperature'),
  ({'top_p': 0}, 'top_p'),
  ({'top_k': -2}, 'top_k'),
  ({'top_k': True}, 'top_k'),
  ({'seed': 1.5}, 'seed'),
  ({'n': 0}, 'n'),
  ({'n': 17}, 'n'),
  ({'stop': ['']}, 'stop[0]'),
  ({'stop': ['x'] * 17}, 'stop'),
  ({'stop': [1]}, 'stop[0]'),
  ({'logit_bias': [1]}, 'logit_bias'),
  ({'logit_bias': {'five': 1}}, 'logit_bias'),
  ({'logit_bias': {'-5': 1}}, 'logit_bias'),
  ({'logit_bias': {'9' * 5000: 1}}, 'logit_bias'),
  ({'logit_bias': {'5': 101}}, 'logit_bias'),
  ({'logit_bias': {'5': True}}, 'logit_bias'),
  ({'presence_penalty': 3}, 'presence_penalty'),
  ({'repetition_penalty': 0}, 'repetition_penalty'),
  ({'min_p': 1.5}, 'min_p'),
  ({'top_logprobs': 2}, 'top_logprobs'),
  ({'logprobs': True, 'top_logprobs': 21}, 'top_logprobs'),
  ({'logprobs': True, 'top_logprobs': -1}, 'top_logprobs'),
  ({'response_format': {'type': 'xml'}}, 'response_format.type'),
  ({'response_format': 'json'}, 'response_format'),
  ({'response_format': {'type': 'json_schema'}}, 'response_format.json_schema'),
  (
    {'response_format': {'type': 'json_schema', 'json_schema': {'schema': 3}}},
    'response_format.json_schema.schema',
  ),
  (
    {
      'response_format': {
        'type': 'json_schema',
        'json_schema': {'schema': {'enum': ['x' * (64 << 10)]}},
      }
    },
    'response_format.json_schema.schema',
  ),
  ({'stream': 'yes'}, 'stream'),
  ({'stream': True, 'stream_options': 3}, 'stream_options'),
  ({'functions': [{}]}, 'functions'),
  # JSON that the rest could not digest, in any field, used or not.
  (deep_schema(1100), SCHEMA + '.properties.a' * 2 + '.…'),
  (deep_schema(110), SCHEMA + '.properties.a' * 2 + '.…'),
  ({'metadata': {'\ud800': 1}}, 'metadata'),
  ({'\udfff': 1}, None),
  ({'user': ['x', {'y': '\ud800'}]}, 'user[1].y'),
  (
    {'messages': [{'role': 'user', 'content': 'x', 'name': '\ud800'}]},
    'messages[0].name',
  ),
  ({'tools': tool(parameters={'properties': {'\ud800': {}}})}, SCHEMA + '.properties'),
  ({'model': '\ud800'}, 'model'),
  (
    {'messages': [assistant(arguments='{"\\ud800": 1}')]},
    'messages[0].tool_calls[0].function.arguments',
  ),
  (
    {'messages': [assistant(arguments='{"a": ' + '[' * 1100 + ']' * 1100 + '}')]},
    'messages[0].tool_calls[0].function.arguments',
  ),
  (
    {'messages': [assistant(arguments='{"a": NaN}')]},
    'messages[0].tool_calls[0].function.arguments',
  ),
  ({'seed': 2**64}, 'seed'),
  ({'max_tokens': 10**40}, 'max_tokens'),
  ({'temperature': float('inf')}, 'temperature'),
  ({'metadata': {'a': float('-inf')}}, 'metadata.a'),
  ('{"model": "m2jax", "seed": ' + '9' * 5000 + '}', None),
  ('{"model": "m2jax", "messages": [], "model": "m2jax"}', 'model'),
  (
    '{"model": "m2jax", "messages": [{"role": "user", "role": "user"}]}',
    'messages[0].role',
  ),
  ('"text"', None),
  ('null', None),
  ('7', None),
  (b'\xef\xbb\xbf{}', None),
  ('{"model": "m2jax"}'.encode('utf-16'), None),
]


def test_bad_requests(serve):
  """Each names its field, none reaches the engine, and the server goes on serving."""
  gateway, engine, records = serve(ANSWER)
  for body, param in BAD:
    if isinstance(body, dict):
      body = OK | body
    reply = post(gateway, body)
    error = reply.json()['error']
    assert reply.status_code == 400, (body, reply.text)
    assert error['param'] == param, (body, error)
    assert error['type'] == 'invalid_request_error'
    assert param is None or param in error['message']
  assert not engine.requests and not records
  want = {'requests_total{status="400"}': len(BAD)}
  wait_until(lambda: gateway.counters() == want)
  assert_serves(gateway)


FULL = OK | {
  'messages': [
    {'role': 'system', 'content': 's'},
    {'role': 'user', 'content': [{'type': 'text', 'text': 'u'}]},
    assistant(),
    {'role': 'tool', 'content': 'x', 'tool_call_id': 'a'},
  ],
  'tools': [SH],
  'tool_choice': {'type': 'function', 'function': {'name': 'sh'}},
  'stream_options': {'include_usage': True},
}
FIELDS = ('temperature', 'top_p', 'top_k', 'logit_bias', 'max_tokens', 'seed', 'stop')
any_json = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
  lambda inner: (
    st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(['type', 'function', 'name', 'x']), inner)
  ),
  max_leaves=4,
)


@settings(
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_request_is_an_internal_error(fuzzed, data):
  """Any JSON anywhere in a request is answered or rejected; nothing breaks."""
  body = copy.deepcopy(FULL)
  if data.draw(st.booleans()):
    body[data.draw(st.sampled_from(FIELDS))] = data.draw(any_json)
  else:
    at = body
    while True:
      key = data.draw(
        st.sampled_from(list(at) if isinstance(at, dict) else range(len(at)))
      )
      if (
        not at[key] or not isinstance(at[key], dict | list) or data.draw(st.booleans())
      ):
        at[key] = data.draw(any_json)
        break
      at = at[key]
  reply = post(fuzzed, body)
  assert reply.status_code in (200, 400, 404), reply.text


TEMPLATE = json.dumps(FULL).encode()
HEADERS = st.sampled_from(
  [
    b'content-length: 5\r\n', b'content-length: -1\r\n', b'content-length: x\r\n',
    b'transfer-encoding: chunked\r\n', b'expect: 100-continue\r\n',
    b'connection: upgrade\r\nupgrade: websocket\r\n', b'connection: close\r\n',
    b'content-type: text/plain; charset=utf-16\r\n', b'content-encoding: gzip\r\n',
    b'x: \xff\xfe\r\n', b': empty\r\n', b'x\r\n', b'authorization: Bearer \x7f\r\n',
  ]
)  # fmt: skip


@st.composite
def damaged(draw):
  """A good body with some bytes cut, repeated, replaced or nested."""
  body = bytearray(TEMPLATE)
  for _ in range(draw(st.integers(0, 3))):
    at = draw(st.integers(0, len(body)))
    end = draw(st.integers(at, min(len(body), at + 30)))
    body[at:end] = draw(
      st.binary(max_size=8)
      | st.just(bytes(body[at:end]) * 3)
      | st.sampled_from(
        [
          b'[' * 2000,
          b'{"a":' * 2000,
          b'"\\ud800"',
          b'NaN',
          b'1e999',
          b'9' * 400,
          b'\\',
        ]
      )
    )
  return bytes(body)


@pytest.mark.parametrize('inline_bytes', [0, 1 << 20])
def test_damaged_requests(tok, inline_bytes):
  """Raw requests with damaged bodies and odd headers, for a while: each is answered or
  closed in time, none is an error of ours, and the server is well afterwards."""
  engine = ScriptedEngine(lambda request: tok.encode(ANSWER))
  config = GatewayConfig(
    accept_unknown_keys=True,
    inline_bytes=inline_bytes,
    header_timeout_s=0.1,
    body_timeout_s=0.1,
  )

  statuses = collections.Counter()

  @settings(deadline=None)
  @example(b'{', [], True, b'POST /v1/chat/completions')
  @example(json.dumps(OK).encode(), [], True, b'POST /v1/chat/completions')
  @given(
    body=damaged() | st.binary(max_size=40),
    headers=st.lists(HEADERS, max_size=2),
    length=st.booleans(),
    path=st.sampled_from(
      [b'POST /v1/chat/completions'] * 6
      + [b'GET /v1/models', b'PUT /', b'OPTIONS *', b'POST /%ff%00?x', b'CONNECT a:1']
    ),
  )
  def check(body, headers, length, path):
    head = path + b' HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n'
    head += b'connection: close\r\n'
    head += b''.join(headers)
    if length:
      head += b'content-length: %d\r\n' % len(body)
    with socket.create_connection(at, timeout=20) as connection:
      reply = b''
      with contextlib.suppress(ConnectionError):
        connection.sendall(head + b'\r\n' + body)
        while chunk := connection.recv(65_536):
          reply += chunk
    for line in reply.split(b'HTTP/1.1 ')[1:]:
      statuses[int(line[:3])] += 1
      assert int(line[:3]) < 500, reply

  with Gateway(config, tok, engine, lambda completion: None) as gateway:
    host, port = gateway.base_url.removeprefix('http://').removesuffix('/v1').split(':')
    at = host, int(port)
    check()
    assert statuses[200] and statuses[400], statuses
    health = HTTP.get(gateway.base_url.removesuffix('/v1') + '/health')
    assert health.json()['status'] == 'ok'
    assert_serves(gateway)
  engine.close()


@pytest.fixture(scope='module')
def fuzzed(tok):
  engine = ScriptedEngine(lambda request: tok.encode(ANSWER))
  with Gateway(
    GatewayConfig(accept_unknown_keys=True), tok, engine, lambda completion: None
  ) as gateway:
    yield gateway
  engine.close()


def test_fields_of_other_clients_are_ignored(serve):
  """Real agents send fields of their own; those cost them nothing."""
  gateway, _, _ = serve(ANSWER)
  extra = {
    'user': 'me',
    'metadata': {},
    'store': False,
    'parallel_tool_calls': True,
    'reasoning_effort': 'high',
    'stop': None,
    'n': 1.0,
    'frequency_penalty': 0,
    'logit_bias': {},
    'response_format': {'type': 'text'},
    'cache_salt': 'x',
  }
  assert post(gateway, OK | extra).status_code == 200
  ignored = {
    name: count
    for name, count in gateway.counters().items()
    if name.startswith('ignored_total')
  }
  without_effect = ('user', 'metadata', 'store', 'parallel_tool_calls')
  assert ignored == {
    f'ignored_total{{field="{field}"}}': 1
    for field in (*without_effect, 'reasoning_effort', 'unknown')
  }


def test_status_codes(serve):
  """Keys, models, methods, paths and sizes have the statuses that clients expect."""
  gateway, _, _ = serve(ANSWER, max_body_bytes=1000)
  url = f'{gateway.base_url}/chat/completions'
  with httpx.Client(trust_env=False) as client:
    for headers in ({}, {'authorization': 'Basic eA=='}, {'authorization': 'Bearer'}):
      reply = client.post(url, json=OK, headers=headers)
      assert reply.status_code == 401
      assert reply.json()['error']['code'] == 'invalid_api_key'
    assert post(gateway, OK, key='k' * 257).status_code == 401
    reply = client.get(url)
    assert (reply.status_code, reply.headers['allow']) == (405, 'POST')
    reply = client.get(gateway.base_url + '/nothing')
    assert reply.status_code == 404
    assert '/v1/nothing' in reply.json()['error']['message']
    root = gateway.base_url.removesuffix('/v1')
    for without in (root, f'{root}/v1/v1'):
      reply = client.post(f'{without}/chat/completions', json=OK)
      assert reply.status_code == 404
      assert 'is at /v1/chat/completions' in reply.json()['error']['message']
    assert client.head(gateway.base_url.removesuffix('/v1') + '/').status_code == 200
  reply = post(gateway, OK | {'model': 'gpt'})
  assert (reply.status_code, reply.json()['error']['code']) == (404, 'model_not_found')
  reply = post(gateway, b' ' * 1001)
  assert (reply.status_code, reply.json()['error']['code']) == (
    413,
    'request_too_large',
  )
  reply = post(gateway, (b' ' * 500 for _ in range(200)))  # chunked: no content-length
  assert reply.status_code == 413
  assert_serves(gateway)


def test_prompt_too_long(serve):
  """The engine's limit becomes the code that agents look for."""
  gateway, _, records = serve(ANSWER, engine_options={'context_tokens': 300})
  long = {'messages': [{'role': 'user', 'content': 'word ' * 500}]}
  reply = post(gateway, OK | long)
  assert reply.status_code == 400
  assert reply.json()['error']['code'] == 'context_length_exceeded'
  assert '300' in reply.json()['error']['message']
  assert not records
  assert 'forks_total{reason="first"}' not in gateway.counters()
  assert_serves(gateway)


@pytest.mark.parametrize('stream', [False, True])
def test_engine_failure(serve, stream):
  """A dead engine is a 503, or an error event in a begun stream; never an answer."""
  gateway, engine, records = serve(RuntimeError('device lost'))
  reply = post(gateway, OK | {'stream': stream})
  if stream:
    last = [line for line in reply.text.split('\n\n') if line][-1]
    error = json.loads(last.removeprefix('data: '))['error']
  else:
    assert reply.status_code == 503
    error = reply.json()['error']
  assert (error['type'], error['code']) == ('server_error', 'engine_unavailable')
  wait_until(lambda: gateway.counters().get('requests_total{status="503"}') == 1)
  engine.alive = False
  assert post(gateway, OK | {'stream': stream}).status_code == 503
  health = HTTP.get(gateway.base_url.removesuffix('/v1') + '/health')
  assert (health.status_code, health.json()['status']) == (503, 'engine down')
  assert not records


def test_health_and_metrics(serve):
  """What a person or a scraper reads: alive, policy version, counts."""
  gateway, engine, _ = serve(ANSWER)
  engine.version = 7
  assert_serves(gateway)
  root = gateway.base_url.removesuffix('/v1')
  health = HTTP.get(root + '/health').json()
  assert (health['status'], health['policy_version']) == ('ok', 7)
  assert 'gateway_requests_total{status="200"} 1' in HTTP.get(root + '/metrics').text


def test_metrics_are_what_prometheus_reads(serve):
  """Each counter has its type and help, once; the roles read the same text."""
  gateway, _, _ = serve(ANSWER)
  assert_serves(gateway)
  many = OK | {'tools': [SH], 'user': 'u', 'top_q': 1, 'n': 2}
  assert post(gateway, many).status_code == 200
  assert post(gateway, OK | {'n': 0}).status_code == 400
  reply = HTTP.get(gateway.base_url.removesuffix('/v1') + '/metrics')
  assert reply.headers['content-type'] == 'text/plain; version=0.0.4; charset=utf-8'
  families = list(prometheus_parser.text_string_to_metric_families(reply.text))
  assert {family.type for family in families} == {'counter'}
  assert all(family.documentation for family in families)
  assert len({family.name for family in families}) == len(families)
  found = {
    (s.name, *s.labels.items()): s.value for family in families for s in family.samples
  }
  assert found['gateway_requests_total', ('status', '200')] == 2
  assert found['gateway_requests_total', ('status', '400')] == 1
  assert found['gateway_ignored_total', ('field', 'unknown')] == 1
  assert len(found) == len(gateway.counters())
  client = gateway_client.GatewayClient(gateway.base_url.removesuffix('/v1'))
  assert client.counters() == gateway.counters()
  client.close()


@pytest.mark.parametrize('stream', [False, True])
def test_nothing_unrecorded_is_answered(serve, stream):
  """If recording fails, the client gets an error instead of an unrecorded answer."""

  def record(completion):
    raise OSError('disk full')

  gateway, _, _ = serve(ANSWER, record=record)
  reply = post(gateway, OK | {'stream': stream})
  assert reply.status_code == (200 if stream else 500)
  assert 'finish_reason": "stop"' not in reply.text
  assert '[DONE]' not in reply.text
  assert 'internal error' in reply.text
  assert 'disk' not in reply.text  # internals stay in the log


def test_record_comes_before_the_answer(serve):
  """A slow record delays the response; the response never overtakes it."""
  recorded = []

  def record(completion):
    time.sleep(0.05)
    recorded.append(completion)

  gateway, _, _ = serve(ANSWER, record=record)
  assert_serves(gateway)
  assert len(recorded) == 1


@pytest.mark.parametrize('stream', [False, True])
def test_a_response_that_breaks_stops_the_engine(serve, stream, monkeypatch):
  """Nobody gets the tokens that would follow an internal error."""
  endless = 'on and on ' * 1000
  gateway, engine, records = serve(endless, engine_options={'delay_s': 0.05})

  def broken(self, tokens):
    raise ArithmeticError('a bug')

  monkeypatch.setattr(deltas.Deltas, 'feed', broken)
  body = OK | {'max_tokens': 5000, 'stream': stream, 'stop': ['never']}
  reply = post(gateway, body)
  assert 'internal error' in reply.text
  wait_until(lambda: engine.results)
  [(_, result)] = engine.results
  assert result.finish_reason == 'cancelled' and not records


@pytest.mark.parametrize('stream', [False, True])
def test_client_hangs_up(serve, tok, stream):
  """The engine's work ends with the client; what was sampled is kept as cancelled."""
  gateway, engine, records = serve(
    'on and on ' * 1000, engine_options={'delay_s': 0.01}
  )
  host, port = gateway.base_url.removeprefix('http://').removesuffix('/v1').split(':')
  connection = http.client.HTTPConnection(host, int(port))
  connection.request(
    'POST',
    '/v1/chat/completions',
    json.dumps(OK | {'stream': stream, 'max_tokens': 10_000}),
    {'authorization': 'Bearer k'},
  )
  wait_until(lambda: engine.sampled)  # without a token nothing would be kept
  connection.sock.shutdown(socket.SHUT_RDWR)
  connection.close()
  wait_until(lambda: records)
  assert engine.cancelled['requests'] == 1
  assert records[0].finish_reason == 'cancelled'
  assert records[0].response_ids.tolist() == engine.results[0][1].tokens.tolist()
  wait_until(lambda: gateway.counters().get('requests_total{status="499"}') == 1)
  engine.script = lambda request: tok.encode(ANSWER)
  assert_serves(gateway)
  assert records[1].fork_reason is None  # nothing can extend or resample what was lost


def test_hostile_bytes(serve):
  """Connections that speak no HTTP, or stop in the middle, harm nobody else."""
  gateway, _, _ = serve(ANSWER)
  host, port = gateway.base_url.removeprefix('http://').removesuffix('/v1').split(':')
  head = b'POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n'
  head += b'authorization: Bearer k\r\n'
  for data in (
    b'\x00\xff\x16\x03\x01' * 50,
    b'GET / HTTP/9.9\r\n\r\n',
    head + b'content-length: 100\r\n\r\n{"model"',
    head + b'content-length: -5\r\n\r\n',
    head + b'content-length: 99999999999999999999\r\n\r\n',
    head + b'transfer-encoding: chunked\r\n\r\nZZ\r\n',
    head[:-2] + b'\xff\xfe\r\ncontent-length: 2\r\n\r\n{}',
  ):
    with socket.create_connection((host, int(port))) as connection:
      connection.sendall(data)
  threads = [threading.Thread(target=assert_serves, args=(gateway,)) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  wait_until(lambda: gateway.counters()['requests_total{status="200"}'] == 4)
