"""An engine over HTTP: the scheduler's results, bounds, and failures as EngineError."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import struct

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax import frames
from m2jax.forge.config import EngineServerConfig, RemoteConfig
from m2jax.forge.remote import engine_client, engine_server, page_log, wire
from m2jax.rollout.api import (
  EngineError,
  GenerateRequest,
  GenerateResult,
  PageEvent,
  PromptTooLong,
  SamplingParams,
)
from m2jax.rollout.routing.config import RouterConfig
from m2jax.rollout.routing.router import Router
from m2jax.rollout.tiers import page_chain
from tests import processes
from tests.gateway.scripted_engine import ScriptedEngine
from tests.rollout.conftest import CFG, ENGINE_CONFIG, RECORDING, init
from tests.waiting import wait_until

CONTEXT = ENGINE_CONFIG.context_tokens
QUICK = RemoteConfig(poll_s=0.02, silence_timeout_s=5.0)
ALIVE_S = 0.5  # well before a silence of that length


@pytest.fixture
def connect():
  """connect(scheduler, key=…, **EngineServerConfig fields): (client, server)."""
  with contextlib.ExitStack() as stack:

    def start(scheduler, *, key='', their_key=None, config=ENGINE_CONFIG, **fields):
      settings = EngineServerConfig(**{'alive_s': ALIVE_S, **fields})
      server = engine_server.EngineServer(settings, scheduler, key)
      stack.enter_context(server)
      client = engine_client.RemoteScheduler(
        server.url, CFG.vocab_size, config, key if their_key is None else their_key,
        QUICK,
      )  # fmt: skip
      return stack.enter_context(client), server

    yield start


@pytest.fixture
def scripted():
  """scripted(script, **options): a ScriptedEngine that is closed at the end."""
  with contextlib.ExitStack() as stack:

    def start(script, **options):
      engine = ScriptedEngine(script, context_tokens=CONTEXT, **options)
      stack.callback(engine.close)
      return engine

    yield start


def request(prompt, max_tokens=8, **sampling):
  return GenerateRequest(prompt, SamplingParams(max_tokens=max_tokens, **sampling))


def same(got: GenerateResult, want: GenerateResult):
  assert got == want  # tokens, log-probabilities, versions, finish_reason
  for field in ('experts', 'top_ids', 'top_logprobs'):
    ours, theirs = getattr(got, field), getattr(want, field)
    assert (ours is None) == (theirs is None), field
    if ours is not None:
      np.testing.assert_array_equal(ours, theirs)
      assert ours.dtype == theirs.dtype


def test_results_are_those_of_the_scheduler(connect, serve, recording):
  """Every field: tokens, log-probabilities, versions, experts, likeliest tokens."""
  local = serve(recording)
  client, _ = connect(local, config=RECORDING, key='secret')
  for sampling in (
    dict(temperature=0.0, top_logprobs=2),
    dict(seed=7, top_k=5, logit_bias=((3, 1.5),), presence_penalty=0.5),
  ):
    made = request(np.arange(1, 8), **sampling)
    streamed = []
    got = client.submit(made, streamed.append).future.result(30)
    same(got, again := local.submit(made).future.result(30))
    assert isinstance(got.cached_tokens, int) and again.cached_tokens == 4
    assert [token for new in streamed for token in new] == got.tokens.tolist()
    for field in ('logprobs', 'top_ids', 'top_logprobs'):
      if (want := getattr(got, field)) is not None:
        parts = [getattr(new, field) for new in streamed]
        np.testing.assert_array_equal(np.concatenate(parts), want)
    assert got.experts.shape[0] == 7 + 8
  assert client.wait(5) and client.stats()['slots'] == ENGINE_CONFIG.slots
  assert client.context_tokens == CONTEXT


def test_tokens_arrive_while_they_are_drawn(connect, scripted):
  """The first tokens are there long before the last."""
  engine = scripted(lambda r: range(1, 31), delay_s=0.02)
  client, _ = connect(engine)
  pieces, handles = [], []
  done = lambda: any(handle.future.done() for handle in handles)
  handle = client.submit(
    request([1], 30), lambda tokens: pieces.append((done(), tokens))
  )
  handles.append(handle)
  assert handle.future.result(30).tokens.tolist() == list(range(1, 31))
  assert [t for _, tokens in pieces for t in tokens] == list(range(1, 31))
  assert len(pieces) > 3 and not any(done for done, _ in pieces)


def test_a_cancelled_request_keeps_its_tokens(connect, scripted):
  """As with the scheduler itself: the tokens so far, 'cancelled'."""
  engine = scripted(lambda r: range(1, 41), delay_s=0.2)
  client, _ = connect(engine)
  seen = []
  handle = client.submit(request([1], 40), seen.extend)
  wait_until(lambda: seen)
  handle.cancel()
  result = handle.future.result(30)
  assert result.finish_reason == 'cancelled'
  assert 0 < len(result.tokens) < 40 and result.tokens.tolist() == seen
  assert len(result.logprobs) == len(result.tokens)
  handle.cancel()  # no effect


def test_a_request_that_is_cancelled_at_once(connect, scripted, monkeypatch):
  """While its prompt is on its way the engine does not know it yet."""
  engine = scripted(lambda r: range(1, 41), delay_s=0.2)
  client, _ = connect(engine)
  body = engine_server._Application._body

  async def slow(self, scope, receive, limit_bytes):
    if scope['path'] == '/generate':
      await asyncio.sleep(0.5)
    return await body(self, scope, receive, limit_bytes)

  monkeypatch.setattr(engine_server._Application, '_body', slow)
  handle = client.submit(request([1], 40))
  handle.cancel()
  result = handle.future.result(30)
  assert result.finish_reason == 'cancelled' and len(result.tokens) < 40


def test_a_client_that_disconnects_cancels(connect, scripted):
  """A client that is killed costs the engine nothing more."""
  engine = scripted(lambda r: range(1, 41), delay_s=0.4)
  client, server = connect(engine)
  content = wire.encode_request('mine', request([1], 40))
  with httpx.stream('POST', server.url + '/generate', content=content) as response:
    next(response.iter_raw())
  wait_until(lambda: engine.cancelled['requests'] == 1)


def test_signs_of_life(connect, scripted):
  """An engine that needs longer than `silence_timeout_s` for a token is not given up;
  one that gives no sign of life is."""
  engine = scripted(lambda r: [1], delay_s=2.0)
  for alive_s, works in ((0.1, True), (60.0, False)):
    _, server = connect(engine, alive_s=alive_s)
    settings = dataclasses.replace(QUICK, silence_timeout_s=1.0)
    with engine_client.RemoteScheduler(
      server.url, CFG.vocab_size, ENGINE_CONFIG, config=settings
    ) as client:
      future = client.submit(request([1], 1)).future
      if works:
        assert future.result(30).tokens.tolist() == [1]
      else:
        with pytest.raises(EngineError, match='ReadTimeout'):
          future.result(30)


def test_an_engine_that_restarts(scripted):
  """Requests in flight and meanwhile fail with EngineError; later ones are served."""
  engine = scripted(lambda r: range(1, 21), delay_s=0.4)
  config = EngineServerConfig(stop_timeout_s=1)
  with engine_server.EngineServer(config, engine) as first:
    port = int(first.url.rpartition(':')[2])
    client = engine_client.RemoteScheduler(
      first.url, CFG.vocab_size, ENGINE_CONFIG, config=QUICK
    ).start()
    assert client.wait(10)
    seen = []
    flying = client.submit(request([1], 20), seen.extend)
    wait_until(lambda: seen)
  with pytest.raises(EngineError):
    flying.future.result(30)
  with pytest.raises(EngineError):
    client.submit(request([1])).future.result(30)
  wait_until(lambda: not client.alive)
  assert client.stopped_reason
  config = dataclasses.replace(config, port=port)
  with engine_server.EngineServer(config, engine):
    wait_until(lambda: client.alive)
    assert len(client.submit(request([1], 2)).future.result(30).tokens) == 2
    client.stop()
  with pytest.raises(EngineError, match='stopped'):
    client.submit(request([1]))


def test_pages_are_those_of_the_journal(connect, serve):
  """A reader learns of every page once, also after a lost answer; another one of all
  that there is."""
  local = serve()
  client, server = connect(local)
  assert client.wait(10) and client.page_events() == []
  wait_until(lambda: client._epoch)
  tokens = np.arange(1, 1 + 2 * ENGINE_CONFIG.page_tokens)
  client.submit(request(tokens, 2)).future.result(30)
  chain = page_chain.chain(tokens, ENGINE_CONFIG.page_tokens)
  found = []
  wait_until(lambda: found.extend(client.page_events()) or len(found) > 2)
  stored = [PageEvent('stored', digest) for digest in chain]
  assert found == [PageEvent('cleared'), *stored]
  read, lost = client._read_pages, [1]

  async def read_again():  # as if the last answer had been lost
    while lost:
      client._after -= lost.pop()
    await read()

  client._read_pages = read_again
  wait_until(lambda: found.extend(client.page_events()) or len(found) > 3)
  assert found[3:] == found[2:3]
  url = server.url + '/pages?after=-1'
  assert httpx.get(url).status_code == 400
  pages = wire.decode_pages(httpx.get(server.url + '/pages').content)
  assert list(pages.events) == found[:3]


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(1, 8))
def test_a_bounded_log_misses_nothing_unsaid(sizes, most):
  """Any reader knows all pages after its last 'cleared', or what the log still has."""
  new, made, known, reader = [], 0, [], ('', 0)
  log = page_log.PageLog(lambda: [new.pop(0) for _ in range(len(new))], most)
  for size in sizes:
    new.extend(PageEvent('stored', bytes([i])) for i in range(made, made + size))
    made += size
    pages = log.after(*reader)
    assert wire.decode_pages(wire.encode_pages(pages)).next == pages.next == made
    reader = pages.epoch, pages.next
    events = list(pages.events)
    if events[:1] == [PageEvent('cleared')]:
      known, events = [], events[1:]
      assert len(events) == min(most, made)
    known += [event.digest[0] for event in events]
    assert known == list(range(made - len(known), made))


def test_two_engines_as_one(connect, serve):
  """The gateway's router over engines of other processes: one that is not there yet,
  pages that only the engine knows of, new weights that nobody announces, the end."""
  local = [serve(), serve()]
  first, _ = connect(local[0])
  port = processes.free_port()
  second = engine_client.RemoteScheduler(
    f'http://127.0.0.1:{port}', CFG.vocab_size, ENGINE_CONFIG, config=QUICK
  ).start()
  page_tokens = ENGINE_CONFIG.page_tokens
  settings = RouterConfig(policy='prefix_aware', observe_s=0.02)
  options = dict(config=settings, follows=True, page_tokens=page_tokens)
  with pytest.raises(ValueError, match='page_tokens'):
    Router([second], follows=True)
  router = Router([first, second], **options).start()
  try:
    wait_until(lambda: router.stats()['living_replicas'] == 1)
    prompt = np.arange(1, 1 + page_tokens)
    router.submit(request(prompt, 2)).future.result(30)
    assert local[0].stats()['completions'] == 1
    server = engine_server.EngineServer(
      EngineServerConfig(port=port, alive_s=ALIVE_S), local[1]
    )
    with server:
      wait_until(lambda: router.stats()['living_replicas'] == 2)
      # Pages that only the engine's journal tells of.
      prompt = np.arange(20, 20 + 2 * page_tokens)
      local[1].submit(request(prompt, 2)).future.result(30)
      prompt = np.append(prompt, 5)
      chain = page_chain.chain(prompt, page_tokens)
      wait_until(lambda: router._fleet.replicas[1].index.match(chain) == 2)
      router.submit(request(prompt, 2)).future.result(30)
      assert local[1].stats()['completions'] == 2
      for scheduler in local:
        scheduler.update_weights(init(1), 7)
      wait_until(lambda: router.stats()['policy_version'] == 7)
      wait_until(lambda: router._fleet.replicas[1].index.match(chain) == 0)
      result = router.submit(request(prompt, 2)).future.result(30)
      assert result.versions.tolist() == [7, 7]
    served = local[0].stats()['completions']
    for seed in range(3):  # one that is lost is not tried twice
      result = router.submit(request(prompt[:5], 2, seed=seed)).future.result(30)
      assert len(result.tokens) == 2
    assert local[0].stats()['completions'] == served + 3
    wait_until(lambda: router.stats()['living_replicas'] == 1)
    assert router.alive
  finally:
    router.stop()


def test_errors_before_anything_is_sent(connect, scripted):
  """What the scheduler refuses, the client refuses, with the same errors."""
  engine = scripted(lambda r: [1])
  client, _ = connect(engine)
  with pytest.raises(PromptTooLong, match='prompt_ids'):
    client.submit(request(np.ones(CONTEXT, int)))
  with pytest.raises(ValueError, match='sampling.top_p'):
    client.submit(request([1], top_p=2.0))
  with pytest.raises(ValueError, match='prompt_ids'):
    client.submit(request([CFG.vocab_size]))
  assert not engine.requests


def test_an_engine_that_fails(connect, scripted):
  """A failed step is an EngineError with its reason, and so is a stopped engine."""
  engine = scripted(lambda r: RuntimeError('out of memory'))
  client, _ = connect(engine)
  with pytest.raises(EngineError, match='out of memory'):
    client.submit(request([1])).future.result(30)
  engine.alive = False
  with pytest.raises(EngineError):
    client.submit(request([1])).future.result(30)
  engine.stopped_reason = 'the device is gone'
  wait_until(lambda: client.stopped_reason == 'the device is gone')
  assert not client.alive


def test_another_config_is_not_served(connect, scripted):
  other = dataclasses.replace(ENGINE_CONFIG, contexts=(), context_tokens=32)
  client, _ = connect(scripted(lambda r: [1]), config=other)
  wait_until(lambda: 'same config' in (client.stopped_reason or ''))


def test_keys(connect, scripted):
  """No key, or another one: 401 for every route, and nothing reaches the engine."""
  engine = scripted(lambda r: [1])
  client, server = connect(engine, key='right', their_key='wrong')
  with pytest.raises(EngineError, match='401'):
    client.submit(request([1])).future.result(30)
  for method, path in (('GET', '/health'), ('POST', '/cancel'), ('POST', '/generate')):
    assert httpx.request(method, server.url + path).status_code == 401
  assert not engine.requests
  right, _ = connect(engine, key='right')
  assert right.wait(10)


def test_beyond_loopback_only_with_a_key(scripted):
  engine = scripted(lambda r: [1])
  config = EngineServerConfig(host='0.0.0.0')
  with pytest.raises(ValueError, match="EngineServerConfig.host='0.0.0.0'.*key"):
    engine_server.EngineServer(config, engine)
  engine_server.EngineServer(config, engine, 'secret')


def asked(header, prompt=b''):
  """A request of that header, or of its bytes."""
  if not isinstance(header, bytes):
    header = json.dumps(header).encode()
  return struct.pack('>4sIQ', b'm2f1', len(header), len(prompt)) + header + prompt


def good(**fields):
  header = dict(kind='generate', id='a', sampling={'max_tokens': 1})
  return header | dict(arrays=dict(prompt_ids=('int32', [1]))) | fields


def token(value):
  return np.full(1, value, np.int32).tobytes()


MALFORMED = [
  (b'', 'no frame'),
  (b'\xff' * 16, 'no frame'),
  (asked(good(), token(1))[:-1], 'bytes'),
  (asked(good(), token(1)) + b'1', 'bytes'),
  (asked(b'{'), 'header'),
  (asked(b'[' * 60_000), 'header'),
  (asked([]), 'header'),
  (asked(b' ' * (64 << 10) + b'{}'), 'allowed'),
  (asked(good(kind='cancel'), token(1)), 'id and sampling'),
  (asked(good(more=1), token(1)), 'id and sampling'),
  (asked(good(id=''), token(1)), 'id'),
  (asked(good(id='x' * 65), token(1)), 'id'),
  (asked(good(), b'123'), 'prompt_ids'),
  (asked(good(arrays={})), 'prompt_ids'),
  (asked(good(arrays=dict(prompt_ids=('int64', [1]))), bytes(8)), 'prompt_ids'),
  (asked(good(arrays=dict(prompt_ids=('int32', [0])))), 'prompt_ids'),
  (asked(good(), token(2**30)), 'prompt_ids'),
  (asked(good(), token(-1)), 'prompt_ids'),
  (asked(good(sampling={}), token(1)), 'max_tokens'),
  *(
    (asked(good(sampling={'max_tokens': 1, **bad}), token(1)), next(iter(bad)))
    for bad in (
      {'max_tokens': True},
      {'max_tokens': 0},
      {'max_tokens': 10**30},
      {'temperature': 'hot'},
      {'temperature': float('nan')},
      {'top_p': [1]},
      {'stop_ids': 3},
      {'stop_ids': [1, 2, 3, 4]},
      {'stop_ids': ['1']},
      {'logit_bias': [[1]]},
      {'logit_bias': [[1, 2.0]] * 9},
      {'seed': 1.5},
      {'prompt': 1},
    )
  ),
]


def test_malformed_requests(connect, serve):
  """A 400 that names the field; the engine goes on."""
  local = serve()
  _, server = connect(local)
  with httpx.Client() as http:
    for body, field in MALFORMED:
      response = http.post(server.url + '/generate', content=body)
      assert response.status_code == 400, (body, response.text)
      assert field in response.json()['error']['message'], body
  assert local.stats()['queue_length'] == 0


def test_bounds(connect, scripted):
  """Bodies, ids in progress, and requests in progress are bounded."""
  engine = scripted(lambda r: range(1, 41), delay_s=0.5)
  client, server = connect(engine, max_requests=1)
  url = server.url + '/generate'
  large = b'\0' * (wire.request_limit(CONTEXT) + 1)
  assert httpx.post(url, content=large).status_code == 413
  assert httpx.post(server.url + '/cancel', content=b'x' * 1000).status_code == 413
  assert httpx.get(server.url + '/else').status_code == 404
  content = wire.encode_request('mine', request([1], 40))
  with httpx.stream('POST', url, content=content) as response:
    chunks = response.iter_raw()  # without a reference it closes the connection
    next(chunks)
    again = httpx.post(url, content=content)
    assert again.status_code == 400 and "'mine'" in again.text
    with pytest.raises(EngineError, match='max_requests'):
      client.submit(request([1])).future.result(30)
  wait_until(lambda: engine.cancelled['requests'] == 1)

  def served():
    try:
      return len(client.submit(request([1], 2)).future.result(30).tokens) == 2
    except EngineError:  # the server has not noticed the end of the other yet
      return False

  wait_until(served)


@given(data=st.binary(max_size=200), flip=st.integers(0, 10_000))
def test_bytes_of_strangers(data, flip):
  """Reading gives a request or Malformed, whatever the bytes are."""
  valid = bytearray(wire.encode_request('id', request([1, 2, 3], stop_ids=(1,))))
  valid[flip % len(valid)] ^= 1 + flip % 255
  for body in (data, bytes(valid)):
    try:
      _, made = wire.decode_request(body)
    except frames.Malformed:
      continue
    assert isinstance(made, GenerateRequest)


@given(st.lists(st.binary(max_size=30), max_size=6), st.integers(1, 7))
def test_frames_survive_any_division_into_chunks(payloads, size):
  arrays = [dict(x=np.frombuffer(p, np.uint8)) for p in payloads]
  data = b''.join(frames.pack('tokens', x) for x in arrays)

  async def chunks():
    for i in range(0, len(data), size):
      yield data[i : i + size]

  async def read():
    return [frame async for frame in frames.stream(chunks(), 30)]

  assert [f.arrays['x'].tobytes() for f in asyncio.run(read())] == payloads
  for cut in (data[:-1], data[:10]):
    if data:
      with pytest.raises(frames.Malformed, match='within a frame'):
        data = cut
        asyncio.run(read())
