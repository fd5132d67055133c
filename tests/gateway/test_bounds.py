"""Whatever a stranger can grow has a bound, and reaching it costs nobody else.

Real sockets throughout: what is judged is a server that is being attacked.
"""

import concurrent.futures
import contextlib
import json
import os
import socket
import statistics
import threading
import time

import httpx
import psutil
import pytest

from m2jax.gateway.config import GatewayConfig
from tests.gateway.conftest import response_text

ANSWER = response_text('t', 'fine')
OK = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'hi'}]}
HEAD = 'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\n'
MIB = 1 << 20


def address(gateway):
  host, port = gateway.base_url.removeprefix('http://').removesuffix('/v1').split(':')
  return host, int(port)


def connect(gateway):
  connection = socket.create_connection(address(gateway), timeout=30)
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return connection


def answer(connection):
  """Status and body of one response on a raw connection; None if it was just closed."""
  data = b''
  with contextlib.suppress(ConnectionError):
    while chunk := connection.recv(65_536):
      data += chunk
      head, end, body = data.partition(b'\r\n\r\n')
      if end:
        fields = head.lower().split(b'\r\n')
        lengths = [f.split(b':')[1] for f in fields if f.startswith(b'content-length:')]
        if lengths and len(body) >= int(lengths[0]):
          return int(data.split()[1]), json.loads(body)
  return None


def post(gateway, content, key='k', timeout=120):
  if not isinstance(content, bytes):
    content = json.dumps(content).encode()
  with httpx.Client(trust_env=False, timeout=timeout) as client:
    return client.post(
      f'{gateway.base_url}/chat/completions',
      content=content,
      headers={'authorization': f'Bearer {key}'},
    )


def user(text):
  return OK | {'messages': [{'role': 'user', 'content': text}]}


def assert_serves(gateway):
  assert post(gateway, OK).json()['choices'][0]['message']['content'] == 'fine'


def children_bytes():
  """Resident bytes of this process and of those it started."""
  me = psutil.Process()
  total = 0
  for process in [me, *me.children(recursive=True)]:
    with contextlib.suppress(psutil.Error):
      total += process.memory_info().rss
  return total


# --- Large bodies.

BODIES = {
  'punctuation': json.dumps(user('~' * (16 * MIB - 200))).encode(),
  'words': json.dumps(user('word, é (x) ' * (MIB + MIB // 8))).encode(),
  'objects': b'{"messages":[' + b'{},' * (5 * MIB) + b'{}],"model":"m2jax"}',
  'numbers': b'{"x":[' + b'0,' * (7 * MIB) + b'0],"model":"m2jax","messages":[]}',
  'brackets': b'[' * (16 * MIB - 1),
  'keys': b'{' + b','.join(b'"%d":0' % i for i in range(MIB)) + b'}',
}


@pytest.mark.parametrize('context_tokens', [800, 200_000])
def test_large_bodies_do_not_hold_the_loop(serve, context_tokens):
  """While bodies of 16 MB arrive one after the other, /health answers, and memory is
  what the settings say. With a small context their bytes alone refuse them."""
  gateway, engine, _ = serve(
    ANSWER,
    engine_options={'context_tokens': context_tokens},
    max_body_bytes=17 * MIB,
    max_unfinished_bytes=40 * MIB,
    max_waiting_reads=4,
    read_timeout_s=5,
    read_memory_bytes=1024 * MIB,
  )
  before = children_bytes()
  done = threading.Event()
  statuses, delays, peak = [], [], before

  def attack(content):
    for _ in range(2):
      try:
        statuses.append(post(gateway, content).status_code)
      except httpx.TransportError:
        statuses.append(None)

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    attacks = [pool.submit(attack, content) for content in BODIES.values()]
    with httpx.Client(trust_env=False, timeout=30) as client:
      url = gateway.base_url.removesuffix('/v1') + '/health'
      while not all(attack.done() for attack in attacks):
        started = time.monotonic()
        assert client.get(url).status_code == 200
        delays.append(time.monotonic() - started)
        peak = max(peak, children_bytes())
        time.sleep(0.01)
    for attack in attacks:
      attack.result()
  done.set()
  delays.sort()
  print(
    f'context {context_tokens}: {len(delays)} probes, median '
    f'{statistics.median(delays) * 1e3:.1f} ms, 90 % '
    f'{delays[int(0.9 * len(delays))] * 1e3:.1f} ms, max {delays[-1] * 1e3:.0f} ms, '
    f'memory +{(peak - before) / MIB:.0f} MiB, statuses {statuses}'
  )
  assert statistics.median(delays) < 0.1
  assert not engine.requests
  assert set(statuses) <= {400, 413, 429, None}
  # Bodies here and at the clients (which this process is, too), and one reader.
  assert peak - before < (1024 + 2 * 40 + 4 * 17 * 3 + 100) * MIB
  assert_serves(gateway)
