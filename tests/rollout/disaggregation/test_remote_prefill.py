"""Prefill behind a socket: the same tokens, and no bytes that harm either side."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import stat
import subprocess
import sys

import pytest

from m2jax import frames
from m2jax.rollout.disaggregation import connection, handover, remote_prefill
from m2jax.rollout.disaggregation.decode_engine import Disaggregated
from m2jax.rollout.disaggregation.prefill_engine import PrefillScheduler
from m2jax.rollout.disaggregation.prefill_server import Limits, PrefillServer
from m2jax.rollout.disaggregation.remote_prefill import RemotePrefills
from m2jax.rollout.serving.config import SchedulerConfig
from tests import processes
from tests.rollout.conftest import CFG, RECORDING
from tests.rollout.disaggregation.test_disaggregated import (
  HOW,
  assert_equal,
  assert_no_page_is_lost,
)
from tests.rollout.engine.test_engine import prompt
from tests.rollout.prefill_worker import Slow
from tests.rollout.serving.test_scheduler import (
  TIMEOUT_S,
  assert_logprobs,
  request,
  run,
)
from tests.waiting import wait_until

KEY = b'a key of the tests'
LAYOUT = handover.layout(CFG, RECORDING, HOW.part_pages)
QUICK = remote_prefill.Timeouts(
  frame_s=10.0, silence_s=20.0, retry_s=0.02, max_retry_s=0.1, avoid_s=0.5
)


@pytest.fixture
def serve_prefill(recording, variables, other_variables, monkeypatch):
  """serve_prefill(address, **fields): a started PrefillServer.

  Both sides send statistics ten times as often as elsewhere.
  """
  monkeypatch.setattr(connection, 'IDLE_S', 0.1)
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
  wait_until(lambda: front.stats()['prefill_engine_connected'])


def fresh(front):
  """Statistics that the prefill process has sent after this call."""
  sent = front._prefills._theirs
  wait_until(lambda: front._prefills._theirs is not sent)


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
  wait_until(lambda: server.stats()['active_slots'])
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
  wait_until(lambda: not server.stats()['active_slots'])
  fresh(front)
  assert_no_page_is_lost(front)


def test_cancellation_reaches_the_prefill_process(
  serve_prefill, decode, path, recording
):
  server = serve_prefill(path, Slow(recording, 0.2))
  front = decode(path)
  handles = [front.submit(request(prompt(i, 40))) for i in range(3)]
  wait_until(lambda: server.stats()['active_slots'] == 3)
  for handle in handles:
    handle.cancel()
  for handle in handles:
    assert handle.future.result(TIMEOUT_S).finish_reason == 'cancelled'
  wait_until(lambda: server.stats()['cancelled'] == 3)
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


def test_engines_that_have_other_weights_for_a_while(
  serve, serve_prefill, decode, path, recording, variables, other_variables, reference
):
  """Two engines take new weights one after the other. The one that has the old ones
  computes by itself meanwhile, keeps its connection, and is served when it has them."""
  want = run(serve(recording), *REQUESTS)
  serve_prefill(path)
  ahead, behind = decode(path), decode(path)
  ahead.update_weights(other_variables, 1)
  run(ahead, REQUESTS[1])
  assert ahead.stats()['handovers'] == 1
  for a, b in zip(want, run(behind, *REQUESTS), strict=True):
    assert_equal(a, b)
  stats = behind.stats()
  assert stats['prefills_alone'] == 4  # refused, or not asked once that was known
  assert stats['handovers'] == stats['handover_pages'] == 0
  assert stats['prefill_engine_losses'] == stats['prefill_engine_protocol_errors'] == 0
  assert stats['prefill_engine_connections'] == 1 and stats['prefill_engine_ahead']
  refused = stats['handover_newer']
  run(behind, request(prompt(20, 33)))  # not asked: it would be in vain
  assert behind.stats()['handover_newer'] == refused
  behind.update_weights(other_variables, 1)
  for r in REQUESTS:
    result = run(behind, r)
    assert set(result.versions) == {1}
    assert_logprobs(reference, other_variables, r.prompt_ids, result)
  stats = behind.stats()
  assert stats['handovers'] == 4 and not stats['prefill_engine_ahead']
  fresh(behind)
  assert_no_page_is_lost(behind)


def test_an_engine_that_joins_with_older_weights(
  serve_prefill, decode, path, other_variables
):
  """It learns that as it connects: nothing is asked in vain."""
  serve_prefill(path)
  ahead = decode(path)
  ahead.update_weights(other_variables, 1)
  run(ahead, REQUESTS[1])
  behind = decode(path)
  assert behind.stats()['prefill_engine_ahead']
  assert set(run(behind, REQUESTS[1]).versions) == {0}
  stats = behind.stats()
  assert stats['handover_newer'] == 0 and stats['prefills_alone'] == 1


def hello(server) -> int:
  """The version that a server announces."""
  with connection.Address.parse(server.address).connect(5.0) as sock:
    return connection.open_client(sock, None, 5.0).fields['version']


def test_weights_are_loaded_when_they_can_be(
  recording, variables, other_variables, decode, path, reference
):
  """A version that is not there yet is tried again, and announced when it is loaded;
  one that never comes holds up no other."""
  failures = [FileNotFoundError('not yet')] * 2
  tried = []

  def load(version):
    tried.append(version)
    if version > 1:
      raise LookupError('no such version')
    if failures:
      raise failures.pop()
    return other_variables

  scheduler = PrefillScheduler(recording, variables, part_pages=3)
  limits = Limits(retry_s=0.2, max_retry_s=0.4)
  server = PrefillServer(scheduler, path, load=load, limits=limits)
  with contextlib.ExitStack() as stack:
    stack.callback(server.stop)
    server.start(warmup=False)
    address = connection.Address.parse(server.address)
    stranger = stack.enter_context(address.connect(5.0))
    connection.open_client(stranger, None, 5.0)
    frames.send(stranger, 'weights', version=2**31 - 1)
    wait_until(lambda: tried)
    assert hello(server) == 0
    front = decode(path)
    front.update_weights(other_variables, 1)
    wait_until(lambda: len(failures) < 2)
    assert hello(server) == 0
    result = run(front, REQUESTS[1])
    assert_logprobs(reference, other_variables, REQUESTS[1].prompt_ids, result)
    wait_until(lambda: hello(server) == 1)
    wait_until(lambda: front._prefills.available)
    before = front.stats()['handovers']
    run(front, request(prompt(20, 33)))
    assert front.stats()['handovers'] == before + 1
    assert not failures and tried.count(1) == 3 and tried.count(2**31 - 1) < 50


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
  wait_until(lambda: server.rejected)


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
  wait_until(lambda: front.stats()['handover_pages'] >= 3)
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
  wait_until(lambda: front._prefills.available)
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
