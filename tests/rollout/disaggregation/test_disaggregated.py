"""Prefill and decoding apart draw what one engine draws, whatever happens to either."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading

import jax
import numpy as np
import pytest

from m2jax.rollout.disaggregation import handover
from m2jax.rollout.disaggregation.break_even import Rates
from m2jax.rollout.disaggregation.decode_engine import Disaggregated
from m2jax.rollout.disaggregation.handover import HandoverConfig, HandoverError
from m2jax.rollout.disaggregation.prefill_engine import PrefillScheduler
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from tests import processes
from tests.rollout import soak as soak_lib
from tests.rollout.conftest import CFG, ENGINE_CONFIG, RECORDING
from tests.rollout.engine import test_speculative as speculative
from tests.rollout.engine.test_engine import prompt
from tests.rollout.engine.test_speculative import agreeing
from tests.rollout.serving.test_scheduler import (
  TIMEOUT_S,
  Faulty,
  assert_logprobs,
  request,
  run,
  swap_in_flight,
)
from tests.waiting import wait_until

PAGE = RECORDING.page_tokens
HOW = HandoverConfig(local_tokens=PAGE, part_pages=3)


class Held:
  """A prefill engine whose parts arrive when `release` is called."""

  def __init__(self, prefills):
    self._prefills = prefills
    self._arrived = threading.Condition()
    self.parts, self.given_up = [], []
    self.asked, self.cancelled, self.through = 0, 0, False

  def __getattr__(self, name):
    return getattr(self._prefills, name)

  def ask(self, ask, receive):
    self.asked += 1

    def hold(part):
      if self.through:
        return receive(part)
      with self._arrived:
        self.parts.append(functools.partial(receive, part))
        self._arrived.notify()

    cancel = self._prefills.ask(ask, hold)

    def counted():
      self.cancelled += 1
      cancel()

    return counted

  def give_up(self, reason):
    self.given_up.append(reason)

  def wait_for(self, parts):
    with self._arrived:
      assert self._arrived.wait_for(lambda: len(self.parts) >= parts, TIMEOUT_S)

  def release(self, parts=None):
    with self._arrived:
      now, self.parts = self.parts[:parts], self.parts[parts or len(self.parts) :]
    for part in now:
      part()


@pytest.fixture
def apart(recording, variables):
  """apart(**fields): a started Disaggregated and its (wrapped) prefill engine."""
  with contextlib.ExitStack() as stack:

    def start(decode=recording, prefill=recording, how=HOW, wrap=lambda x: x, **fields):
      source = wrap(PrefillScheduler(prefill, variables, part_pages=3))
      config = SchedulerConfig(**{'decode_steps': 4} | fields)
      front = Disaggregated(decode, variables, source, config=config, how=how)
      stack.callback(front.stop)
      return front.start(warmup=False), source

    yield start


def assert_no_page_is_lost(front):
  wait_until(lambda: not front.stats()['active_slots'])
  wait_until(lambda: not front.stats()['prefill_engine_active_slots'])
  stats = front.stats()
  for side in ('', 'prefill_engine_'):
    free = stats[side + 'free_pages'] + stats[side + 'cached_pages']
    assert free == stats[side + 'pages'], side
    assert stats[side + 'queue_length'] == 0


def assert_equal(one, other):
  assert one.tokens.tolist() == other.tokens.tolist()
  np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
  np.testing.assert_array_equal(one.versions, other.versions)
  np.testing.assert_array_equal(one.experts, other.experts)
  assert one.finish_reason == other.finish_reason


def test_tokens_are_those_of_one_engine(serve, apart, recording, reference, variables):
  """With log-probabilities, expert ids, penalties for tokens that were handed over, and
  likeliest tokens; prompts of one token, of whole pages and of all the context."""
  how = dict(repetition_penalty=1.3, top_logprobs=2)
  requests = [
    request(prompt(i, n), max_tokens=7, seed=i, **(how if i % 2 else {}))
    for i, n in enumerate((1, 2, 9, 33, 40, 5, 6, 47))
  ]
  requests += requests[2:5]  # of which all whole pages are there already
  want = run(serve(recording), *requests)
  front, _ = apart()
  for r, a, b in zip(requests, want, run(front, *requests), strict=True):
    assert_equal(a, b)
    if b.top_ids is None:
      assert_logprobs(reference, variables, r.prompt_ids, b)
    else:
      np.testing.assert_array_equal(a.top_ids, b.top_ids)
  stats = front.stats()
  assert stats['handovers'] == 5 and stats['prefills_alone'] == 0
  computed = ('prefix_hit_tokens', 'prefill_tokens', 'handover_tokens')
  assert sum(stats[name] for name in computed) == stats['prompt_tokens'] - len(requests)
  assert_no_page_is_lost(front)


def test_only_missing_pages_are_handed_over(apart, reference, variables):
  """Each engine has a cache of its own: the decode engine asks for what it lacks, and
  the prefill engine computes of that what it lacks."""
  front, _ = apart()
  tokens = prompt(3, 22)
  first = run(front, request(tokens, max_tokens=6))
  before = front.stats()
  assert before['handover_pages'] == 6  # the last of one token
  tokens = [*tokens, *first.tokens.tolist(), *prompt(4, 12)]
  result = run(front, request(tokens, max_tokens=5))
  assert_logprobs(reference, variables, tokens, result)
  stats = front.stats()
  assert stats['prefix_hit_tokens'] == 24  # the drawn ones, too
  assert stats['handover_pages'] - before['handover_pages'] == 10 - 6
  assert stats['prefill_engine_prefix_hit_tokens'] == 20
  run(front, request([*tokens, *prompt(5, 3)], max_tokens=5))  # short: alone
  assert front.stats()['handover_pages'] == stats['handover_pages']
  assert front.stats()['prefill_tokens'] > stats['prefill_tokens']
  assert_no_page_is_lost(front)


def test_a_group_takes_its_prompt_over_once(apart, reference, variables):
  front, source = apart(wrap=Held)
  tokens = prompt(6, 21)
  handles = [front.submit(request(tokens, max_tokens=4, seed=i)) for i in range(6)]
  source.wait_for(2)
  assert source.asked == 1
  source.release()
  source.through = True
  for handle in handles:
    assert_logprobs(reference, variables, tokens, handle.future.result(TIMEOUT_S))
  assert source.asked == 1 and front.stats()['handover_pages'] == 5
  assert_no_page_is_lost(front)


def test_others_decode_while_pages_are_awaited(apart):
  """And requests behind it in the queue are served; nothing is computed meanwhile."""
  front, source = apart(wrap=Held)
  slow = front.submit(request(prompt(6, 21), max_tokens=4))
  source.wait_for(2)
  assert len(run(front, request(prompt(1, 4), max_tokens=9)).tokens) == 9
  calls = front.stats()['decode_calls']
  assert not slow.future.done()
  source.release(1)
  wait_until(lambda: front.stats()['handover_pages'] == 3)
  assert not slow.future.done() and front.stats()['decode_calls'] == calls
  source.release()
  assert len(slow.future.result(TIMEOUT_S).tokens) == 4


def test_retraction_on_the_decode_side(serve, apart, recording, few):
  """Pages run out: sequences go back to the queue, those that await pages, too, and
  draw the same tokens, with the experts of the keys and values that drew them."""
  requests = [request(prompt(i, 9), max_tokens=36, seed=i) for i in range(4)]
  want = run(serve(recording), *requests)
  front, source = apart(decode=few, wrap=Held)
  handles = [front.submit(r) for r in requests[:3]]
  source.wait_for(3)
  source.release()
  last = front.submit(requests[3])  # awaits pages while the others run out of them
  wait_until(lambda: source.cancelled or last.future.done())
  source.through = True
  source.release()
  got = [handle.future.result(TIMEOUT_S) for handle in (*handles, last)]
  stats = front.stats()
  assert stats['retractions'] > 1 and stats['failed'] == 0
  for a, b in zip(want, got, strict=True):
    assert_equal(a, b)
  assert_no_page_is_lost(front)


def test_weights_replaced_in_flight(apart, variables, other_variables, reference):
  """Requests in flight go on; what is submitted afterwards is of the new weights only,
  as it is on one engine."""
  front, _ = apart()
  requests = [request(prompt(i, 14), max_tokens=24) for i in range(4)]
  for r, result in zip(
    requests, swap_in_flight(front, other_variables, requests), strict=True
  ):
    old = int(np.sum(result.versions == 0))
    want = reference.logprobs(variables, r.prompt_ids, result.tokens)
    np.testing.assert_allclose(result.logprobs[:old], want[:old], atol=1e-4)
  fresh = run(front, request(prompt(0, 14)))
  assert set(fresh.versions) == {1}
  assert_logprobs(reference, other_variables, prompt(0, 14), fresh)
  assert front.stats()['prefill_engine_policy_version'] == 1
  assert_no_page_is_lost(front)


def test_pages_of_older_weights_are_computed_again(apart, other_variables, reference):
  """Pages of version 0 arrive when the decode engine has version 1: a response that
  says that it is of version 1 alone saw no other keys."""
  front, source = apart(wrap=Held)
  tokens = prompt(8, 21)
  handle = front.submit(request(tokens, max_tokens=6))
  source.wait_for(2)  # all of version 0
  front.update_weights(other_variables, 1)
  wait_until(lambda: front.stats()['policy_version'] == 1)
  source.release()
  source.through = True
  stale = handle.future.result(TIMEOUT_S)
  assert set(stale.versions) == {1}
  assert_logprobs(reference, other_variables, tokens, stale)
  assert_no_page_is_lost(front)


def test_pages_of_newer_weights_wait_for_them(
  apart, other_variables, reference, variables
):
  """The prefill engine is ahead: nothing is drawn from such pages by older weights."""
  front, source = apart(wrap=Held)
  tokens = prompt(8, 21)
  source.update_weights(other_variables, 1)
  wait_until(lambda: source.stats()['policy_version'] == 1)
  handle = front.submit(request(tokens, max_tokens=6))
  source.wait_for(2)
  source.through = True
  source.release()
  run(front, request(prompt(1, 3)))
  assert not handle.future.done()
  source.update_weights = lambda variables, version: None  # it has them
  front.update_weights(other_variables, 1)
  result = handle.future.result(TIMEOUT_S)
  assert set(result.versions) == {1}
  assert_logprobs(reference, other_variables, tokens, result)
  assert_no_page_is_lost(front)


def test_what_wants_newer_weights_waits_at_the_prefill_engine(
  recording, variables, other_variables
):
  """And holds up nothing else."""
  source = PrefillScheduler(recording, variables, part_pages=3).start(warmup=False)
  try:
    found = {version: [] for version in (0, 1)}
    for version in (1, 0):
      tokens = np.array(prompt(1, 9), np.int32)
      source.ask(handover.Ask(tokens, 0, version), found[version].append)
    wait_until(lambda: found[0])
    assert not found[1] and found[0][0].versions == (0, 0)
    source.update_weights(other_variables, 1)
    wait_until(lambda: found[1])
    assert found[1][0].versions == (1, 1)
    assert np.abs(found[0][0].pages.k - found[1][0].pages.k).max() > 1e-3
  finally:
    source.stop()


@pytest.mark.parametrize('released', [0, 1])
def test_cancellation_frees_the_pages_of_both_sides(apart, released):
  """Before any pages have arrived, and after some."""
  front, source = apart(wrap=Held)
  handles = [front.submit(request(prompt(i, 40))) for i in range(6)]
  source.wait_for(4 * 4)
  source.release(released)
  wait_until(lambda: front.stats()['handover_pages'] == 3 * released)
  for handle in handles:
    handle.cancel()
  for handle in handles:
    assert handle.future.result(TIMEOUT_S).finish_reason == 'cancelled'
  assert source.cancelled == 4
  source.through = True
  source.release()  # what nobody waits for any more
  assert len(run(front, request(prompt(9, 30), max_tokens=3)).tokens) == 3
  assert_no_page_is_lost(front)


class Failing:
  """An engine whose prefill fails so many times."""

  def __init__(self, engine, failures):
    self._engine, self.failures = engine, failures

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def prefill_rows(self, *args):
    if self.failures:
      self.failures -= 1
      raise RuntimeError('out of memory, say')
    return self._engine.prefill_rows(*args)


@pytest.mark.parametrize('failures', [1, 100])
def test_the_decode_engine_prefills_what_the_other_does_not(
  apart, recording, variables, reference, failures
):
  """One failing step, and steps that fail until the prefill engine gives up."""
  front, source = apart(prefill=Failing(recording, failures))
  for i in range(6):
    result = run(front, request(prompt(i, 20 + i), max_tokens=5))
    assert_logprobs(reference, variables, prompt(i, 20 + i), result)
  stats = front.stats()
  assert source.available == (failures == 1)
  assert stats['handovers'] == (5 if failures == 1 else 0)
  assert stats['handover_failures'] == (1 if failures == 1 else 3)
  assert stats['prefills_alone'] == (1 if failures == 1 else 6)
  assert stats['failed'] == 0


def test_a_silent_prefill_engine_is_given_up(apart, reference, variables):
  front, source = apart(wrap=Held, how=dataclasses.replace(HOW, timeout_s=0.2))
  tokens = prompt(2, 30)
  result = run(front, request(tokens, max_tokens=5))
  assert_logprobs(reference, variables, tokens, result)
  stats = front.stats()
  assert stats['handover_timeouts'] == stats['prefills_alone'] == 1
  assert source.cancelled == 1 and source.given_up == ['no pages for 0.2 s']
  source.release()  # too late
  assert run(front, request(prompt(3, 3))).tokens.size == 6
  assert front.stats()['handover_pages'] == 0
  assert_no_page_is_lost(front)


def test_a_stuck_ask_expires_while_others_are_answered(apart, reference, variables):
  """It is prefilled here; the prefill engine, which serves the others, is kept."""

  class Stuck(Held):
    """Loses the first ask's parts."""

    def ask(self, ask, receive):
      first = not self.asked
      self.through = True
      return super().ask(ask, (lambda part: None) if first else receive)

  how = dataclasses.replace(HOW, timeout_s=1.0)
  front, source = apart(wrap=Stuck, how=how)
  tokens = prompt(2, 30)
  stuck = front.submit(request(tokens, max_tokens=5))
  wait_until(lambda: source.asked)
  number = 0
  while not stuck.future.done():
    number += 1
    assert number < 1000
    run(front, request(prompt(100 + number, 20), max_tokens=1))
  assert_logprobs(reference, variables, tokens, stuck.future.result(TIMEOUT_S))
  stats = front.stats()
  assert stats['handover_timeouts'] == stats['prefills_alone'] == source.cancelled == 1
  assert stats['handovers'] == number > 1 and not source.given_up
  assert_no_page_is_lost(front)


