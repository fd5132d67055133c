"""Structured output through every dialect: a random model writes what a schema says."""

from __future__ import annotations

import dataclasses
import json
from typing import Literal

import pydantic
import pytest

from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving import grammars
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from tests.gateway import clients
from tests.gateway.conftest import HTTP
from tests.rollout import constrained
from tests.rollout.constrained import CFG, CONFIG, PAIR, TOK

ASK = [{'role': 'user', 'content': 'go'}]
CHAT, MESSAGES, RESPONSES = '/chat/completions', '/messages', '/responses'


class Pair(pydantic.BaseModel):
  a: bool
  b: Literal['x', 'yes']


@pytest.fixture(scope='module')
def gateway():
  config = dataclasses.replace(
    CONFIG, context_tokens=320, contexts=(320,), pages=0, prefill_shapes=((4, 64),)
  )
  engine = Engine(dataclasses.replace(CFG, max_positions=320), config)
  scheduler = Scheduler(
    engine, constrained.variables(), 0, SchedulerConfig(decode_steps=4)
  ).start(warmup=False)
  options = GatewayConfig(accept_unknown_keys=True, default_max_tokens=200)
  records = []
  with Gateway(options, TOK, constrained.Biased(scheduler), records.append) as running:
    running.records = records
    yield running
  scheduler.stop()


def post(gateway, path: str, body: dict, key: str = 'key'):
  body = {'model': 'm2jax', **body}
  headers = {'authorization': f'Bearer {key}'}
  return HTTP.post(gateway.base_url + path, json=body, headers=headers, timeout=120)


def test_openai_parses_a_model(gateway):
  """The real client's `.parse`, several times, and n choices of one request."""
  client = clients.openai_of(gateway)
  reply = client.chat.completions.parse(
    model='m2jax', messages=ASK, response_format=Pair, n=4, seed=3
  )
  found = [c.message.parsed for c in reply.choices if c.finish_reason == 'stop']
  assert found and all(isinstance(pair, Pair) for pair in found)
  assert any(choice.message.reasoning_content for choice in reply.choices)


def test_responses_and_streams(gateway):
  client = clients.openai_of(gateway)
  response = client.responses.parse(model='m2jax', input='go', text_format=Pair)
  assert response.status == 'completed'
  assert isinstance(response.output_parsed, Pair)
  stream = client.chat.completions.create(
    model='m2jax',
    messages=ASK,
    stream=True,
    seed=5,
    response_format={'type': 'json_schema', 'json_schema': {'schema': PAIR}},
  )
  pieces, reason = [], None
  for chunk in stream:
    pieces.append(chunk.choices[0].delta.content or '')
    reason = chunk.choices[0].finish_reason or reason
  assert reason == 'stop'
  Pair.model_validate_json(''.join(pieces))


def test_anthropic_output_config(gateway):
  client = clients.anthropic_of(gateway)
  reply = client.messages.create(
    model='m2jax',
    max_tokens=200,
    messages=ASK,
    output_config={'format': {'type': 'json_schema', 'schema': PAIR}},
  )
  assert reply.stop_reason == 'end_turn'
  Pair.model_validate_json(reply.content[-1].text)


def test_json_object_and_stop_strings(gateway):
  """Any object; a stop string ends it earlier."""
  body = {'messages': ASK, 'response_format': {'type': 'json_object'}, 'seed': 1}
  reply = post(gateway, CHAT, body).json()['choices'][0]
  assert reply['finish_reason'] == 'stop'
  assert isinstance(json.loads(reply['message']['content']), dict)
  cut = post(gateway, CHAT, {**body, 'stop': '{'}).json()['choices'][0]
  assert cut['finish_reason'] == 'stop' and not cut['message']['content'].strip()


FORMS = [
  (
    CHAT,
    {'messages': ASK},
    lambda s: {
      'response_format': {'type': 'json_schema', 'json_schema': {'schema': s}}
    },
    'response_format.json_schema.schema',
  ),
  (
    RESPONSES,
    {'input': 'go'},
    lambda s: {'text': {'format': {'type': 'json_schema', 'name': 'x', 'schema': s}}},
    'text.format.schema',
  ),
  (
    MESSAGES,
    {'messages': ASK, 'max_tokens': 9},
    lambda s: {'output_config': {'format': {'type': 'json_schema', 'schema': s}}},
    'output_config.format.schema',
  ),
]


@pytest.mark.parametrize('path, body, form, field', FORMS, ids=lambda x: str(x)[:12])
def test_training_sessions_and_bad_schemas(gateway, path, body, form, field):
  """400 in the dialect's form, which names the field; nothing is recorded."""
  gateway.sessions.open(f'training{path}', 'training')
  before = len(gateway.records)
  training = post(gateway, path, body | form(PAIR), f'training{path}')
  bad = post(gateway, path, body | form({'type': 'frob'}))
  for reply, why in ((training, 'training session'), (bad, 'frob')):
    assert reply.status_code == 400
    assert field in reply.text and why in reply.text
  assert len(gateway.records) == before


def test_a_schema_that_compiles_for_ever_is_stopped(serve):
  """It costs its time limit once, in another process; the gateway goes on."""
  gateway, *_ = serve('x', format_timeout_s=0.3)
  path, body, form, field = FORMS[0]
  schema = {'type': 'integer', 'multipleOf': 99999989}
  reply = post(gateway, path, body | form(schema))
  assert reply.status_code == 400, reply.text
  assert field in reply.text and 'format_timeout_s' in reply.text
  assert post(gateway, path, {**body, 'max_tokens': 2}).status_code == 200


def test_without_the_library(serve, tok, monkeypatch):
  """What to install."""

  def missing(tokenizer):
    raise ImportError("constrained decoding needs llguidance: pip install 'm2jax[…]'")

  monkeypatch.setattr(grammars, 'Compiler', missing)
  plain, *_ = serve('x')
  plain._service._readers._compiled = Everything()
  reply = post(plain, CHAT, {'messages': ASK, **FORMS[0][2](PAIR)})
  assert reply.status_code == 400 and 'pip install' in reply.text


class Everything:
  def __contains__(self, item):
    return True
