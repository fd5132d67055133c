"""Everything that a client can grow has a bound; reaching it affects no other client.

Real sockets throughout: what is judged is a server that is being attacked.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from m2jax.gateway import dialects
from m2jax.gateway import prompts as prompts_lib
from tests.gateway.conftest import HTTP, SH, response_text
from tests.waiting import wait_until

ANSWER = response_text('t', 'fine')
OK = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'hi'}]}
HEAD = (
  'POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n'
)
MIB = 1 << 20


def address(gateway):
  host, port = gateway.base_url.removeprefix('http://').removesuffix('/v1').split(':')
  return host, int(port)


def connect(gateway):
  connection = socket.create_connection(address(gateway), timeout=30)
  connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  return connection


def answer(connection):
  """Status and body of one response on a raw connection; None if it was just closed.

  A full service says when to try again, in whole seconds, and no other response does.
  """
  data = b''
  with contextlib.suppress(ConnectionError):
    while chunk := connection.recv(65_536):
      data += chunk
      head, end, body = data.partition(b'\r\n\r\n')
      if end:
        fields = head.lower().split(b'\r\n')
        lengths = [f.split(b':')[1] for f in fields if f.startswith(b'content-length:')]
        if lengths and len(body) >= int(lengths[0]):
          status = int(data.split()[1])
          waits = [f.split(b': ')[1] for f in fields if f.startswith(b'retry-after:')]
          assert waits == ([b'1'] if status in (429, 503) else [])
          return status, json.loads(body)
  return None


def post(gateway, content, key='k'):
  if not isinstance(content, bytes):
    content = json.dumps(content).encode()
  return HTTP.post(
    f'{gateway.base_url}/chat/completions',
    content=content,
    headers={'authorization': f'Bearer {key}'},
  )


def user(text):
  return OK | {'messages': [{'role': 'user', 'content': text}]}


def assert_serves(gateway):
  assert post(gateway, OK).json()['choices'][0]['message']['content'] == 'fine'


def readers():
  """The reader processes of this process."""
  found = []
  for child in psutil.Process().children():
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie of another test
      if 'reader_process' in ' '.join(child.cmdline()):
        found.append(child)
  return found


@contextlib.contextmanager
def stuck_reader(gateway):
  """Meanwhile the only reader process does nothing; `gateway` must have asked it."""
  (reader,) = readers()
  reader.suspend()
  try:
    yield
  finally:
    with contextlib.suppress(psutil.NoSuchProcess):
      reader.resume()


def reads(gateway) -> int:
  """The number of its readers that have something to read."""
  own = gateway._service._readers
  return len(own._processes) - len(own._idle)


def own_bytes():
  return psutil.Process().memory_info().rss


# Asks for /health until its stdin ends; prints how long each answer took, and how long
# the round trip to a `cat` just before: what the machine itself takes.
PROBE = """
import http.client, json, select, subprocess, sys, time
pipe = subprocess.PIPE
echo = subprocess.Popen(['cat'], stdin=pipe, stdout=pipe, bufsize=0)
connection = http.client.HTTPConnection(sys.argv[1], int(sys.argv[2]), timeout=120)
delays = []
print('ready', flush=True)
while not select.select([sys.stdin], [], [], 0.01)[0]:
  times = [time.monotonic()]
  echo.stdin.write(b'x')
  echo.stdout.read(1)
  times.append(time.monotonic())
  connection.request('GET', '/health')
  response = connection.getresponse()
  response.read()
  assert response.status == 200
  times.append(time.monotonic())
  delays.append((times[1] - times[0], times[2] - times[1]))