def test_early_pages_hold_up_no_other_ask(apart, other_variables):
  """Of two asks one is answered by newer weights: the other is served at once."""
  front, source = apart(wrap=Held)
  old = front.submit(request(prompt(8, 21), max_tokens=3))
  source.wait_for(2)
  source.update_weights(other_variables, 1)
  wait_until(lambda: source.stats()['policy_version'] == 1)
  new = front.submit(request(prompt(9, 21), max_tokens=3))
  source.wait_for(4)
  source.parts = source.parts[2:] + source.parts[:2]
  source.release()
  assert set(old.future.result(TIMEOUT_S).versions) == {0}
  assert not new.future.done()
  source.update_weights = lambda variables, version: None  # it has them
  front.update_weights(other_variables, 1)
  assert set(new.future.result(TIMEOUT_S).versions) == {1}
  assert front.stats()['handovers'] == 2 and front.stats()['prefills_alone'] == 0
  assert_no_page_is_lost(front)


def test_bad_weights_of_the_prefill_engine_fail_by_version(apart, variables):
  """As on one engine, and both serve again when the weights are good."""
  front, source = apart()
  nan = jax.tree.map(lambda x: np.full_like(x, np.nan), variables)
  front.update_weights(nan, 5)
  handle = front.submit(request(prompt(1, 22)))
  with pytest.raises(RuntimeError, match='version 5 give non-finite logits'):
    handle.future.result(TIMEOUT_S)
  assert front.stats()['handover_failures'] == 1
  front.update_weights(variables, 6)
  assert len(run(front, request(prompt(1, 22))).tokens) == 6
  assert front.stats()['handovers'] == 1 and source.available
  assert_no_page_is_lost(front)


