"""What the relay passes on, and what it takes for the gateway's failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import pytest

from m2jax.agents import agent as agents
from m2jax.agents import http, relay
from m2jax.gateway.hints import BODY_FIELD, HEADERS

OK = b'HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}'


@contextlib.asynccontextmanager
async def relaying(gateway, timeout_s=20.0, hints=False):
  """A relay to gateway(reader, writer), which serves a connection; and its port."""

  async def serve(reader, writer):
    with contextlib.suppress(ConnectionError):
      await gateway(reader, writer)
    writer.close()

  server = await asyncio.start_server(serve, '127.0.0.1', 0)
  url = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1'
  endpoint = agents.Endpoint(url, 'own', 'm2jax', {})
  client, listener = http.make_client(), socket.create_server(('127.0.0.1', 0))
  way = relay.Relay(listener, endpoint, client, relay.Limits(), timeout_s, hints)
  await way.start()
  try:
    yield way
  finally:
    await way.close()
    await client.aclose()
    server.close()


async def send(way, head='POST /v1/messages HTTP/1.1\r\nhost: a\r\n', body=b'{}'):
  """Sends a request; returns the connection."""
  reader, writer = await asyncio.open_connection('127.0.0.1', way.port)
  writer.write(f'{head}content-length: {len(body)}\r\n\r\n'.encode() + body)
  return reader, writer


async def status(way, **request):
  reader, writer = await send(way, **request)
  line = await reader.readline()
  writer.close()
  return int(line.split()[1])


async def request_of(reader):
  """The headers and the body of a request."""
  lines = (await reader.readuntil(b'\r\n\r\n')).decode().split('\r\n')[1:-2]
  headers = dict(line.lower().split(': ', 1) for line in lines)
  body = await reader.readexactly(int(headers.get('content-length', 0)))
  return headers, json.loads(body or b'{}')


@pytest.mark.parametrize('hints', [False, True])
def test_what_a_command_says_of_a_request_is_passed_only_if_asked_for(hints):
  """A hint exempts a completion from training. No other header reaches the gateway but
  those of a model API, and the relay's own key."""
  seen = []

  async def gateway(reader, writer):
    seen.append(await request_of(reader))
    writer.write(OK)
    await writer.drain()

  async def run():
    said = ['X-API-Key', 'authorization', 'cookie', 'x-other', *sorted(HEADERS)]
    head = 'POST /v1/messages?beta=true HTTP/1.1\r\nhost: a\r\nanthropic-version: 1\r\n'
    head += ''.join(f'{name}: auxiliary\r\n' for name in said)
    body = json.dumps({'max_tokens': 1, BODY_FIELD: {'x': 'y'}}).encode()
    async with relaying(gateway, hints=hints) as way:
      assert await status(way, head=head, body=body) == 200

  asyncio.run(run())
  [(headers, body)] = seen
  assert headers.pop('authorization') == 'bearer own' and headers.pop('host')
  passed = {'anthropic-version', 'content-length'} | (HEADERS if hints else set())
  assert headers.keys() == passed
  assert body.keys() == {'max_tokens', 'model'} | ({BODY_FIELD} if hints else set())


def test_other_methods_are_refused_here():
  """Servers and clients differ in what a CONNECT, TRACE or HTTP/2 preface means."""

  async def run():
    async with relaying(None) as way:
      for method in ('CONNECT', 'TRACE', 'PRI', 'DELETE', "M!#$%&'*+-.^_`|~"):
        head = f'{method} /v1/messages HTTP/1.1\r\nhost: a\r\n'
        assert await status(way, head=head) == 404
      assert (way.failure, way.begun) == ('', 0)

  asyncio.run(run())


def answer(*texts):
  """A gateway that answers one request a connection with each of these."""
  left = list(texts)

  async def gateway(reader, writer):
    await request_of(reader)
    writer.write(left.pop(0))
    await writer.drain()

  return gateway


async def silent(reader, writer):
  await reader.read()


def empty(code, headers=''):
  return f'HTTP/1.1 {code} X\r\ncontent-length: 0\r\n{headers}\r\n'.encode()


BUSY = empty(429, 'retry-after: 1\r\nconnection: close\r\n')
CASES = {
  'engine down': (answer(empty(503)), 503, 'HTTP 503', 0),
  'restarted': (answer(empty(401)), 401, 'HTTP 401', 0),
  'cut off': (answer(OK.replace(b': 2', b': 9')), 200, 'broke off', 1),
  'gone': (answer(b''), 502, 'cannot be reached', 0),
  'bad request': (answer(empty(400)), 400, '', 0),
  'busy for a while': (answer(BUSY, BUSY, OK), 200, '', 1),
  'slow': (silent, 504, '', 1),
}


@pytest.mark.parametrize('name', CASES)
def test_what_the_gateways_failure_is(monkeypatch, name):
  """The engine failed, or the session is gone. A bound of all requests together, or a
  time, may be of the command's making."""
  monkeypatch.setattr(relay, '_BUSY_S', 0.01)
  gateway, code, failure, begun = CASES[name]

  async def run():
    async with relaying(gateway, timeout_s=0.2) as way:
      reader, writer = await send(way)
      assert int((await reader.readline()).split()[1]) == code
      with contextlib.suppress(TimeoutError):  # a complete answer is kept alive
        await asyncio.wait_for(reader.read(), 0.1)
      assert (bool(failure), way.begun) == (bool(way.failure), begun)
      assert failure in way.failure
      writer.close()

  asyncio.run(run())


def test_a_client_that_does_not_read_is_no_failure_of_the_gateway():
  """The gateway closes its connection, which the relay finds when the client reads."""
  closed = asyncio.Event()

  async def gateway(reader, writer):
    await request_of(reader)
    writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n')
    with contextlib.suppress(TimeoutError):
      while True:
        writer.write(bytes(1 << 20))
        await asyncio.wait_for(writer.drain(), 0.2)
    writer.transport.abort()
    closed.set()

  async def run():
    async with relaying(gateway) as way:
      reader, writer = await send(way)
      await closed.wait()
      while await reader.read(1 << 20):
        pass
      assert (way.failure, way.begun) == ('', 1)
      writer.close()

  asyncio.run(run())


def test_a_client_that_has_closed_its_side_gets_the_rest():
  async def gateway(reader, writer):
    await request_of(reader)
    writer.write(b'HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nbegin ')
    await asyncio.sleep(0.1)
    writer.write(b'end')

  async def run():
    async with relaying(gateway) as way:
      reader, writer = await send(way)
      await reader.readuntil(b'begin ')
      writer.write_eof()
      assert b'end' in await reader.read() and way.failure == ''
      writer.close()

  asyncio.run(run())


def test_an_answer_does_not_wait_for_the_clients_acknowledgements():
  """Head and body are two writes: the kernel would hold the second for 40 ms."""

  async def gateway(reader, writer):
    while True:
      await request_of(reader)
      writer.write(OK)

  async def run():
    async with relaying(gateway) as way:
      reader, writer = await send(way)
      times = []
      for _ in range(10):
        begin = time.perf_counter()
        await reader.readuntil(b'{}')
        times.append(time.perf_counter() - begin)
        writer.write(b'POST /v1/messages HTTP/1.1\r\nhost: a\r\n')
        writer.write(b'content-length: 2\r\n\r\n{}')
      assert min(times[1:]) < 0.02, times
      writer.close()

  asyncio.run(run())
