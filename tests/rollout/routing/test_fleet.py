"""A router's accounts: what it counts is what is in flight, whatever the order."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from m2jax.rollout.api import PageEvent
from m2jax.rollout.routing.fleet import Fleet, Prior, Sizes
from m2jax.rollout.routing.policies import POLICIES, Choice
from m2jax.rollout.routing.rates import Rates
from m2jax.rollout.serving.batcher import TOTALS
from m2jax.rollout.tiers import page_chain

PAGE = 2
SIZES = Sizes(pages=6, page_tokens=PAGE, slots=2, budget_tokens=8, steps=2)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(np.array)


def stats(**counts) -> dict:
  return dict.fromkeys(TOTALS, 0) | counts


def cached(fleet: Fleet, number: int, tokens) -> int:
  chain = page_chain.chain(tokens, PAGE)
  return fleet._cached(fleet.replicas[number], chain, len(tokens))


class Machine(RuleBasedStateMachine):
  """Against lists of what was sent to each replica and has not ended."""

  def __init__(self):
    super().__init__()
    self.fleet = Fleet([SIZES] * 3, POLICIES['cost_aware'])
    self.flights = [[] for _ in range(3)]
    self.computed = [0, 0, 0]

  def alive(self):
    return [r.number for r in self.fleet.replicas if r.alive]

  @rule(tokens=TOKENS)
  def send(self, tokens):
    chain = page_chain.chain(tokens, PAGE)
    choice = self.fleet.choose(chain, len(tokens))
    if choice is None:
      assert not self.alive()
      return
    assert choice.replica in self.alive()
    flight = self.fleet.send(choice, chain, len(tokens))
    assert 1 <= flight.missing_tokens <= len(tokens)
    self.flights[choice.replica].append(flight)

  @precondition(lambda self: any(self.flights))
  @rule(data=st.data(), tokens=TOKENS)
  def end(self, data, tokens):
    number = data.draw(st.sampled_from([i for i in range(3) if self.flights[i]]))
    flight = data.draw(st.sampled_from(self.flights[number]))
    if data.draw(st.booleans()):
      self.fleet.first_token(flight)
      self.fleet.first_token(flight)  # counted once
    failed = data.draw(st.booleans())
    chain = page_chain.chain(tokens, PAGE)
    self.fleet.end(flight, chain, None if failed else len(tokens))
    self.fleet.end(flight, (), None)  # no effect
    self.flights[number].remove(flight)

  @precondition(lambda self: any(self.flights))
  @rule(data=st.data())
  def stream(self, data):
    number = data.draw(st.sampled_from([i for i in range(3) if self.flights[i]]))
    self.fleet.first_token(data.draw(st.sampled_from(self.flights[number])))

  @rule(number=st.integers(0, 2), tokens=st.integers(0, 9), page=TOKENS)
  def observe(self, number, tokens, page):
    self.computed[number] += tokens
    events = [
      PageEvent('stored', digest, self.fleet.version)
      for digest in page_chain.chain(page, PAGE)
    ]
    self.fleet.observe(number, stats(prefill_tokens=self.computed[number]), events)

  @rule(number=st.integers(0, 2))
  def lose(self, number):
    self.fleet.lose(number)
    assert not len(self.fleet.replicas[number].index)

  @rule(number=st.integers(0, 2))
  def replace(self, number):
    """Requests of the old replica may still end, and change nothing of the new one."""
    old = self.flights[number]
    self.fleet.replace(number, SIZES)
    self.flights[number] = []
    for flight in old:
      self.fleet.first_token(flight)
      self.fleet.end(flight, flight.chain, None)

  @rule()
  def publish(self):
    self.fleet.advance(self.fleet.version + 1)

  @invariant()
  def counts_are_those_of_the_flights(self):
    for number, replica in enumerate(self.fleet.replicas):
      view = replica.view(0, 1.0, Prior().rates)
      flights = self.flights[number]
      waiting = [flight for flight in flights if not flight.streams]
      assert view.load == len(flights) and view.waiting == len(waiting)
      assert 0 <= view.waiting_tokens <= sum(f.missing_tokens for f in waiting)
      assert len(replica.index) <= SIZES.pages


TestFleet = Machine.TestCase
TestFleet.settings = settings(stateful_step_count=30, deadline=None)


def test_a_prefix_that_is_being_computed_is_worth_the_wait_for_its_rest():
  """Samples of one prompt expect the pages of the first, once little is left of it."""
  slow = Prior(Rates(1.0, 0.0, call_s=0.1, draw_s=0.0))
  fleet = Fleet([SIZES] * 4, POLICIES['cost_aware'], prior=slow)
  chain = page_chain.chain(np.arange(9), PAGE)
  first = fleet.choose(chain, 9)
  fleet.observe(first.replica, stats())
  assert fleet.send(first, chain, 9).missing_tokens == 9
  second = fleet.choose(chain, 9)  # 9 s to wait for, or 9 s to compute
  assert second.replica != first.replica
  fleet.observe(first.replica, stats(prefill_tokens=8))
  third = fleet.choose(chain, 9)
  assert third.replica == first.replica
  assert fleet.send(third, chain, 9).missing_tokens == 1


def test_computed_tokens_are_no_longer_waited_for():
  fleet = Fleet([SIZES], POLICIES['random'])
  fleet.observe(0, stats(prefill_tokens=100))
  fleet.send(Choice(0), [], 50)
  view = lambda: fleet.replicas[0].view(0, 1.0, Prior().rates)
  assert view().waiting_tokens == 50
  fleet.observe(0, stats(prefill_tokens=130))
  assert view().waiting_tokens == 20
  fleet.observe(0, stats(prefill_tokens=900))
  assert view().waiting_tokens == 0


def test_an_idle_replica_is_taken_to_be_as_fast_as_the_others():
  """Else a slow prior would keep it idle for ever."""
  fleet = Fleet([SIZES] * 2, POLICIES['random'])
  for step in range(1, 40):
    counts = dict(prefill_tokens=1000 * step, decode_calls=step, sampled_tokens=step)
    fleet.observe(0, stats(busy_s=2.0 * step, **counts))
  found = fleet.replicas[0].estimator.rates
  assert fleet._rates == found != Prior().rates


def test_times_of_migration_are_measured():
  prior = Prior(Rates(1.0, 1.0, 1.0, 1.0), migration_s=1.0)
  fleet = Fleet([SIZES] * 2, POLICIES['random'], prior=prior)
  for step in range(100):
    moved = dict(migrated_tokens=10 * step, migration_s=0.1 * step)
    fleet.observe(0, stats(**moved))
    fleet.observe(1, stats())
  assert fleet.replicas[0].migration_s == pytest.approx(0.01, rel=0.1)
  assert fleet.replicas[1].migration_s == 1.0
  assert Prior().migration_s == math.inf


def test_a_pool_of_ones_own_moves_nothing_between_replicas():
  """A replica measures what it reads from it; the others' pages are not there."""
  fleet = Fleet([SIZES] * 2, POLICIES['random'])
  for step in range(3):
    fleet.observe(0, stats(migrated_tokens=10 * step, migration_s=0.1 * step))
  assert fleet.replicas[0].migration_s == math.inf


def test_replicas_have_pages_of_one_size():
  other = dataclasses.replace(SIZES, page_tokens=4)
  with pytest.raises(ValueError, match='page_tokens'):
    Fleet([SIZES, other], POLICIES['random'])
  assert cached(Fleet([SIZES], POLICIES['random']), 0, np.arange(5)) == 0