def test_a_failing_decode_step_cancels_what_was_asked(apart, recording):
  front, source = apart(decode=Faulty(recording, 1), wrap=Held)
  waits = front.submit(request(prompt(1, 30)))
  source.wait_for(3)
  fails = front.submit(request(prompt(2, 3)))
  for handle in (waits, fails):
    with pytest.raises(RuntimeError, match='out of memory, say'):
      handle.future.result(TIMEOUT_S)
  assert source.cancelled == 1
  source.through = True
  source.release()
  assert len(run(front, request(prompt(1, 30))).tokens) == 6
  assert_no_page_is_lost(front)


UNFIT = {
  'after': lambda part: dict(first_page=part.first_page + 1),
  'before': lambda part: dict(first_page=part.first_page - 1),
  'too far': lambda part: dict(held=part.held + 4),
  'nothing': lambda part: dict(held=part.first_page * PAGE),
  'incomplete': lambda part: dict(held=part.held - 1),
  'fewer': lambda part: dict(pages=handover.first(part.pages, part.num_pages - 1)),
  'more': lambda part: dict(pages=handover.pad(part.pages, part.num_pages + 1)),
  'others': lambda part: dict(
    pages=part.pages._replace(tokens=part.pages.tokens[::-1])
  ),
}


@pytest.mark.parametrize('how', UNFIT)
def test_a_part_that_does_not_fit_is_not_stored(apart, reference, variables, how):
  """Such as of a prefill process of another kind: nothing of it is used."""

  class Spoiled(Held):
    def ask(self, ask, receive):
      self.through = True

      def spoil(part):
        if part.first_page == 5:
          part = dataclasses.replace(part, **UNFIT[how](part))
        receive(part)

      return super().ask(ask, spoil)

  front, source = apart(wrap=Spoiled)
  tokens = prompt(4, 40)
  run(front, request(tokens[:9]))
  result = run(front, request(tokens, max_tokens=4))
  assert_logprobs(reference, variables, tokens, result)
  stats = front.stats()
  assert stats['handover_failures'] == source.cancelled == 1
  assert stats['handover_pages'] == 2 + 3
  assert_no_page_is_lost(front)


