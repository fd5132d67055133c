"""Requests that real coding agents sent: each prompt extends the last one.

`make test-clients` with RECORD=1 recorded them (tests/gateway/external), texts of the
products replaced by placeholders.
"""

from __future__ import annotations

import re

import pytest

from m2jax.gateway import dialects
from m2jax.rl import rewards
from tests.gateway import clients
from tests.gateway.conftest import HTTP
from tests.gateway.external import recording, scripts


@pytest.mark.parametrize('name', scripts.SCENARIOS)
def test_replayed(serve, tok, name):
  scenario = scripts.SCENARIOS[name]
  client = scenario.command()
  gateway, engine, records = serve(
    scenario.script(tok, client), engine_options={'context_tokens': 100_000}
  )
  gateway.sessions.open('episode', 'training')
  base = gateway.base_url.removesuffix('/v1')
  path = dialects.DIALECTS[client.dialect].path
  requests = recording.load(name)
  for body, headers in requests:
    headers = {'x-api-key': 'episode'} | headers
    reply = HTTP.post(base + path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
  assert len(records) == len(requests)
  clients.assert_recorded(engine, records)
  scenario.check(records)
  # Titles and summaries are not trained, and what is was sampled for the task.
  acted = rewards.acted(records)
  assert len(acted) == len(records) - sum(map(recording.untrained, requests))
  assert acted[0].fork_reason is None
  # Nothing that the client sends is unknown, or would be ignored in silence.
  assert 'field="unknown"' not in HTTP.get(f'{base}/metrics').text


@pytest.mark.parametrize('name', scripts.SCENARIOS)
def test_a_recording_says_nothing_of_its_machine(name):
  """No paths but those of the scenario, no addresses, no keys."""
  text = (recording.DIRECTORY / f'{name}.json').read_text()
  text = text.replace('/home/user', '').replace('/workspace', '')
  private = (
    r'/(?:tmp|root|home|Users)/|\b\d+\.\d+\.\d+\.\d+\b|localhost|\bsk-\w|Bearer '
  )
  assert re.findall(private, text) == []
