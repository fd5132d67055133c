"""Many, rude and vanishing clients of the gateway: each ends in its stated outcome."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import random
import socket
import threading
import time

import httpx
import pytest

from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.observe import metrics
from m2jax.rollout.api import GenerateRequest
from m2jax.rollout.serving import decode_calls
from tests.forge.roles.conftest import engine, variables
from tests.gateway.test_errors import ANSWER, OK, assert_serves, post
from tests.rollout import conftest as rollout
from tests.waiting import wait_until

__all__ = ['engine', 'variables']
serve_engine = rollout.serve
SESSIONS = 500


def head(key: str, body: bytes) -> bytes:
  lines = (
    'POST /v1/chat/completions HTTP/1.1',
    'host: localhost',
    f'authorization: Bearer {key}',
    f'content-length: {len(body)}',
  )
  return '\r\n'.join([*lines, '', '']).encode() + body


def address(gateway) -> tuple[str, int]:
  host, _, port = gateway.base_url.removeprefix('http://')[:-3].partition(':')
  return host, int(port)


# --- 500 sessions at once ---


async def client(gateway, key: str, kind: str, held: asyncio.Event) -> str:
  """One session of a kind; returns its outcome: a status, or how its stream ended."""
  body = json.dumps({'model': 5} if kind == 'bad' else OK | {'stream': True}).encode()
  reader, writer = await asyncio.open_connection(*address(gateway))
  try:
    writer.write(head(key if kind != 'stranger' else 'nobody', body))
    if kind == 'leaves':
      await held.wait()
      return 'left'
    status = (await reader.readline()).split()[1].decode()
    if status != '200':
      return status
    text = await asyncio.wait_for(reader.readuntil(b'0\r\n\r\n'), 60)
    return 'answer' if b'[DONE]' in text else 'error'
  finally:
    writer.close()


async def rush(gateway, keys, kinds, everybody) -> collections.Counter:
  held = asyncio.Event()
  tasks = [
    asyncio.ensure_future(client(gateway, key, kind, held))
    for key, kind in zip(keys, kinds, strict=True)
  ]
  async with asyncio.timeout(60):
    while not everybody():
      await asyncio.sleep(0.02)
  held.set()
  return collections.Counter(await asyncio.gather(*tasks))


def test_500_sessions_at_once(serve, tok):
  """All are in the engine before the first is answered: no deadlock; each ends as it
  should; nothing is left of them, and a second rush needs no more memory."""
  kinds = ['answers'] * 420 + ['leaves'] * 40 + ['bad'] * 20 + ['stranger'] * 20
  random.Random(0).shuffle(kinds)
  begun, gate = [], threading.Event()

  def script(request):
    begun.append(request)
    assert gate.wait(60)
    return tok.encode(ANSWER)

  gateway, scripted, records = serve(
    script, accept_unknown_keys=False, engine_options={'delay_s': 0.001}
  )

  def open_when_all_that_leave_have_left(before):
    left = lambda: sum(h.cancelled.is_set() for h in scripted.handles[before:])
    wait_until(lambda: left() == 40)
    gate.set()

  rss_bytes = []
  for round_ in range(2):
    keys = [f'session-{round_}-{i}' for i in range(SESSIONS)]
    for key in keys:
      gateway.sessions.open(key)
    before = len(scripted.requests)
    gate.clear()

    def everybody(before=before):
      if len(scripted.requests) - before < 460:
        return False
      opening = threading.Thread(
        target=open_when_all_that_leave_have_left, args=(before,)
      )
      opening.start()
      return True

    outcomes = asyncio.run(rush(gateway, keys, kinds, everybody))
    assert outcomes == {'answer': 420, 'left': 40, '400': 20, '401': 20}
    wait_until(lambda n=(round_ + 1) * 500: requests(gateway) == n)
    for key in keys:
      gateway.sessions.close(key)
    assert len(gateway.sessions) == 0
    records.clear()
    rss_bytes.append(metrics.rss_bytes())
  assert gateway.counters()['requests_total{status="499"}'] == 80
  assert scripted.cancelled['requests'] == 80
  assert rss_bytes[1] - rss_bytes[0] < 32 << 20
  gateway.sessions.open('k')
  assert_serves(gateway)


def requests(gateway) -> int:
  return sum(
    n for name, n in gateway.counters().items() if name.startswith('requests_total')
  )


# --- A client that sends garbage for ever ---


def garbage(rng: random.Random) -> bytes:
  """Bytes, or a damaged request, of the kinds that a broken agent sends."""
  good = json.dumps(OK).encode()
  at = rng.randrange(len(good))
  return rng.choice(
    (
      rng.randbytes(rng.randrange(2000)),
      good[:at],
      good[:at] + rng.randbytes(3) + good[at:],
      json.dumps(OK | {'messages': [{'role': rng.choice(('', 'x', 7))}]}).encode(),
      json.dumps(OK | {rng.choice(list(OK)): rng.choice((None, 1e400, []))}).encode(),
      b'[' * rng.randrange(1, 20_000),
    )
  )


def test_an_agent_that_sends_garbage_for_ever(serve):
  """Each request is a 4xx of its own; others are served meanwhile; nothing grows."""
  gateway, scripted, records = serve(ANSWER)
  stopping, statuses = threading.Event(), collections.Counter()

  def rude(seed):
    rng = random.Random(seed)
    with httpx.Client(trust_env=False) as http:
      url = f'{gateway.base_url}/chat/completions'
      while not stopping.is_set():
        headers = {'authorization': f'Bearer rude{seed}'}
        reply = http.post(url, content=garbage(rng), headers=headers)
        statuses[reply.status_code] += 1

  threads = [threading.Thread(target=rude, args=(seed,)) for seed in range(3)]
  for thread in threads:
    thread.start()
  wait_until(lambda: statuses.total() > 100)
  before_bytes, waits_s = metrics.rss_bytes(), []
  ends_s = time.monotonic() + 1.0
  while time.monotonic() < ends_s or statuses.total() < 300:
    assert time.monotonic() < ends_s + 60
    began_s = time.monotonic()
    assert post(gateway, OK).status_code == 200
    waits_s.append(time.monotonic() - began_s)
    records.clear()
    time.sleep(0.05)
  stopping.set()
  for thread in threads:
    thread.join(30)
  served = len(waits_s)
  # A damaged letter of a text is a request like any other.
  assert set(statuses) <= {200, 400, 404, 413}, statuses
  assert statuses[400] > 0.8 * statuses.total() > 200
  assert len(scripted.requests) <= served + statuses[200]
  assert max(waits_s) < 2.0 and len(gateway.sessions) <= 4
  assert metrics.rss_bytes() - before_bytes < 32 << 20


# --- A client that leaves in mid-stream ---


class Narrow:
  """The real engine of a small vocabulary and context, for the gateway's tokenizer."""

  context_tokens = 100_000
  alive = True

  def __init__(self, scheduler):
    self._scheduler, self.stats = scheduler, scheduler.stats

  def submit(self, request, on_tokens=None):
    sampled = dataclasses.replace(request.sampling, stop_ids=(), max_tokens=36)
    prompt = request.prompt_ids[-8:] % 61
    return self._scheduler.submit(GenerateRequest(prompt, sampled), on_tokens)


