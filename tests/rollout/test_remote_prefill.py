"""Prefill behind a socket: the same tokens, and no bytes that harm either side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m2jax.rollout import handover, prefill_server, remote_prefill
from m2jax.rollout import handover_wire as wire
from m2jax.rollout.disaggregated import Disaggregated
from m2jax.rollout.prefill_engine import PrefillScheduler
from m2jax.rollout.prefill_server import PrefillServer
from m2jax.rollout.remote_prefill import RemotePrefills
from m2jax.rollout.scheduler import SchedulerConfig
from tests import processes
from tests.rollout.conftest import CFG, RECORDING
from tests.rollout.prefill_worker import Slow
from tests.rollout.test_disaggregated import (
  HOW,
  assert_equal,
  assert_no_page_is_lost,
  until,
)
from tests.rollout.test_engine import prompt
from tests.rollout.test_scheduler import TIMEOUT_S, assert_logprobs, request, run

KEY = b'a key of the tests'
LAYOUT = handover.layout(CFG, RECORDING, HOW.part_pages)
QUICK = remote_prefill.Timeouts(
  frame_s=10.0, silence_s=20.0, retry_s=0.02, max_retry_s=0.1, avoid_s=0.5
)


@pytest.fixture
def serve_prefill(recording, variables, other_variables):
  """serve_prefill(address, **fields): a started PrefillServer."""
  with contextlib.ExitStack() as stack:

    def load(version):
      if version == 13:
        raise FileNotFoundError('no version 13')
      return (variables, other_variables)[version % 2]

    def start(address, engine=recording, **fields):
      scheduler = PrefillScheduler(engine, variables, part_pages=3)
      server = PrefillServer(scheduler, address, load=load, **fields)
      stack.callback(server.stop)
      return server.start(warmup=False)

    yield start


@pytest.fixture
def decode(recording, variables):
  """decode(address, **fields of RemotePrefills): a started Disaggregated."""
  with contextlib.ExitStack() as stack:

    def start(address, how=HOW, **fields):
      source = RemotePrefills(address, LAYOUT, **{'timeouts': QUICK} | fields)
      config = SchedulerConfig(decode_steps=4)
      front = Disaggregated(recording, variables, source, config=config, how=how)
      stack.callback(front.stop)
      return front.start(warmup=False)

    yield start


@pytest.fixture
def path(tmp_path):
  return f'unix:{tmp_path}/prefill'


REQUESTS = [request(prompt(i, n), seed=i) for i, n in enumerate((9, 33, 3, 40, 46))]


def connected(front):
  until(lambda: front.stats()['prefill_engine_connected'])


def fresh(front):
  """Statistics that the prefill process has sent after this call."""
  sent = front._prefills._theirs
  until(lambda: front._prefills._theirs is not sent)


def test_tokens_are_those_of_one_engine(
  serve, serve_prefill, decode, path, recording, other_variables, reference
):
  """Over a Unix socket, before and after new weights, which the prefill process loads
  itself; and no page of either side is lost."""
  want = run(serve(recording), *REQUESTS)
  server = serve_prefill(path)
  front = decode(path)
  for a, b in zip(want, run(front, *REQUESTS), strict=True):
    assert_equal(a, b)
  stats = front.stats()
  assert stats['handovers'] == 4 and stats['prefills_alone'] == 0
  pages = stats['handover_pages']
  assert stats['handover_bytes'] == pages * RemotePrefills(path, LAYOUT)._body_bytes(1)
  front.update_weights(other_variables, 1)
  for r in REQUESTS:
    result = run(front, r)
    assert set(result.versions) == {1}
    assert_logprobs(reference, other_variables, r.prompt_ids, result)
  assert front.stats()['handovers'] == 8 and server.stats()['policy_version'] == 1
  fresh(front)
  assert_no_page_is_lost(front)


@pytest.mark.parametrize('how', ['stop', 'junk'])
def test_a_lost_connection_is_replaced(
  serve_prefill, decode, path, recording, variables, reference, how
):
  """What was asked for is prefilled here, and what is asked later is handed over by
  the process that comes back."""
  server = serve_prefill(path, Slow(recording, 0.3))
  front = decode(path)
  tokens = prompt(7, 46)
  handle = front.submit(request(tokens, max_tokens=2))
  until(lambda: server.stats()['active_slots'])
  if how == 'stop':
    server.stop()
  else:  # of this side, to which the server answers by closing
    front._prefills._channel.send(dict(kind='what?'))
  result = handle.future.result(TIMEOUT_S)
  assert_logprobs(reference, variables, tokens, result)
  stats = front.stats()
  assert stats['handover_failures'] == stats['prefills_alone'] == 1
  assert stats['prefill_engine_losses'] == 1 and stats['failed'] == 0
  if how == 'stop':
    server = serve_prefill(path)
  connected(front)
  assert run(front, request(prompt(8, 30))).tokens.size == 6
  stats = front.stats()
  assert stats['handovers'] == 1 and stats['prefill_engine_connections'] == 2
  until(lambda: not server.stats()['active_slots'])
  fresh(front)
  assert_no_page_is_lost(front)


def test_cancellation_reaches_the_prefill_process(
  serve_prefill, decode, path, recording
):
  server = serve_prefill(path, Slow(recording, 0.2))
  front = decode(path)
  handles = [front.submit(request(prompt(i, 40))) for i in range(3)]
  until(lambda: server.stats()['active_slots'] == 3)
  for handle in handles:
    handle.cancel()
  for handle in handles:
    assert handle.future.result(TIMEOUT_S).finish_reason == 'cancelled'
  until(lambda: server.stats()['cancelled'] == 3)
  fresh(front)
  assert_no_page_is_lost(front)


def test_without_a_prefill_process(serve_prefill, decode, path, variables, reference):
  """Requests are served before there is one, and handed over when there is."""
  front = decode(path)
  tokens = prompt(1, 20)
  assert_logprobs(reference, variables, tokens, run(front, request(tokens)))
  assert front.stats()['prefills_alone'] == 1
  serve_prefill(path)
  connected(front)
  run(front, request(prompt(2, 20)))
  assert front.stats()['handovers'] == 1


def test_weights_that_cannot_be_loaded(
  serve_prefill, decode, path, other_variables, reference
):
  """The decode engine prefills until there are others."""
  serve_prefill(path)
  front = decode(path)
  run(front, request(prompt(0, 20)))
  front.update_weights(other_variables, 13)
  for i in range(2):
    tokens = prompt(i, 20)
    result = run(front, request(tokens))
    assert set(result.versions) == {13}
    assert_logprobs(reference, other_variables, tokens, result)
  assert front.stats()['prefills_alone'] == 2
  front.update_weights(other_variables, 15)
  assert set(run(front, request(prompt(2, 20))).versions) == {15}
  assert front.stats()['handovers'] == 2


# --- Who may connect.


def test_a_socket_is_for_its_owner_and_replaces_a_dead_one(serve_prefill, path):
  stale = socket.socket(socket.AF_UNIX)
  stale.bind(path[5:])
  stale.close()
  serve_prefill(path)
  assert stat.S_IMODE(os.stat(path[5:]).st_mode) == 0o600
  with pytest.raises(OSError, match='in use'):
    serve_prefill(path)


def test_other_machines_need_a_key(serve_prefill):
  for address in ('tcp:0.0.0.0:0', 'tcp:[::]:0'):
    with pytest.raises(ValueError, match='needs a key'):
      serve_prefill(address)
  with pytest.raises(ValueError, match='key: 5 bytes'):
    serve_prefill('tcp:127.0.0.1:0', key=b'short')
  with pytest.raises(ValueError, match="address='http://x'"):
    serve_prefill('http://x')
  serve_prefill('tcp:0.0.0.0:0', key=KEY)


@pytest.mark.parametrize(
  'server_key, key', [(KEY, None), (None, KEY), (KEY, KEY[::-1])]
)
def test_both_sides_must_know_the_key(serve_prefill, decode, server_key, key):
  server = serve_prefill('tcp:127.0.0.1:0', key=server_key)
  front = decode(server.address, key=key)
  assert run(front, request(prompt(1, 20))).tokens.size == 6
  stats = front.stats()
  assert stats['prefills_alone'] == 1 and stats['prefill_engine_connections'] == 0
  until(lambda: server.rejected)


def test_a_key_over_tcp(serve_prefill, decode):
  front = decode(serve_prefill('tcp:127.0.0.1:0', key=KEY).address, key=KEY)
  run(front, request(prompt(1, 20)))
  assert front.stats()['handovers'] == 1


def test_sizes_and_run_id_must_fit(serve_prefill, path):
  serve_prefill(path, run_id='a')
  for layout, run_id in (
    (LAYOUT, 'b'),
    ({**LAYOUT, 'page_tokens': 8}, 'a'),
    ({**LAYOUT, 'context_tokens': 64}, 'a'),
  ):
    source = RemotePrefills(path, layout, run_id=run_id, timeouts=QUICK)
    with pytest.raises(ValueError, match='of the prefill engine: must be'):
      source.start()
  source = RemotePrefills(path, LAYOUT, run_id='a', timeouts=QUICK).start()
  assert source.available
  source.stop()


# --- Hostile bytes.


def opened(server, key=None):
  sock = wire.Address.parse(server.address).connect(5.0)
  wire.open_client(sock, key, 5.0)
  return sock


def closes(sock) -> bool:
  """Whether the other side closes it, after whatever it still sends."""
  sock.settimeout(5.0)
  try:
    while sock.recv(1 << 16):
      pass
  except ConnectionError:
    pass
  except TimeoutError:
    return False
  return True


def frame(header, body=b'', *, magic=b'm2h1', header_bytes=None, body_bytes=None):
  head = header if isinstance(header, bytes) else json.dumps(header).encode()
  sizes = (
    len(head) if header_bytes is None else header_bytes,
    len(body) if body_bytes is None else body_bytes,
  )
  return struct.pack('>4sIQ', magic, *sizes) + head + body


ASK = dict(kind='ask', number=1, first_page=0, version=0)
TOKENS = np.arange(9, dtype=np.int32).tobytes()
HOSTILE = {
  'http': b'GET / HTTP/1.1\r\nHost: x\r\n\r\n',
  'magic': frame(dict(kind='ping'), magic=b'm2h2'),
  'huge header': frame(b'', header_bytes=2**31),
  'huge body': frame(ASK, body_bytes=2**63),
  'body of one token more': frame(ASK, body_bytes=4 * RECORDING.context_tokens + 4),
  'no json': frame(b'{"kind": '),
  'no object': frame(b'[1]'),
  'no kind': frame(b'{}'),
  'deep': frame(b'[' * 16_000),
  'unknown': frame(dict(kind='exec')),
  'no text': frame(b'\xff\xfe'),
  'half a token': frame(ASK, TOKENS[:-1]),
  'no tokens': frame(ASK),
  'one token': frame(ASK, TOKENS[:4]),
  'token out of range': frame(ASK, np.int32([1, CFG.vocab_size]).tobytes()),
  'negative token': frame(ASK, np.int32([1, -1]).tobytes()),
  'first page': frame({**ASK, 'first_page': 2}, TOKENS),
  'negative page': frame({**ASK, 'first_page': -1}, TOKENS),
  'huge page': frame({**ASK, 'first_page': 2**80}, TOKENS),
  'boolean': frame({**ASK, 'number': True}, TOKENS),
  'no number': frame(dict(kind='cancel')),
  'nan': frame(b'{"kind": "weights", "version": NaN}'),
  'twice': frame({**ASK, 'version': 9}, TOKENS) * 2,
}


@pytest.fixture(scope='module')
def attacked(recording, variables, tmp_path_factory):
  scheduler = PrefillScheduler(recording, variables, part_pages=3)
  path = tmp_path_factory.mktemp('socket') / 's'
  limits = prefill_server.Limits(frame_s=0.5, silence_s=1.0, connections=4, asks=8)
  server = PrefillServer(
    scheduler, f'unix:{path}', load=lambda v: variables, limits=limits
  ).start(warmup=False)
  yield server
  source = RemotePrefills(server.address, LAYOUT, timeouts=QUICK).start()
  found = []
  source.ask(handover.Ask(np.array(prompt(1, 9), np.int32), 0, 0), found.append)
  until(lambda: found)  # it serves as ever
  assert isinstance(found[0], handover.Part)
  source.stop()
  until(lambda: not server.stats()['connections'])
  stats = server.stats()
  assert stats['queue_length'] == stats['active_slots'] == stats['failed'] == 0
  assert stats['free_pages'] + stats['cached_pages'] == stats['pages']
  server.stop()


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_frames_close_their_own_connection(attacked, name):
  with opened(attacked) as sock:
    before = attacked.rejected
    sock.sendall(HOSTILE[name])
    assert closes(sock)
    until(lambda: attacked.rejected == before + 1)


@settings(max_examples=20)
@given(st.data())
def test_damaged_frames_do_no_harm(attacked, data):
  """A good ask with bytes replaced, cut off or added."""
  found = bytearray(frame(ASK, TOKENS))
  for _ in range(data.draw(st.integers(1, 4))):
    found[data.draw(st.integers(0, len(found) - 1))] = data.draw(st.integers(0, 255))
  found = bytes(found[: data.draw(st.integers(0, len(found)))])
  with opened(attacked) as sock:
    sock.sendall(found + data.draw(st.binary(max_size=20)))
    sock.shutdown(socket.SHUT_WR)
    assert closes(sock)


def test_bytes_before_the_key(attacked):
  """Of the opening only small frames are read, for a bounded time."""
  for junk in (b'\0' * 64, frame(dict(kind='challenge'), b'body'), b''):
    sock = wire.Address.parse(attacked.address).connect(5.0)
    sock.sendall(junk)
    assert closes(sock)  # after the challenge


def test_slow_and_silent_connections_are_closed(attacked):
  with opened(attacked) as sock:
    begin = time.monotonic()
    sock.sendall(b'm2')  # half a prefix
    assert closes(sock) and time.monotonic() - begin < 4
  with opened(attacked) as sock:
    assert closes(sock)


def test_connections_and_asks_are_bounded(attacked):
  until(lambda: not attacked.stats()['connections'])
  with contextlib.ExitStack() as stack:
    for _ in range(4):
      sock = stack.enter_context(opened(attacked))
    more = wire.Address.parse(attacked.address).connect(5.0)
    assert closes(more)
    for number in range(9):  # of weights that never come
      sock.sendall(frame({**ASK, 'number': number, 'version': 99}, TOKENS))
    assert closes(sock)
  until(lambda: not attacked.stats()['connections'])


def test_a_receiver_that_does_not_read_is_disconnected():
  """Its parts would fill the memory."""
  ours, theirs = socket.socketpair()
  bounds = dict(max_body_bytes=10, max_unsent_bytes=10_000_000, timeout_s=30.0)
  channel = wire.Channel(ours, **bounds)
  for number in range(11):
    channel.send(dict(kind='part'), [np.zeros(1_000_000, np.uint8)])
    assert number > 8 or not channel.closed
  assert channel.closed
  channel.join()
  theirs.close()


class Impostor:
  """A prefill process that answers every ask with `frames(number, tokens)`."""

  def __init__(self, path, frames, **hello):
    self._socket = wire.Address.parse(path).listen(None)
    self._frames = frames
    self._hello = dict(layout=LAYOUT, run_id='', version=0) | hello
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self):
    while True:
      try:
        sock, _ = self._socket.accept()
      except OSError:
        return
      with contextlib.suppress(OSError, wire.ProtocolError), sock:
        wire.open_server(sock, None, self._hello, 5.0)
        while True:
          header, body = wire.receive(sock, 10_000, 60.0)
          if header['kind'] == 'ask':
            tokens = np.frombuffer(body, np.int32)
            sock.sendall(self._frames(header['number'], tokens))

  def close(self):
    self._socket.shutdown(socket.SHUT_RDWR)
    self._socket.close()


def part(number, tokens, *, k=0.0, expert=0, change=None, cut=0, **header):
  """The frame of a prompt of 9 tokens: two pages."""
  pages = [np.zeros(shape, dtype) for shape, dtype in handover.shapes(LAYOUT, 2)]
  pages[0][-1, -1, -1, -1, -1] = k
  pages[2].reshape(-1)[:8] = tokens[:8]
  pages[3].reshape(-1)[-1] = expert
  if change:
    pages[2].reshape(-1)[3] = change
  body = b''.join(x.tobytes() for x in pages)
  fields = dict(kind='part', number=number, first_page=0, held=8)
  fields |= dict(versions=[0, 0], pages=2) | header
  return frame(fields, body[: len(body) - cut])


FALSE = {
  'nan': dict(k=np.nan),
  'infinite': dict(k=np.inf),
  'expert': dict(expert=CFG.num_experts),
  'negative expert': dict(expert=-2),
  'token': dict(change=-5),
  'short': dict(cut=1),
  'no pages': dict(pages=0),
  'many pages': dict(pages=4),
  'newer weights': dict(versions=[0, 1]),
  'order': dict(versions=[1, 0]),
  'one version': dict(versions=[0]),
  'text': dict(held='8'),
  'float': dict(first_page=0.0),
  'negative': dict(held=-8),
}


@pytest.mark.parametrize('name', FALSE)
def test_a_false_prefill_process_is_disconnected(
  decode, path, variables, reference, name
):
  """Before anything that it sent has reached the engine."""
  impostor = Impostor(path, lambda n, tokens: part(n, tokens, **FALSE[name]))
  front = decode(path)
  tokens = prompt(1, 9)
  result = run(front, request(tokens))
  assert_logprobs(reference, variables, tokens, result)
  stats = front.stats()
  assert stats['prefill_engine_protocol_errors'] == stats['prefills_alone'] == 1
  assert stats['handover_pages'] == 0
  impostor.close()


def test_parts_of_the_wrong_tokens_or_nobody(decode, path, variables, reference):
  """These are of the right form: the batcher refuses them, or nobody waits for them."""
  kinds = iter([dict(change=60), dict(number=77), dict()])

  def frames(number, tokens):
    return part(**dict(number=number, tokens=tokens) | next(kinds)) + frame(
      dict(kind='failed', number=number, reason='x' * 10_000)
    )

  impostor = Impostor(path, frames)
  front = decode(path)
  for i in range(2):
    tokens = prompt(1 + i, 9)
    assert_logprobs(reference, variables, tokens, run(front, request(tokens)))
  assert front.stats()['handover_failures'] == 2
  assert run(front, request(prompt(4, 9))).tokens.size == 6  # zeros, but pages
  stats = front.stats()
  assert stats['handovers'] == 1 and stats['prefill_engine_protocol_errors'] == 0
  impostor.close()


def test_a_process_that_hangs(decode, path, variables, reference):
  """It takes asks and answers nothing: given up, and not asked again for a while."""
  impostor = Impostor(path, lambda number, tokens: b'')
  front = decode(path, how=dataclasses.replace(HOW, timeout_s=0.3))
  for i in range(2):
    tokens = prompt(i, 20)
    assert_logprobs(reference, variables, tokens, run(front, request(tokens)))
  stats = front.stats()
  assert stats['handover_timeouts'] == 1 and stats['prefills_alone'] == 2
  impostor.close()


# --- Real processes.


@pytest.fixture
def worker():
  children = []

  def start(*args):
    child = subprocess.Popen(
      [sys.executable, '-m', 'tests.rollout.prefill_worker', *map(str, args)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      cwd=processes.ROOT,
      text=True,
    )
    children.append(child)
    address = child.stdout.readline().strip()
    assert address
    return child, address

  yield start
  for child in children:
    child.kill()
    child.wait()
    child.stdout.close()


@pytest.mark.long
def test_two_processes(
  worker, serve, decode, recording, variables, other_variables, reference
):
  """A prefill process with a key, killed in the midst of prompts and started again,
  then stopped for a while; and new weights. Every token is one engine's, and at the end
  no page of either process is lost."""
  want = run(serve(recording), *REQUESTS)
  first, address = worker('tcp:127.0.0.1:0', KEY.decode(), 0.3)
  front = decode(address, key=KEY, how=dataclasses.replace(HOW, timeout_s=10.0))
  handles = [front.submit(r) for r in REQUESTS]
  until(lambda: front.stats()['handover_pages'] >= 3)
  first.send_signal(signal.SIGKILL)
  got = [handle.future.result(TIMEOUT_S) for handle in handles]
  for a, b in zip(want, got, strict=True):
    assert_equal(a, b)
  stats = front.stats()
  assert stats['prefills_alone'] >= 1 and stats['prefill_engine_losses'] == 1
  again = request(prompt(30, 41), seed=1)
  alone = front.stats()['prefills_alone']
  expected = run(front, again)
  assert front.stats()['prefills_alone'] == alone + 1

  front.update_weights(other_variables, 1)  # while there is no process
  second, _ = worker(address, KEY.decode())
  connected(front)
  before = front.stats()['handovers']
  for r in REQUESTS:
    result = run(front, r)
    assert_logprobs(reference, other_variables, r.prompt_ids, result)
  assert front.stats()['handovers'] == before + 4

  front.update_weights(variables, 2)
  alone = front.stats()['prefills_alone']
  second.send_signal(signal.SIGSTOP)
  try:
    assert_equal_but_versions(expected, run(front, again))
    stats = front.stats()
    assert stats['prefills_alone'] == alone + 1
    assert stats['prefill_engine_losses'] == 2  # it was given up
  finally:
    second.send_signal(signal.SIGCONT)
  until(lambda: front._prefills.available)
  before = front.stats()['handovers']
  for a, r in zip(want, REQUESTS, strict=True):
    assert_equal_but_versions(a, run(front, r))
  assert front.stats()['handovers'] == before + 4 and front.stats()['failed'] == 0
  fresh(front)
  assert_no_page_is_lost(front)
  second.stdin.close()
  assert second.wait(TIMEOUT_S) == 0


def assert_equal_but_versions(one, other):
  assert_equal(one, dataclasses.replace(other, versions=one.versions))
  assert set(other.versions) == {2}