def test_sizes_must_fit(recording, variables):
  """Before anything starts, and by name."""
  off = Engine(CFG, ENGINE_CONFIG)
  source = PrefillScheduler(off, variables, part_pages=3)
  with pytest.raises(ValueError, match='record_experts=False of the prefill engine'):
    Disaggregated(recording, variables, source, how=HOW)
  source = PrefillScheduler(recording, variables, part_pages=4)
  with pytest.raises(ValueError, match='part_pages=4.*at most.*3'):
    Disaggregated(recording, variables, source, how=HOW)
  with pytest.raises(ValueError, match='HandoverConfig.timeout_s=0'):
    HandoverConfig(timeout_s=0)
  with pytest.raises(ValueError, match='reuse_stale_prefix=True'):
    stale = SchedulerConfig(decode_steps=1, reuse_stale_prefix=True)
    PrefillScheduler(recording, variables, config=stale)
  with pytest.raises(ValueError, match='first_page=2 of 9 tokens'):
    ask = handover.Ask(np.zeros(9, np.int32), 2, 0)
    source.ask(ask, lambda part: None)
  source.stop()
  with pytest.raises(HandoverError, match='not running: it was stopped'):
    source.ask(dataclasses.replace(ask, first_page=0), lambda part: None)


def test_nothing_compiles_after_warmup(recording, variables, reference):
  """Times are measured in the warm-up, which leaves no trace."""
  source = PrefillScheduler(recording, variables, part_pages=3)
  how = dataclasses.replace(HOW, local_tokens=None)
  config = SchedulerConfig(decode_steps=4)
  front = Disaggregated(recording, variables, source, config=config, how=how).start()
  try:
    programs = recording.compilations()
    assert front.stats()['local_tokens'] in (0, 8, 32)
    for i, n in enumerate((3, 9, 14, 30, 47)):
      tokens = prompt(i, n)
      assert_logprobs(reference, variables, tokens, run(front, request(tokens, 1)))
    assert front.stats()['handovers'] >= 1
    assert recording.compilations() == programs
  finally:
    front.stop()