@pytest.mark.parametrize('dialect', ['/v1/chat/completions', '/v1/messages'])
def test_pages_of_a_client_that_leaves(
  engine, variables, tok, monkeypatch, serve_engine, dialect
):
  """They are free at once, not when the response would have ended; it is counted, and
  recorded as cancelled."""
  finish, steps, records = decode_calls.DecodeCalls.finish, [], []

  def slow(*args):
    steps.append(time.sleep(0.3))
    return finish(*args)

  monkeypatch.setattr(decode_calls.DecodeCalls, 'finish', slow)
  scheduler = serve_engine()

  def usable():
    stats = scheduler.stats()
    return stats['free_pages'] + stats['cached_pages']

  pages, config = usable(), GatewayConfig(accept_unknown_keys=True)
  with Gateway(config, tok, Narrow(scheduler), records.append) as gateway:
    body = json.dumps(OK | {'stream': True, 'max_tokens': 36}).encode()
    with socket.create_connection(address(gateway)) as connection:
      request = head('k', body).replace(b'/v1/chat/completions', dialect.encode())
      connection.sendall(request)
      assert b'200' in connection.recv(65536)
      wait_until(lambda: len(steps) >= 2 and usable() < pages)
      connection.shutdown(socket.SHUT_RDWR)
    left = len(steps)
    wait_until(lambda: usable() == pages)
    assert len(steps) <= left + 2  # of 9 in all
    wait_until(lambda: records)
    assert [r.finish_reason for r in records] == ['cancelled']
    assert 0 < len(records[0].response_ids) < 36
    wait_until(lambda: 'requests_total{status="499"}' in gateway.counters())
    assert scheduler.stats()['active_slots'] == 0
