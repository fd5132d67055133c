"""Requests that real coding agents sent: each prompt extends the last one.

`make test-clients` with RECORD=1 recorded them (tests/gateway/external), texts of the
products replaced by placeholders.
"""

from __future__ import annotations

import httpx
import pytest

from m2jax.gateway import dialects
from m2jax.rl import rewards
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
  requests = recording.load(name)
  with httpx.Client(headers={'x-api-key': 'episode'}) as http:
    for body, headers in requests:
      reply = http.post(base + path, json=body, headers=headers)
      assert reply.status_code == 200, reply.text
  assert len(records) == len(requests)
  clients.assert_recorded(engine, records)
  # Titles are not trained, and do not come between the requests of the task.
  auxiliary = [r for r in records if r.fork_reason == 'auxiliary']
  assert len(auxiliary) == sum(recording.untrained(headers) for _, headers in requests)
  task = rewards.acted(records)
  assert len(task) == 3 and len(task) + len(auxiliary) == len(records)
  assert task[0].fork_reason is None
  clients.assert_extends(task)
  # Nothing that the client sends is unknown, or would be ignored in silence.
  assert 'field="unknown"' not in httpx.get(f'{base}/metrics').text
