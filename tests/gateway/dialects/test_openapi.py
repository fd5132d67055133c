"""The gateway does what its OpenAPI document says, to generated requests."""

from __future__ import annotations

import collections

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
  edits = schema['properties']['context_edit']['enum']
  assert edits == [None, *CONTEXT_EDITS]
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
