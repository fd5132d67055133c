"""The routing benchmark: its sessions, its simulated engine, and the engine that it is.

The last test serves a small replay on real engines and compares every hit.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks import kv_routing, kv_routing_measure, kv_routing_trace
from benchmarks.kv_routing_cluster import Cluster, ClusterConfig, summary
from benchmarks.kv_routing_engine import Times
from benchmarks.kv_routing_oracle import best_response, first_token_s
from benchmarks.kv_routing_trace import Session, TraceConfig, Turn
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.config import EngineConfig
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.routing.config import RouterConfig
from m2jax.rollout.routing.policies import POLICIES, Choice
from m2jax.rollout.routing.router import Router
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.rollout.tiers import page_chain
from tests.rollout.conftest import CFG, ENGINE_CONFIG, init

TRACE = TraceConfig(
  groups=2,
  group_size=3,
  system_tokens=40,
  turns=6,
  turns_p99=1.5,
  ratio=20,
  response_tokens=8,
  tool_s=0.5,
  context_tokens=512,
  page_tokens=8,
  vocabulary=50,
)
ENGINE = EngineConfig(
  slots=4,
  context_tokens=512,
  page_tokens=8,
  pages=200,
  max_steps=4,
  decode_rows=(4,),
  prefill_shapes=((1, 32), (4, 16)),
  contexts=(512,),
)
TIMES = Times(1e-3, 1e-4, 1e-8, 1e-3, 1e-2, 0.0, 1e-7)
CLUSTER = ClusterConfig(
  2, ENGINE, SchedulerConfig(decode_steps=4, prefill_budget_tokens=64), TIMES
)


@pytest.fixture(scope='module')
def traces():
  return kv_routing_trace.sessions(TRACE)


def test_the_sessions_have_the_published_statistics():
  config = TraceConfig(groups=4, response_tokens=60, system_tokens=1500)
  found = kv_routing_trace.statistics(config, kv_routing_trace.sessions(config))
  assert found['sessions'] == 64
  assert found['turns_p50'] == pytest.approx(33, rel=0.15)
  assert found['input_output'] == pytest.approx(131, rel=0.01)
  assert found['response_tokens_mean'] == pytest.approx(60, rel=0.1)
  assert 0.92 < found['ideal_hit'] < 0.96


def test_a_prompt_is_the_conversation_before_it(traces):
  """Except where the history was edited; then a part of it is gone."""
  edits = 0
  for session in traces:
    for a, b in zip(session.turns, session.turns[1:], strict=False):
      before = np.concatenate([a.prompt, a.response])
      if not np.array_equal(b.prompt[: len(before)], before):
        edits += 1
      full = np.concatenate([b.prompt, b.response])
      assert b.chain == page_chain.chain(full, TRACE.page_tokens)
  first = {s.group: s.turns[0].prompt.tobytes() for s in traces}
  assert all(s.turns[0].prompt.tobytes() == first[s.group] for s in traces)
  assert len(set(first.values())) == TRACE.groups
  assert edits < sum(len(s.turns) for s in traces) / 4


@pytest.mark.parametrize('name', [*POLICIES, *kv_routing.ORACLES])
def test_a_replay_serves_every_request_and_counts_every_token(name, traces):
  row = kv_routing.replay(name, CLUSTER, traces, seed=0)
  prompts = sum(len(t.prompt) for s in traces for t in s.turns)
  requests = sum(len(s.turns) for s in traces)
  assert 0 < row['hit_rate'] < 1 and 0 < row['ttft_p50_s'] <= row['ttft_p99_s']
  assert row['retractions'] == 0
  computed = prompts * (1 - row['hit_rate']) - requests  # the last token is decoded
  assert row['computed_tokens'] == round(computed)
  assert row == kv_routing.replay(name, CLUSTER, traces, seed=0)


def test_no_policy_hits_more_than_the_oracle_and_all_stay_below_the_ideal(traces):
  rows = kv_routing.compare(_Arguments(traces), CLUSTER, TRACE)
  hits = {row['policy']: row['hit_rate'] for row in rows}
  assert max(hits.values()) == hits['oracle'] > hits['random']
  means = kv_routing.means(rows)
  assert [row['policy'] for row in means] == list(hits)
  assert means[-1]['hit_of_oracle'] == 1.0
  text = kv_routing.table(means)
  assert text.count('\n') == len(hits) + 1 and 'cost-aware' in text
  json.dumps(means)


class _Arguments:
  policies = ['random', 'cost_aware', 'best_response', 'oracle']
  seeds = [0]

  def __init__(self, traces):
    self.traces = traces


def test_migrated_pages_are_not_computed_and_none_is_lost(traces):
  """Sent back and forth by a policy that always moves."""
  moving = dataclasses.replace(CLUSTER, token_bytes=1.0, migration_bytes_per_s=1e4)

  def back_and_forth(query, views):
    source = max(views, key=lambda view: view.cached_tokens)
    other = next(view for view in views if view.replica != source.replica)
    moved = source.cached_tokens > other.cached_tokens
    return Choice(other.replica, source.replica if moved else None)

  alone = Cluster(moving, traces, back_and_forth).run()
  still = kv_routing.replay('random', CLUSTER, traces, 0)
  found = summary(alone)
  assert found['migrated_tokens'] > 0
  assert found['hit_rate'] > still['hit_rate']
  token_s = 1.0 / 1e4
  assert all(r.migration_s > 0.999 * token_s for r in alone.fleet.replicas)
  for replica in alone.replicas:
    cache = replica.cache
    assert cache.available == cache.pages
    nodes = list(cache._nodes())
    assert all(node.users == 0 for node in nodes) and len(nodes) == cache.cached


def test_new_weights_empty_the_caches(traces):
  swapping = dataclasses.replace(CLUSTER, swap_s=0.5)
  row = kv_routing.replay('cost_aware', swapping, traces, 0)
  assert (
    row['hit_rate'] < kv_routing.replay('cost_aware', CLUSTER, traces, 0)['hit_rate']
  )


def _recorded(engine, variables, orders):
  """Serves conversations one request after the other by a router over two engines.

  Returns:
    The sessions as they were, the replica of each request, and the replicas' hits.
  """
  replicas = [
    Scheduler(engine, variables, config=SchedulerConfig(decode_steps=4)).start(
      warmup=False
    )
    for _ in range(2)
  ]
  router = Router(replicas, config=RouterConfig(observe_s=60.0))
  random = np.random.default_rng(0)
  past = {s: list(range(9 * (s % 3), 9 * (s % 3) + 9)) for s in set(orders)}
  turns: dict[int, list[Turn]] = {s: [] for s in past}
  chosen, last = [], {}
  try:
    for at, session in enumerate(orders):
      prompt = np.array(past[session], np.int32)
      before = [replica.stats()['prompt_tokens'] for replica in replicas]
      sampling = SamplingParams(max_tokens=3, seed=at)
      result = router.submit(GenerateRequest(prompt, sampling)).future.result(60)
      after = [replica.stats()['prompt_tokens'] for replica in replicas]
      chosen.append(int(np.argmax(np.subtract(after, before))))
      router.observe()
      full = np.concatenate([prompt, result.tokens])
      chain = page_chain.chain(full, ENGINE_CONFIG.page_tokens)
      if session in last:
        which, index = last[session]
        gap = 1000.0 * (at - which)
        turns[session][index] = dataclasses.replace(turns[session][index], tool_s=gap)
      last[session] = at, len(turns[session])
      turns[session].append(Turn(prompt, result.tokens, chain, 0.0))
      tool = random.integers(0, CFG.vocab_size, 2).tolist()
      past[session] = [*full.tolist(), *tool]
    hits = [replica.stats()['prefix_hit_tokens'] for replica in replicas]
    computed = [replica.stats()['prefill_tokens'] for replica in replicas]
    evicted = sum(replica.stats()['evicted_pages'] for replica in replicas)
    expected = router.stats()['predicted_hit_tokens']
  finally:
    router.stop()
  first = {s: 1000.0 * orders.index(s) for s in past}
  sessions = [Session(0, turns[s], first[s]) for s in sorted(past)]
  return sessions, chosen, hits, computed, evicted, expected


@pytest.mark.long
def test_simulated_replicas_hit_what_real_engines_hit():
  """Token for token, with more conversations than the pages hold."""

  config = dataclasses.replace(ENGINE_CONFIG, pages=30)
  engine = Engine(CFG, config)
  random = np.random.default_rng(1)
  orders = [int(s) for s in random.permutation(np.repeat(np.arange(9), 6))]
  sessions, chosen, hits, computed, evicted, expected = _recorded(
    engine, init(0), orders
  )
  assert evicted > 0 and sum(hits) > 0
  replayed = iter(chosen)
  scheduler = SchedulerConfig(decode_steps=4)
  cluster = Cluster(
    ClusterConfig(2, config, scheduler, TIMES, vocabulary=CFG.vocab_size),
    sessions,
    lambda cluster, turn: Choice(next(replayed)),
    global_knowledge=True,
  ).run()
  assert [request.session for request in cluster.requests] == orders
  counts = [replica.batcher.counts for replica in cluster.replicas]
  assert [count['prefix_hit_tokens'] for count in counts] == hits
  assert [count['prefill_tokens'] for count in counts] == computed
  # The router's index, fed by the journals, was right about all of them.
  assert expected == sum(hits)
  assert summary(cluster)['predicted'] == summary(cluster)['hit_rate']


@pytest.mark.long
def test_times_are_measured_on_a_real_engine():
  found = dataclasses.astuple(kv_routing_measure.times(Engine(CFG, ENGINE_CONFIG)))
  assert min(found) >= 0 and sum(found[:2]) > 0 and sum(found[3:]) > 0


def test_the_oracle_knows_how_long_a_replica_is_busy(traces):
  """Its forecast for the next request is close to what the simulation then does."""
  errors = []

  def watched(cluster, turn):

    choice = best_response(cluster, turn)
    replica = cluster.replicas[choice.replica]
    forecast.append(first_token_s(cluster, replica, turn))
    return choice

  forecast: list[float] = []
  cluster = Cluster(CLUSTER, traces, watched, shared=True, global_knowledge=True).run()
  for want, request in zip(forecast, cluster.requests, strict=True):
    errors.append(abs(request.first - request.submitted - want))
  assert np.median(errors) < 0.3 * np.median(forecast)
