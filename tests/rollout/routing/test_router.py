"""A router is one engine to its callers, whatever happens to its replicas."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from m2jax.rollout.api import EngineError, GenerateRequest, PageEvent, SamplingParams
from m2jax.rollout.routing.config import RouterConfig
from m2jax.rollout.routing.router import Router
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.tiers.config import KvPoolConfig
from tests.rollout.conftest import CONTEXT, log_softmax
from tests.rollout.engine.test_engine import prompt
from tests.rollout.replicas import FakeReplica

TIMEOUT_S = 60


def request(tokens, max_tokens=6, **sampling) -> GenerateRequest:
  sampling = SamplingParams(max_tokens=max_tokens, **sampling)
  return GenerateRequest(tuple(int(t) for t in tokens), sampling)


def fakes(count: int = 2, **config) -> tuple[Router, list[FakeReplica]]:
  replicas = [FakeReplica() for _ in range(count)]
  return Router(replicas, config=RouterConfig(**config)), replicas


def served(replicas) -> list[int]:
  return [len(replica.requests) for replica in replicas]


def test_a_conversation_follows_its_pages():
  """Not because it is pinned: the pages are there."""
  router, replicas = fakes(4)
  tokens = prompt(0, 9)
  handle = router.submit(request(tokens))
  home = int(np.argmax(served(replicas)))
  for turn in range(1, 4):
    replicas[home].finish(turn - 1, (turn, turn + 1))
    result = handle.future.result(0)
    tokens = [*tokens, *result.tokens, 7]
    handle = router.submit(request(tokens))
    assert served(replicas)[home] == turn + 1
  assert router.stats()['predicted_hit_tokens'] == 8 + 12 + 16
  router.stop()


def test_what_was_evicted_or_is_of_older_weights_is_not_expected():
  router, replicas = fakes(1)
  tokens = prompt(0, 9)
  router.submit(request(tokens))
  replicas[0].finish(0)
  before = router.stats()['predicted_hit_tokens']
  router.submit(request(tokens))
  assert router.stats()['predicted_hit_tokens'] == before + 8
  chain = router._chain(tokens)
  replicas[0].events = [PageEvent('evicted', chain[1])]
  router.observe()
  router.submit(request(tokens))
  assert router.stats()['predicted_hit_tokens'] == before + 8 + 4
  router.update_weights(None, 1)
  router.submit(request(tokens))
  assert router.stats()['predicted_hit_tokens'] == before + 8 + 4
  router.stop()


def test_a_dead_replicas_requests_go_elsewhere_with_their_seed():
  router, replicas = fakes(2, policy='least_loaded')
  handles = [router.submit(request(prompt(i, 5))) for i in range(4)]
  assert served(replicas) == [2, 2]
  moved = [r.sampling.seed for r, _, _ in replicas[0].requests]
  replicas[0].die()
  assert served(replicas) == [2, 4]
  assert [r.sampling.seed for r, _, _ in replicas[1].requests[2:]] == moved
  for number in range(4):
    replicas[1].finish(number)
  assert all(list(h.future.result(0).tokens) == [1, 2] for h in handles)
  router.submit(request(prompt(9, 5)))
  assert served(replicas) == [2, 5]
  stats = router.stats()
  assert stats['resubmissions'] == 2 and stats['lost_replicas'] == 1
  assert stats['living_replicas'] == 1 and router.alive
  router.stop()


def test_what_was_streamed_is_not_drawn_again():
  """The caller has seen tokens that another replica need not draw."""
  router, replicas = fakes(2, policy='least_loaded')
  seen = []
  handles = [router.submit(request(prompt(i, 5)), seen.append) for i in range(2)]
  first = replicas[0].requests[0][1]
  first((5,))
  replicas[0].die('out of memory')
  which = int(handles[1].future.done())
  with pytest.raises(EngineError, match='out of memory'):
    handles[which].future.result(0)
  assert served(replicas) == [1, 1] and seen == [(5,)]
  replicas[1].finish(0)
  assert list(handles[1 - which].future.result(0).tokens) == [1, 2]
  router.stop()


def test_the_last_replica_takes_the_service_with_it():
  router, replicas = fakes(2)
  handle = router.submit(request(prompt(0, 5)))
  for replica in replicas:
    replica.die('no power')
  with pytest.raises(EngineError, match='no replica'):
    handle.future.result(0)
  with pytest.raises(EngineError, match='no replica'):
    router.submit(request(prompt(0, 5)))
  router.observe()
  assert not router.alive and 'no power' in router.stopped_reason
  router.stop()


def test_attempts_are_bounded():
  router, replicas = fakes(4, max_attempts=2)
  handle = router.submit(request(prompt(0, 5)))
  for replica in (r for _ in range(2) for r in replicas):
    if replica.requests:
      replica.die()
  with pytest.raises(EngineError):
    handle.future.result(0)
  assert sum(served(replicas)) == 2
  router.stop()


def test_cancellation_reaches_the_replica_before_and_after_a_move():
  router, replicas = fakes(2, policy='least_loaded')
  handle = router.submit(request(prompt(0, 5)))
  handle.cancel()
  assert handle.future.result(0).finish_reason == 'cancelled'
  handle.cancel()  # no effect on a finished one
  handle = router.submit(request(prompt(1, 5)))
  home = next(r for r in replicas if r.requests and not r.requests[-1][2].done())
  other = replicas[1 - replicas.index(home)]
  home._cancel = lambda number: None  # it dies before it has seen the message
  handle.cancel()
  home.die()
  assert handle.future.result(0).finish_reason == 'cancelled'
  assert other.cancelled
  router.stop()


def test_bad_requests_are_the_callers():
  router, replicas = fakes(2)
  with pytest.raises(ValueError, match='prompt_ids'):
    router.submit(request(prompt(0, 40)))
  assert router.stats()['living_replicas'] == 2 and served(replicas) == [0, 0]
  assert all(not r.view(0, 1.0, None).load for r in router._fleet.replicas)
  router.stop()


def test_a_new_replica_has_the_latest_weights_before_it_serves():
  made, entered, hold = [], threading.Event(), threading.Event()

  def make(number, variables, version):
    assert (variables, version) == ('weights 1', 1)
    entered.set()
    hold.wait(TIMEOUT_S)
    made.append(FakeReplica(version))
    return made[-1]

  replicas = [FakeReplica()]
  config = RouterConfig(restart_s=1e-3)
  router = Router(replicas, config=config, make=make, variables='weights 0')
  router.update_weights('weights 1', 1)
  with pytest.raises(ValueError, match='version=1'):
    router.update_weights('weights 1', 1)
  handle = router.submit(request(prompt(0, 5)))
  replicas[0].die()
  assert router.alive and entered.wait(TIMEOUT_S)
  with pytest.raises(EngineError):
    handle.future.result(0)
  router.update_weights('weights 2', 2)  # while the new one starts
  hold.set()
  router._restarts.wait()
  assert made[0].published == [2] and replicas[0].published == [1]
  handle = router.submit(request(prompt(0, 5)))
  made[0].finish(0)
  assert list(handle.future.result(0).versions) == [2, 2]
  assert router.stopped_reason is None
  router.stop()


def test_a_replica_that_is_alive_again_serves_again():
  """Such as one in another process, after its connection was lost."""
  router, replicas = fakes(1)
  replicas[0].die('connection reset')
  with pytest.raises(EngineError):
    router.submit(request(prompt(0, 5)))
  assert not router.alive
  replicas[0].alive = True
  router.observe()
  router.submit(request(prompt(0, 5)))
  replicas[0].finish(0)
  assert router.alive and router.stopped_reason is None
  router.update_weights(None, 1)
  replicas[0].die('connection reset')
  router.observe()
  replicas[0].alive, replicas[0].version = True, 0
  router.observe()  # it has older weights, and the router none to give to it
  assert not router.alive
  router.stop()


def test_restarts_are_bounded():
  tries = []

  def make(number, variables, version):
    tries.append(number)
    raise OSError('no such device')

  config = RouterConfig(restart_s=1e-3, max_restarts=2)
  router = Router([FakeReplica()], config=config, make=make)
  router._replicas[0].die()
  router.observe()
  router._restarts.wait()
  assert tries == [0, 0] and not router.alive
  assert 'no such device' in router.stopped_reason
  router.stop()


def test_a_replica_that_takes_no_weights_serves_no_more():
  """It would draw tokens of a version that is older than what was published."""
  router, replicas = fakes(2)

  def broken(variables, version):
    raise ConnectionError('broken pipe')

  replicas[0].update_weights = broken
  router.update_weights(None, 1)
  for i in range(4):
    router.submit(request(prompt(i, 5)))
  assert served(replicas) == [0, 4]
  assert router.stats()['policy_version'] == 1
  router.stop()


def test_config_errors_name_the_field():
  with pytest.raises(ValueError, match='policy'):
    RouterConfig(policy='nearest')
  with pytest.raises(ValueError, match='max_attempts'):
    RouterConfig(max_attempts=0)


@pytest.fixture
def two(engine, variables):
  """Two replicas of one engine: its functions are compiled once."""
  config = RouterConfig(observe_s=0.01, restart_s=0.01)
  scheduler = SchedulerConfig(decode_steps=4, max_failures=1)
  router = Router.over([engine, engine], variables, 0, scheduler, config, warmup=False)
  yield router.start(), router._replicas
  router.stop()


def test_a_real_replica_dies_and_comes_back(two, serve):
  """Its requests give the tokens that they would have given."""
  router, replicas = two
  one = serve()
  requests = [request(prompt(i, 9), max_tokens=9, seed=i) for i in range(8)]
  want = [one.submit(r).future.result(TIMEOUT_S) for r in requests]
  first = list(replicas)

  def broken():
    raise RuntimeError('a chip is gone')

  first[0]._batcher.tick = broken
  handles = [router.submit(r) for r in requests]
  for handle, expected in zip(handles, want, strict=True):
    assert list(handle.future.result(TIMEOUT_S).tokens) == list(expected.tokens)
  stats = router.stats()
  assert stats['resubmissions'] > 0 and stats['lost_replicas'] == 1
  router._restarts.wait()
  assert replicas[0] is not first[0] and replicas[1] is first[1]
  assert router.stats()['living_replicas'] == 2
  again = replicas[0].submit(requests[0]).future.result(TIMEOUT_S)
  assert list(again.tokens) == list(want[0].tokens)


def test_two_engines_give_the_tokens_of_one(two, serve):
  """Seeded draws do not depend on the replica (to rounding in other batches)."""
  router, replicas = two
  one = serve()
  stem = prompt(3, 9)
  requests = [
    request(stem + prompt(i, i % 5), max_tokens=9, seed=i, temperature=1.0)
    for i in range(8)
  ] + [request(prompt(50 + i, 7), temperature=0.0) for i in range(8)]
  handles = [router.submit(r) for r in requests]
  found = [h.future.result(TIMEOUT_S) for h in handles]
  want = [one.submit(r).future.result(TIMEOUT_S) for r in requests]
  for a, b in zip(found, want, strict=True):
    assert list(a.tokens) == list(b.tokens)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
  assert all(r.stats()['completions'] for r in replicas)
  router.observe()
  stats = router.stats()
  assert stats['completions'] == 16 and stats['queue_length'] == 0
  assert stats['slots'] == 2 * one.stats()['slots']


def test_the_router_knows_what_real_engines_have(two, variables, reference):
  """Conversations with evictions: expected pages are those that engines hit."""
  router, replicas = two
  sessions = [prompt(i, 9) for i in range(6)]
  for turn in range(4):
    for i, tokens in enumerate(sessions):
      result = router.submit(request(tokens, max_tokens=5, seed=turn)).future.result(60)
      logits = reference.logits(variables, [*tokens, *result.tokens])
      rows = np.arange(len(tokens) - 1, len(tokens) + 4)
      want = log_softmax(logits)[rows, result.tokens]
      np.testing.assert_allclose(result.logprobs, want, atol=1e-4)
      sessions[i] = [*tokens, *result.tokens.tolist(), turn]
      router.observe()
  stats = router.stats()
  assert stats['prefix_hit_tokens'] == stats['predicted_hit_tokens'] > 0
  assert max(len(tokens) for tokens in sessions) < CONTEXT


def test_times_of_moved_pages_are_those_of_the_replicas(few, variables, tmp_path):
  """Pages that one replica computed reach the other through the pool that both have,
  and the router takes the time of that from their statistics."""
  pool = KvPoolConfig(f'file://{tmp_path}/', bytes=1 << 22, wait_s=60.0)
  scheduler = SchedulerConfig(decode_steps=4, host_cache_bytes=1 << 20, kv_pool=pool)
  prior = 1e-9  # it never pays to compute
  config = RouterConfig(policy='random', migration_s=prior)
  router = Router.over([few, few], variables, 0, scheduler, config, warmup=False)
  router.start()
  try:
    first, second = router._replicas
    for replica in (first, second):
      router.observe()
      replica.submit(request(prompt(1, 33))).future.result(TIMEOUT_S)
      while replica.stats()['moving_pages'] or replica.stats()['pool_queued_pages']:
        time.sleep(0.01)
    router.observe()
    assert first.stats()['migrated_tokens'] == 0
    stats, measured = second.stats(), router._fleet.replicas[1].migration_s
    assert stats['migrated_tokens'] == stats['pool_hit_tokens'] == 32
    assert 0 < stats['migration_s'] < TIMEOUT_S
    share = (measured - prior) / (stats['migration_s'] / 32 - prior)
    assert 0 < share <= 1 and router._fleet.replicas[0].migration_s == prior
  finally:
    router.stop()


def test_weights_reach_all_replicas(two, other_variables, reference):
  """No token of older weights, and no prefix of them, after a publication."""
  router, replicas = two
  tokens = prompt(1, 13)
  for _ in range(4):
    router.submit(request(tokens, temperature=0.0)).future.result(TIMEOUT_S)
  router.update_weights(other_variables, 3)
  handles = [router.submit(request(tokens, temperature=0.0)) for _ in range(6)]
  for handle in handles:
    result = handle.future.result(TIMEOUT_S)
    assert set(result.versions.tolist()) == {3}
    assert list(result.tokens) == reference.greedy(other_variables, tokens, 6)
  assert router.stats()['policy_version'] == 3
