"""Policies as functions: what each must choose, and what none may depend on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from m2jax.rollout.routing import policies
from m2jax.rollout.routing.policies import POLICIES, Query, View
from m2jax.rollout.routing.rates import RateEstimator, Rates

RATES = Rates(1e-3, 0.0, call_s=0.1, draw_s=1e-4)
COUNTERS = ('busy_s', 'prefill_tokens', 'prefill_padding_tokens')
COUNTERS += ('prefill_positions', 'decode_calls', 'sampled_tokens')
IDLE = View(0, 0, 0, 0.0, 0.0, 0, 8, 1000.0, 4, 20.0, RATES)


def views(*changes) -> list[View]:
  return [
    dataclasses.replace(IDLE, replica=number, **change)
    for number, change in enumerate(changes)
  ]


VIEW = st.builds(
  View,
  replica=st.just(0),
  cached_tokens=st.integers(0, 500),
  waiting=st.integers(0, 20),
  waiting_tokens=st.floats(0, 1e5),
  waiting_positions=st.floats(0, 1e9),
  decoding=st.integers(0, 20),
  slots=st.integers(1, 16),
  budget_tokens=st.floats(1, 1e5),
  steps=st.integers(1, 16),
  response_tokens=st.floats(1, 1000),
  rates=st.builds(Rates, *[st.floats(0, 1)] * 4),
  migration_s=st.one_of(st.floats(1e-9, 1), st.just(math.inf)),
)


@pytest.mark.parametrize('name', POLICIES)
@given(given_views=st.lists(VIEW, min_size=1, max_size=6), draw=st.floats(0, 0.999999))
def test_every_policy_chooses_a_replica_that_was_given(name, given_views, draw):
  numbered = [
    dataclasses.replace(view, replica=3 * i) for i, view in enumerate(given_views)
  ]
  query = Query(501, b'session', draw)
  choice = POLICIES[name](query, numbered)
  assert choice.replica in {view.replica for view in numbered}
  assert choice == POLICIES[name](query, numbered)
  if choice.source is not None:
    cached = {view.replica: view.cached_tokens for view in numbered}
    assert cached[choice.source] > cached[choice.replica]


def test_least_loaded_counts_requests():
  loads = views(dict(waiting=2), dict(decoding=1), dict(waiting=1, decoding=1))
  assert POLICIES['least_loaded'](Query(10, draw=0.9), loads).replica == 1


def test_sticky_moves_only_the_sessions_of_a_lost_replica():
  four = views({}, {}, {}, {})
  sessions = [bytes([i]) for i in range(200)]
  home = {s: POLICIES['sticky'](Query(10, s), four).replica for s in sessions}
  assert set(home.values()) == {0, 1, 2, 3}
  for session in sessions:
    moved = POLICIES['sticky'](Query(10, session), four[:2] + four[3:]).replica
    assert moved == home[session] or home[session] == 2


def test_prefix_aware_follows_the_prefix_until_load_is_out_of_balance():
  policy = policies.PrefixAware(absolute=4, relative=1.5)
  query = Query(100)
  assert policy(query, views(dict(waiting=4, cached_tokens=80), {})).replica == 0
  assert policy(query, views(dict(waiting=5, cached_tokens=80), {})).replica == 1
  assert policy(query, views(dict(waiting=1, cached_tokens=40), {})).replica == 1


def test_cost_aware_weighs_the_queue_against_the_prefix():
  """400 cached tokens are worth waiting for others' few, not for many."""
  query = Query(401)
  short, long = (
    dict(waiting=1, waiting_tokens=100.0),
    dict(waiting=1, waiting_tokens=5000.0),
  )
  policy = policies.cost_aware
  assert policy(query, views(dict(cached_tokens=400, **short), {})).replica == 0
  assert policy(query, views(dict(cached_tokens=400, **long), {})).replica == 1


def test_cost_aware_moves_pages_where_that_is_cheaper_than_computing_them():
  query = Query(401)
  busy = dict(cached_tokens=400, waiting=1, waiting_tokens=5000.0)
  fast, slow = 1e-5, 1e-1
  policy = policies.cost_aware
  assert policy(query, views(busy, dict(migration_s=fast))).source == 0
  assert policy(query, views(busy, dict(migration_s=slow))).source is None
  assert policy(query, views(busy, dict(migration_s=math.inf))).source is None


@given(st.integers(0, 400), st.floats(0, 1e4), st.floats(0, 1e4))
def test_cost_grows_with_the_queue_and_falls_with_the_prefix(cached, one, other):
  query = Query(401)
  cost = lambda **change: policies.cost_s(query, views(change)[0], IDLE)[0]
  low, high = sorted((one, other))
  assert cost(waiting_tokens=low, waiting=1) <= cost(waiting_tokens=high, waiting=1)
  assert cost(cached_tokens=cached) <= cost(cached_tokens=0)


def test_a_full_replica_costs_the_time_until_a_response_ends():
  long = dict(response_tokens=2000.0, cached_tokens=300)
  full = views(dict(decoding=8, **long), dict(decoding=7, **long))
  assert policies.cost_aware(Query(401), full).replica == 1


@pytest.mark.parametrize('seed', range(3))
def test_rates_are_those_of_the_work(seed):
  """Busy time made from known rates and noise gives the rates back."""
  random = np.random.default_rng(seed)
  want = Rates(2e-5, 1e-9, 0.15, 3e-4)
  estimator = RateEstimator(Rates(1e-4, 0.0, 0.1, 1e-4))
  stats = dict.fromkeys(COUNTERS, 0)
  for _ in range(400):
    tokens, calls = int(random.exponential(3000)), random.poisson(8) + 1
    rows = random.poisson(9)
    work = want.prefill_s * tokens + want.call_s * calls + want.draw_s * calls * rows
    reads = tokens * int(random.integers(50_000))
    work += want.position_s * reads
    stats['prefill_positions'] += reads
    stats['busy_s'] += work * random.normal(1, 0.02)
    stats['prefill_tokens'] += tokens
    stats['decode_calls'] += calls
    stats['sampled_tokens'] += calls * rows
    estimator.observe(stats)
  found = estimator.rates
  assert found.prefill_s == pytest.approx(want.prefill_s, rel=0.15)
  assert found.position_s == pytest.approx(want.position_s, rel=0.15)
  assert found.decode_s(9, 1) == pytest.approx(want.decode_s(9, 1), rel=0.05)


def test_rates_are_never_negative_and_survive_a_replaced_engine():
  estimator = RateEstimator(RATES)
  stats = dict.fromkeys(COUNTERS, 0) | dict(busy_s=10.0, prefill_tokens=100)
  estimator.observe(stats)
  estimator.observe({**stats, 'busy_s': 20.0, 'decode_calls': 50})
  assert estimator.measured
  estimator.observe(dict.fromkeys(stats, 0))  # a new engine's counters
  estimator.observe({**stats, 'busy_s': 5.0})
  assert min(dataclasses.astuple(estimator.rates)) >= 0