def test_break_even():
  """By hand: a prefill call may take as long as writing and one decode call."""
  rates = Rates({8: 1.0, 32: 2.5, 64: 9.0}, 1.0, 0.5, part_pages=2, page_tokens=4)
  assert rates.write_s(8) == 0.5 and rates.write_s(32) == 2.0
  assert rates.local_tokens() == 32
  assert dataclasses.replace(rates, decode_s=0.4).local_tokens() == 0
  assert dataclasses.replace(rates, part_s=1.0).local_tokens() == 64
  with pytest.raises(ValueError, match='HandoverConfig.local_tokens=-1'):
    HandoverConfig(local_tokens=-1)


def soak(requests, seed, engine, host_cache_bytes=0, replace_s=0.5):
  def make(engine, variables, *, config):
    config = dataclasses.replace(config, host_cache_bytes=host_cache_bytes)
    source = PrefillScheduler(engine, variables, config=config, part_pages=3)
    return Disaggregated(engine, variables, source, config=config, how=HOW)

  found = soak_lib.soak(
    requests, seed, engine=engine, make=make, replace_s=replace_s, replace_after=30
  )
  pages = found['prefill_engine_free_pages'] + found['prefill_engine_cached_pages']
  assert pages == found['prefill_engine_pages'] == 18 and found['prefills_alone'] == 0
  assert found['cancelled'] and found['weight_updates'] and found['handovers']
  return found


