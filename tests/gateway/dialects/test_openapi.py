"""The gateway does what its OpenAPI document says, to generated requests."""

from __future__ import annotations

import collections
import importlib
import json
import shutil
import subprocess

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.dialects import DIALECTS
from m2jax.gateway.protocol import CONTEXT_EDITS
from m2jax.gateway.server import Gateway
from tests.gateway.conftest import HTTP, response_text
from tests.gateway.scripted_engine import ScriptedEngine


@pytest.fixture(scope='module')
def gateway(tok):
  engine = ScriptedEngine(lambda request: tok.encode(response_text('t', 'fine')))
  config = GatewayConfig()
  with Gateway(config, tok, engine, lambda completion: None) as running:
    running.sessions.open('k', 'evaluation')
    yield running
  engine.close()


def document(gateway):
  return HTTP.get(gateway.base_url.removesuffix('/v1') + '/openapi.json').json()


def test_every_dialect_is_documented(gateway):
  paths = document(gateway)['paths']
  assert {dialect.path for dialect in DIALECTS.values()} <= paths.keys()


def schemas(value):
  """All objects inside a value."""
  if isinstance(value, dict):
    yield value
  if isinstance(value, dict | list):
    for part in value.values() if isinstance(value, dict) else value:
      yield from schemas(part)


def test_generators_of_clients_can_read_it(gateway):
  """Each operation has a name of its own; schemas are those that openapi-python-client,
  openapi-typescript and openapi-generator all read: none makes a client of an enum of
  booleans, or of a union of three with null."""
  paths = document(gateway)['paths']
  ids = [o['operationId'] for path in paths.values() for o in path.values()]
  assert len(set(ids)) == len(paths) and all(map(str.isidentifier, ids))
  for schema in schemas(paths):
    if isinstance(schema.get('enum'), list):
      assert schema['type'] == 'string' and set(map(type, schema['enum'])) == {str}
    if isinstance(kinds := schema.get('type'), list):
      assert kinds[1:] == ['null'], schema
    if len(parts := schema.get('anyOf', ())) > 2:
      assert {'type': 'null'} not in parts, schema


@pytest.mark.long
def test_a_generated_client(gateway, tmp_path, monkeypatch):
  """One that openapi-python-client made from the document calls every operation."""
  command = shutil.which('openapi-python-client')
  if command is None:
    pytest.skip('needs the command openapi-python-client')
  (tmp_path / 'spec.json').write_text(json.dumps(document(gateway)))
  subprocess.run(
    [command, 'generate', '--path', 'spec.json', '--output-path', 'made'],
    check=True, cwd=tmp_path,
  )  # fmt: skip
  monkeypatch.syspath_prepend(tmp_path / 'made')
  name = 'm2jax_gateway_client'
  made, models = map(importlib.import_module, (name, f'{name}.models'))
  client = made.AuthenticatedClient(
    gateway.base_url.removesuffix('/v1'), 'k', httpx_args={'trust_env': False}
  )

  def call(operation, body=None, of=client):
    api = importlib.import_module(f'{name}.api.default.{operation}')
    kind = ''.join(map(str.capitalize, operation.split('_'))) + 'Body'
    sent = {} if body is None else {'body': getattr(models, kind).from_dict(body)}
    reply = api.sync_detailed(client=of, **sent)
    return reply.status_code, reply.parsed and reply.parsed.to_dict()

  user = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'q'}]}
  item = {'model': 'm2jax', 'input': 'q', 'store': False}
  status, answer = call('create_chat_completion', user)
  assert status == 200 and answer['choices'][0]['message']['content'] == 'fine'
  status, answer = call('create_response', item)
  assert status == 200 and answer['output'][-1]['content'][0]['text'] == 'fine'
  status, answer = call('create_message', user | {'max_tokens': 50})
  assert status == 200 and answer['content'][-1]['text'] == 'fine'
  status, counted = call('count_tokens', user)
  assert status == 200 and counted['input_tokens'] > 0
  tokenize = importlib.import_module(f'{name}.api.default.tokenize')
  body = models.TokenizeBodyType0.from_dict(user)
  found = tokenize.sync(client=client, body=body)
  assert found.count == len(found.tokens) == counted['input_tokens']
  status, answer = call('list_models')
  assert status == 200 and answer['data'][0]['id'] == 'm2jax'
  status, answer = call('health')
  assert status == 200 and answer['status'] == 'ok'
  status, answer = call('create_message', user | {'max_tokens': 5, 'messages': []})
  assert status == 400 and answer['error']['type'] == 'invalid_request_error'


@pytest.mark.parametrize('examples', [3, pytest.param(20, marks=pytest.mark.long)])
def test_generated_requests(gateway, examples):
  """Of each operation: no server error, documented statuses, types and schemas; most
  requests are served, unauthenticated ones are not."""
  import schemathesis  # slow

  # A schema cannot say that the names of tools differ, or that a prompt fits the
  # context: some requests that it allows are refused.
  positive = [schemathesis.checks.positive_data_acceptance]
  schema = schemathesis.openapi.from_dict(document(gateway))
  schema.config.update(base_url=gateway.base_url.removesuffix('/v1'))
  headers = {'Authorization': 'Bearer k'}
  for result in schema.get_all_operations():
    strategy = result.ok().as_strategy()

    @settings(
      max_examples=examples, deadline=None, database=None, derandomize=True,
      phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=strategy)
    def check(case):
      reply = case.call_and_validate(headers=headers, excluded_checks=positive)
      statuses[reply.status_code] += 1  # noqa: B023

    case_label = result.ok().label
    statuses = collections.Counter()
    check()
    assert statuses[200] >= statuses.total() / 3, (case_label, statuses)


def test_context_edit(gateway):
  """The document has the edits that are accepted; all else is a 400 with its field."""
  chat = document(gateway)['paths']['/v1/chat/completions']['post']
  schema = chat['requestBody']['content']['application/json']['schema']
  named, null = schema['properties']['context_edit']['anyOf']
  assert named['enum'] == list(CONTEXT_EDITS) and null == {'type': 'null'}
  edits = [None, *CONTEXT_EDITS]
  body = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'u'}]}

  def post(edit):
    return HTTP.post(
      f'{gateway.base_url}/chat/completions',
      json={**body, 'context_edit': edit},
      headers={'Authorization': 'Bearer k'},
    )

  assert [post(edit).status_code for edit in edits] == [200] * len(edits)
  for malformed in ('forget', '', 'Window', 1, True, ['window'], {'edit': 'window'}):
    reply = post(malformed)
    assert reply.status_code == 400, malformed
    assert reply.json()['error']['param'] == 'context_edit'