echo.kill()
print(json.dumps(delays))
"""


class Probe:
  """Watches a gateway from another process: how fast it answers, by how much the
  memory of its process, which is this one, grows (a reader's is bounded by the system).

  On a busy machine everything is late, so the 100 ms that are allowed grow with the
  load and with what an idle process takes to wake up and answer.
  """

  def __init__(self, gateway):
    command = [sys.executable, '-c', PROBE, *map(str, address(gateway))]
    pipe = subprocess.PIPE
    self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
    self._process.stdout.readline()  # it asks from now on
    self.added_bytes = 0

  def until(self, done):
    before, begun = own_bytes(), time.monotonic()
    with self._process as probe:
      while not done():
        self.added_bytes = max(self.added_bytes, own_bytes() - before)
        time.sleep(0.02)
      elapsed_s = time.monotonic() - begun
      output, _ = probe.communicate()
    machine, delays = zip(*json.loads(output), strict=True)
    share = max(1, os.getloadavg()[0] / os.cpu_count())  # of those who want a core
    allowed_s = share * (0.1 + 20 * statistics.median(machine))
    # By time, not by number: a server that is stuck is asked seldom.
    stuck = sum(delay for delay in delays if delay > allowed_s) / elapsed_s
    print(
      f'{len(delays)} probes, median {statistics.median(delays) * 1e3:.1f} ms, max '
      f'{max(delays) * 1e3:.0f} ms, {stuck:.0%} of the time above '
      f'{allowed_s * 1e3:.0f} ms, memory +{self.added_bytes / MIB:.0f} MiB'
    )
    assert statistics.median(delays) < allowed_s and stuck < 0.3


# --- Large bodies.

BODIES = {
  'punctuation': json.dumps(user('~' * (8 * MIB - 200))).encode(),
  'words': json.dumps(user('word, é (x) ' * (MIB // 2))).encode(),
  'objects': b'{"messages":[' + b'{},' * (5 * MIB // 2) + b'{}],"model":"m2jax"}',
  'numbers': b'{"x":[' + b'0,' * (7 * MIB // 2) + b'0],"model":"m2jax","messages":[]}',
  'brackets': b'[' * (8 * MIB - 1),
  'keys': b'{' + b','.join(b'"%d":0' % i for i in range(MIB // 2)) + b'}',
}


# Sends each file of a directory, in threads; prints the statuses.
ATTACKER = """
import concurrent.futures, pathlib, socket, sys
host, port, directory = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
def attack(path):
  body = path.read_bytes()
  with socket.create_connection((host, port), timeout=120) as connection:
    try:
      connection.sendall(
        b'POST /v1/chat/completions HTTP/1.1\\r\\nhost: localhost\\r\\n'
        b'authorization: Bearer k\\r\\ncontent-length: %d\\r\\n\\r\\n' % len(body)
      )
      connection.sendall(body)
      return connection.recv(100).split()[1].decode()
    except OSError:
      return 'closed'
paths = sorted(directory.iterdir())
with concurrent.futures.ThreadPoolExecutor(4) as pool:
  print(*pool.map(attack, paths))
"""


@pytest.mark.long
@pytest.mark.parametrize('context_tokens', [800, 200_000])
def test_large_bodies_do_not_hold_the_loop(serve, tmp_path, context_tokens):
  """While bodies of 8 MB arrive one after the other, /health answers, and memory is
  what the settings say. With a small context they are rejected by their size."""
  gateway, engine, _ = serve(
    ANSWER,
    engine_options={'context_tokens': context_tokens},
    max_body_bytes=9 * MIB,
    max_unfinished_bytes=20 * MIB,
    max_waiting_reads=4,
    read_timeout_s=3,
    read_memory_bytes=512 * MIB,
  )
  for name, content in BODIES.items():
    (tmp_path / name).write_bytes(content)
  assert_serves(gateway)
  probe = Probe(gateway)
  command = [sys.executable, '-c', ATTACKER, *map(str, address(gateway)), str(tmp_path)]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
    probe.until(lambda: attacker.poll() is not None)
    statuses = attacker.stdout.read().split()
  assert len(engine.requests) == 1
  assert len(statuses) == len(BODIES)
  assert set(statuses) <= {'400', '413', '429', 'closed'}
  # What arrives, and again while it goes to a reader.
  assert probe.added_bytes < (3 * 20 + 60) * MIB
  assert_serves(gateway)
  if context_tokens == 800:
    assert set(statuses) <= {'400', 'closed'}
    assert probe.added_bytes < 20 * MIB  # rejected by their length: never received


@pytest.mark.long
def test_large_prompts_are_encoded_off_the_loop(serve):
  """A prompt that fits, but takes the tokenizer a while, delays nobody else."""
  gateway, engine, _ = serve(ANSWER, engine_options={'context_tokens': 1_000_000})
  content = json.dumps(user('hi there, ' * 40_000)).encode()
  probe = Probe(gateway)
  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    posts = [pool.submit(post, gateway, content) for _ in range(3)]
    probe.until(lambda: all(each.done() for each in posts))
  assert [each.result().status_code for each in posts] == [200] * 3
  assert min(len(request.prompt_ids) for request in engine.requests) > 100_000


@pytest.mark.long
def test_counting_tokens_does_not_hold_the_loop(serve):
  """Nor do the texts of all tokens, for a prompt far above the context."""
  gateway, _, _ = serve(ANSWER, engine_options={'context_tokens': 100_000})
  body = user('é q!' * (MIB // 8)) | {'return_token_strs': True}
  url = gateway.base_url.removesuffix('/v1') + '/tokenize'
  probe = Probe(gateway)
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    send = functools.partial(HTTP.post, url, headers={'authorization': 'Bearer k'})
    posts = [pool.submit(send, content=json.dumps(body).encode()) for _ in range(2)]
    probe.until(lambda: all(each.done() for each in posts))
  assert all(each.result().json()['count'] > MIB // 2 for each in posts)


def test_a_prompt_is_refused_by_its_bytes(serve, tok):
  """A text that cannot fit is rejected before encoding; one that can is not."""
  gateway, engine, _ = serve(ANSWER, engine_options={'context_tokens': 2000})
  for text, fits in (('~' * 1500, True), ('~' * 30_000, False), ('a b ' * 400, True)):
    reply = post(gateway, user(text))
    assert reply.status_code == (200 if fits else 400), reply.text
    if not fits:
      error = reply.json()['error']
      assert error['code'] == 'context_length_exceeded'
      assert 'at least' in error['message'] and '2000' in error['message']
  assert len(engine.requests) == 2
  calls = [{'id': 'x', 'function': {'name': 'f', 'arguments': '{}'}}] * 20_000
  results = [{'role': 'tool', 'tool_call_id': 'x', 'content': ''}] * 20_000
  for messages in (
    OK['messages'] * 2001,
    [{'role': 'assistant', 'content': 'x', 'tool_calls': calls}, *results],
  ):
    reply = post(gateway, OK | {'messages': messages})
    assert reply.json()['error']['code'] == 'context_length_exceeded'
  limit = MIB + 6 * tok.longest_token_bytes * 2000
  assert post(gateway, b' ' * limit).json()['error']['code'] == 'invalid_json'
  with connect(gateway) as connection:  # whose body is not even received
    connection.sendall((HEAD + f'content-length: {limit + 1}\r\n\r\n').encode())
    status, body = answer(connection)
  assert (status, body['error']['code']) == (400, 'context_length_exceeded')


# --- Reader processes.


def test_a_large_request_is_read_as_a_small_one(serve, monkeypatch):
  """The reader process gives what the loop gives: prompts, parents and errors. On the
  loop nothing of it is parsed or encoded."""
  inline = []  # what this process does
  for module, name in ((dialects, 'parse'), (prompts_lib, 'encode')):
    function = getattr(module, name)
    monkeypatch.setattr(
      module, name, lambda *args, f=function: inline.append(f.__name__) or f(*args)
    )
  calls = response_text('look', 'né', [('sh', {'cmd': 'ls'})])
  seen = []
  for inline_bytes in (0, MIB):
    gateway, engine, records = serve(calls, inline_bytes=inline_bytes)
    messages = [{'role': 'user', 'content': 'count é \U0001f642'}]
    for _ in range(3):
      reply = post(gateway, OK | {'messages': messages, 'tools': [SH]})
      message = reply.json()['choices'][0]['message']
      call = message['tool_calls'][0]['id']
      messages += [message, {'role': 'tool', 'tool_call_id': call, 'content': 'x'}]
    faults = []
    for body in (b'{', [], {'model': 1}, OK | {'top_p': 7}, user('x') | {'model': 'y'}):
      reply = post(gateway, body)
      faults.append((reply.status_code, reply.json()))
    orphan = OK | {'messages': [messages[0], messages[-1]]}  # a result of no call
    reply = post(gateway, orphan)
    faults.append((reply.status_code, reply.json()))
    prompts = [record.prompt_ids.tolist() for record in records]
    parents = [record.parent is not None for record in records]
    assert parents == [False, True, True]
    count = HTTP.post(
      gateway.base_url.removesuffix('/v1') + '/tokenize',
      json={'model': 'm2jax', 'prompt': 'né'},
      headers={'authorization': 'Bearer k'},
    )
    faults.append(count.json())
    assert set(inline) == ({'parse', 'encode'} if inline_bytes else set())
    seen.append((prompts, faults))
  assert seen[0] == seen[1]


def test_a_reader_that_ends_is_replaced(serve):
  """A reader out of time, out of memory or killed costs one request its answer, or
  none; no reader outlives the gateway, and none imports the accelerator's libraries."""
  small = OK | {'user': 'x' * 200}
  slow = dict(read_timeout_s=0.5)
  hungry = dict(read_memory_bytes=48 * MIB, max_body_bytes=6 * MIB)
  for bound in (slow, hungry):
    options = {'inline_bytes': 100, 'body_overhead_bytes': 6 * MIB} | bound
    gateway, _, _ = serve(ANSWER, **options)
    assert post(gateway, small).status_code == 200
    if bound is slow:
      (reader,) = readers()
      libraries = pathlib.Path(f'/proc/{reader.pid}/maps').read_text()
      assert 'tokenizers' in libraries
      assert not re.search('jaxlib|pydantic_core|sqlalchemy|uvloop', libraries)
      with stuck_reader(gateway):
        reply = post(gateway, small)
    else:
      reply = post(gateway, b'[' + b'[0],' * (5 * MIB // 4) + b'0]')
    error = reply.json()['error']
    assert (reply.status_code, error['code']) == (413, 'request_too_large')
    assert next(iter(bound)) in error['message']
    assert post(gateway, small).status_code == 200
    if bound is slow:
      (reader,) = readers()
      reader.kill()
      reader.wait()
      assert post(gateway, small).status_code == 200
    assert len(readers()) == 1
    gateway.stop()
    assert not readers()


def test_stopping_ends_a_read(serve):
  """A gateway that stops does not wait for requests that it still reads, and can
  be started again."""
  gateway, _, _ = serve(ANSWER, inline_bytes=100, stop_timeout_s=0)
  small = OK | {'user': 'x' * 200}
  assert post(gateway, small).status_code == 200
  with concurrent.futures.ThreadPoolExecutor(1) as pool, stuck_reader(gateway):
    reply = pool.submit(post, gateway, small)
    wait_until(lambda: reads(gateway))
    started = time.monotonic()
    gateway.stop()
    assert time.monotonic() - started < 2
    assert isinstance(reply.exception(), httpx.TransportError) or (
      reply.result().status_code >= 500
    )
  gateway.start()
  assert post(gateway, small).status_code == 200


def test_large_requests_wait_in_a_bounded_queue(serve):
  """If the queue is full, a request is rejected at once, with the time to retry, in the
  form of its dialect."""
  gateway, _, _ = serve(ANSWER, inline_bytes=100, max_waiting_reads=1)
  large = OK | {'user': 'x' * 200}
  assert post(gateway, large).status_code == 200
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    with stuck_reader(gateway):
      posts = [pool.submit(post, gateway, large) for _ in range(2)]
      wait_until(lambda: gateway._service._readers._waiting)
      rejected = post(gateway, large)
      response = HTTP.post(
        gateway.base_url + '/responses',
        json={'model': 'm2jax', 'input': 'x' * 200},
        headers={'authorization': 'Bearer k'},
      )
    assert [each.result().status_code for each in posts] == [200, 200]
  for reply, code in ((rejected, 'gateway_busy'), (response, 'rate_limit_exceeded')):
    # Clients parse only whole seconds.
    assert (reply.status_code, reply.headers['retry-after']) == (429, '1')
    assert reply.json()['error']['code'] == code
    assert 'max_waiting_reads=1' in reply.json()['error']['message']
  assert_serves(gateway)


def test_unfinished_bodies_are_bounded_together(serve):
  """Bodies that never end share a bound; when their clients go, it is free again."""
  gateway, _, _ = serve(ANSWER, max_body_bytes=MIB, max_unfinished_bytes=MIB)
  head = (HEAD + f'content-length: {MIB}\r\n\r\n').encode()
  half = [connect(gateway) for _ in range(2)]
  for connection in half:
    connection.sendall(head + b' ' * (400 << 10))
  wait_until(lambda: post(gateway, b' ' * (500 << 10)).status_code == 429)
  reply = post(gateway, b' ' * (500 << 10))
  assert (reply.status_code, reply.json()['error']['code']) == (429, 'gateway_busy')
  assert 'max_unfinished_bytes' in reply.json()['error']['message']
  assert_serves(gateway)
  for connection in half:
    connection.close()
  wait_until(lambda: gateway.counters().get('requests_total{status="499"}') == 2)
  assert post(gateway, b' ' * (900 << 10)).status_code == 400


# --- Connections.


def closed(gateway, reason):
  return gateway.counters().get(f'closed_connections_total{{reason="{reason}"}}', 0)


@pytest.mark.parametrize(
  'headers',
  [
    ''.join(f'x-{i}: y\r\n' for i in range(1000)),
    'x: ' + 'y' * 40_000 + '\r\n',
    'x: ' + 'y' * 1_000_000,  # never ends
  ],
)
def test_header_bytes(serve, headers):
  """Headers beyond their bytes, in one piece or in thousands, get a 431."""
  gateway, _, _ = serve(ANSWER)
  with connect(gateway) as connection:
    with contextlib.suppress(ConnectionError):
      connection.sendall((HEAD + headers + '\r\n\r\n').encode())
    reply = answer(connection)
  # A client that still sends when the connection closes may not see the answer.
  if reply is not None:
    assert (reply[0], reply[1]['error']['code']) == (431, 'headers_too_large')
  assert closed(gateway, 'headers_too_large') == 1
  ok = HEAD + ''.join(f'x-{i}: y\r\n' for i in range(200))
  with connect(gateway) as connection:
    connection.sendall((ok + 'content-length: 2\r\n\r\n{}').encode())
    assert answer(connection)[0] == 400
  assert_serves(gateway)


def trickle(connection, data, pause_s=0.05, limit_s=20):
  """Sends byte by byte until the server answers or closes."""
  connection.settimeout(pause_s)
  deadline = time.monotonic() + limit_s
  for byte in data:
    with contextlib.suppress(ConnectionError):
      connection.sendall(bytes([byte]))
    try:
      connection.recv(1, socket.MSG_PEEK)
      break
    except TimeoutError:
      assert time.monotonic() < deadline, 'never rejected'
    except ConnectionError:
      break
  connection.settimeout(30)


SLOW = [
  ('', HEAD * 20, 'header_timeout'),
  ('', '\r\n' * 500, 'header_timeout'),
  (HEAD + 'content-length: 1000\r\n\r\n', ' ' * 1000, 'body_timeout'),
  (HEAD + 'transfer-encoding: chunked\r\n\r\n', '1\r\n \r\n' * 99, 'body_timeout'),
]


def test_slow_senders(serve):
  """A byte now and then keeps no connection, neither a new one nor one after a
  response."""
  gateway, _, _ = serve(ANSWER, header_timeout_s=0.3, body_timeout_s=0.3)

  def send(begin, rest, reason, again):
    with connect(gateway) as connection:
      if again:
        connection.sendall(b'HEAD / HTTP/1.1\r\nhost: localhost\r\n\r\n')
        assert connection.recv(65_536).startswith(b'HTTP/1.1 200')
      connection.sendall(begin.encode())
      trickle(connection, rest.encode())
      status, body = answer(connection)
    assert (status, body['error']['code']) == (408, reason)
    assert '_timeout_s=0.3' in body['error']['message']

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    sent = [pool.submit(send, *case, again) for case in SLOW for again in (False, True)]
    for each in sent:
      each.result()
  assert [closed(gateway, f'{part}_timeout') for part in ('header', 'body')] == [4, 4]
  assert_serves(gateway)


@pytest.mark.parametrize(
  'data, reason',
  [
    (
      HEAD + 'transfer-encoding: chunked\r\n\r\n' + '1\r\n \r\n' * 9999,
      'chunks_too_small',
    ),
    ('HEAD / HTTP/1.1\r\nhost: localhost\r\n\r\n' * 9999, 'pipelined'),
    (
      HEAD + 'transfer-encoding: chunked\r\n\r\n1\r\n \r\n0\r\nx: ' + 'y' * 500_000,
      'headers_too_large',
    ),
  ],
)
def test_requests_that_hold_the_parser(serve, data, reason):
  """What takes the server far more work than it takes the sender is cut off."""
  gateway, _, _ = serve(ANSWER)
  with connect(gateway) as connection:
    with contextlib.suppress(ConnectionError):
      connection.sendall(data.encode())
      connection.settimeout(5)
      while connection.recv(65_536):
        pass
  assert closed(gateway, reason) == 1
  assert_serves(gateway)


def test_honest_connections_outlive_the_timers(serve):
  """The timers are for what the client has to send: not for the engine's work, nor
  for the pause between two requests, nor while a next request waits behind."""
  gateway, _, _ = serve(
    response_text('t', 'slow ' * 4),
    engine_options={'delay_s': 0.05},
    header_timeout_s=0.2,
    body_timeout_s=0.2,
  )
  content = json.dumps(OK).encode()
  request = (HEAD + f'content-length: {len(content)}\r\n\r\n').encode() + content
  with connect(gateway) as connection:
    started = time.monotonic()
    connection.sendall(request)
    assert answer(connection)[0] == 200
    assert time.monotonic() - started > 0.25
    time.sleep(0.3)
    # A second request, whole, and the start of a third, sent ahead of the answers.
    connection.sendall(request + request + request[:20])
    assert answer(connection)[0] == 200
    assert answer(connection)[0] == 200
    connection.sendall(request[20:])
    assert answer(connection)[0] == 200
  assert not closed(gateway, 'header_timeout') and not closed(gateway, 'body_timeout')


def test_chunked_bodies(serve):
  """A body may come in chunks of any usual size, larger than the bound of headers."""
  options = {'context_tokens': 1_000_000}
  gateway, engine, _ = serve(ANSWER, engine_options=options, inline_bytes=MIB)
  content = json.dumps(user('word ' * 20_000)).encode()
  for chunk_bytes in (64, 8192, 60_000):
    chunks = (
      content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)
    )
    reply = HTTP.post(
      f'{gateway.base_url}/chat/completions',
      content=chunks,
      headers={'authorization': 'Bearer k'},
    )
    assert reply.status_code == 200, reply.text
    assert len(engine.requests[-1].prompt_ids) > 20_000


def test_connections(serve):
  """At the bound the longest idle connection gives way; with none idle, the new one
  gets a 503. One client's connections do not lock others out for long."""
  gateway, _, _ = serve(ANSWER, max_connections=4, header_timeout_s=1)
  content = json.dumps(OK).encode()
  request = (HEAD + f'content-length: {len(content)}\r\n\r\n').encode() + content
  with contextlib.ExitStack() as stack:
    idle = [stack.enter_context(connect(gateway)) for _ in range(4)]
    for connection in idle:
      connection.sendall(request)
      assert answer(connection)[0] == 200
    for i in range(3):  # each takes the place of the longest idle one
      connection = stack.enter_context(connect(gateway))
      assert idle[i].recv(1) == b''
    idle[3].sendall(request)
    assert answer(idle[3])[0] == 200
    idle[3].sendall(request[:50])
    open_ = gateway._listener._server.server_state.connections
    wait_until(lambda: all(each.idle_since is None for each in open_))
    rejected = stack.enter_context(connect(gateway))
    status, body = answer(rejected)
    assert (status, body['error']['code']) == (503, 'connections')
    assert 'max_connections=4' in body['error']['message']
    assert closed(gateway, 'idle') == 3 and closed(gateway, 'connections') == 1
    # Those that never send a whole request are closed.
    wait_until(lambda: closed(gateway, 'header_timeout') == 4)
    assert_serves(gateway)


def test_a_client_that_does_not_read(serve, tok):
  """Its connection is closed, and its request does not stay in the engine."""
  gateway, engine, _ = serve(
    lambda request: tok.encode('ab', special=False) * 100_000,
    write_timeout_s=0.5,
    engine_options={'context_tokens': 10_000_000, 'piece_tokens': 5},
  )
  body = json.dumps(OK | {'stream': True, 'max_tokens': 1_000_000}).encode()
  with socket.socket() as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(address(gateway))
    head = HEAD + f'content-length: {len(body)}\r\n\r\n'
    connection.sendall(head.encode() + body)
    wait_until(lambda: closed(gateway, 'write_timeout'))
  engine.script = lambda request: tok.encode(ANSWER)
  assert_serves(gateway)
