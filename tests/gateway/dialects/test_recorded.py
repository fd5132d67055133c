"""Requests that real coding agents sent: each prompt extends the last one.

`make test-clients` with RECORD=1 recorded them (tests/gateway/external), texts of the
products replaced by placeholders.
"""

from __future__ import annotations

import httpx
import pytest

from m2jax.gateway import dialects
from tests.gateway import clients
from tests.gateway.external import commands, recording, run_clients


@pytest.mark.parametrize('name', recording.names())
def test_replayed(serve, tok, name):
  client = commands.CLIENTS[name]
  gateway, engine, records = serve(
    run_clients.script(tok, client), engine_options={'context_tokens': 100_000}
  )
  gateway.sessions.open('episode', 'training')
  base = gateway.base_url.removesuffix('/v1')
  path = dialects.DIALECTS[client.dialect].path
  bodies = recording.load(name)
  with httpx.Client(headers={'x-api-key': 'episode'}) as http:
    for body in bodies:
      reply = http.post(base + path, json=body)
      assert reply.status_code == 200, reply.text
  assert len(records) == len(bodies) == 3
  clients.assert_recorded(engine, records)
  clients.assert_extends(records)
  # Nothing that the client sends is unknown, or would be ignored in silence.
  assert 'field="unknown"' not in httpx.get(f'{base}/metrics').text