def test_soak(few):
  """Random requests, cancellations, retractions and swaps of weights, with pages that
  leave the device caches of both engines and come back."""
  found = soak(60, 0, few, host_cache_bytes=2**17, replace_s=0.0)
  assert found['checked'] > 10
  assert found['host_hit_tokens'] and found['prefill_engine_host_hit_tokens']


@pytest.mark.thorough  # minutes; the fast tests have a short one
def test_long_soak(few_of_all_shapes):
  assert soak(800, 1, few_of_all_shapes)['checked'] > 150


@pytest.mark.long
def test_pages_with_modules(serve):
  """Drafts of MTP modules: their keys, values and states are handed over, too."""
  engine, variables = Engine(speculative.CFG, speculative.CONFIG), agreeing(0, 0.3)
  how = dataclasses.replace(HOW, local_tokens=0)
  requests = [request(prompt(i, 9 + 4 * i), 12, seed=i) for i in range(6)]
  want = run(serve(engine, variables, draft_tokens=2), *requests)
  config = SchedulerConfig(decode_steps=4, draft_tokens=2)
  source = PrefillScheduler(engine, variables, part_pages=3)
  front = Disaggregated(engine, variables, source, config=config, how=how)
  front.start(warmup=False)
  try:
    for a, b in zip(want, run(front, *requests), strict=True):
      assert_equal(a, b)
    stats = front.stats()
    assert stats['handovers'] >= 6 and stats['prefills_alone'] == 0  # retracted, too
    assert stats['accepted_tokens'] > 0
    assert_no_page_is_lost(front)
  finally:
    front.stop()


@pytest.mark.long
def test_meshes_of_other_devices():
  """Prefill over two devices by heads, decoding over four others by experts and rows,
  in two groups: pages are resharded, and all is as on one device."""
  child = processes.start('tests.rollout.disaggregated_mesh_worker')
  ((out, err),) = processes.finish([child], 300)
  assert out, err[-3000:]
  found = json.loads(out.splitlines()[-1])
  assert found['tokens'] and found['versions'] and found['experts']
  assert found['worst'] < 1e-5 and not found['compiled']
  assert found['stats']['handovers'] >= 4 and not found['stats']['prefills_alone']
