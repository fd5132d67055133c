"""Decode calls made before the tokens of the one before are read: the same responses,
whatever happens to requests while such a call is in work."""

from __future__ import annotations

import queue
import threading

import numpy as np
import pytest

from m2jax.rollout.api import EngineError
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from tests.rollout.conftest import init
from tests.rollout.engine.test_engine import prompt
from tests.rollout.serving.test_scheduler import TIMEOUT_S, request, run


class Watched:
  """Notes when decode calls are made, and lets the test do things between them.

  Attributes:
    made: decode calls so far.
    before: by number of a call, what is done before it is made.
  """

  def __init__(self, engine):
    self._engine, self.made, self.before = engine, 0, {}

  def __getattr__(self, name):
    found = getattr(self._engine, name)
    if name not in ('generate_kept', 'generate_many'):
      return found

    def call(*args):
      self.made += 1
      self.before.pop(self.made, lambda: None)()
      return found(*args)

    return call


@pytest.fixture
def serve_watched(engine, variables):
  started = []

  def start(watched=None, run=True, **config):
    config = SchedulerConfig(decode_steps=2, **config)
    scheduler = Scheduler(watched or Watched(engine), variables, config=config)
    started.append(scheduler)
    return scheduler.start(warmup=False) if run else scheduler

  yield start
  for scheduler in started:
    scheduler.stop()


def test_the_next_call_is_made_before_the_last_one_is_read(engine, serve_watched):
  """When the tokens of call n are given out, call n + 1 has been made; not after the
  last ones, in which the request is sure to end."""
  watched, made = Watched(engine), []
  scheduler = serve_watched(watched)
  note = lambda _: made.append(watched.made)
  handle = scheduler.submit(request(prompt(0, 5), max_tokens=9), note)
  assert len(handle.future.result(TIMEOUT_S).tokens) == 9
  assert made == [2, 3, 4, 5, 5]
  stats = scheduler.stats()
  assert (stats['decode_calls'], stats['ahead_calls']) == (5, 4)


@pytest.mark.parametrize('seed', range(4))
def test_same_responses(serve_watched, seed):
  """Requests of any length that arrive at any time, end at stop tokens, and share few
  slots: token by token what they are when each call is read before the next."""
  rng = np.random.default_rng(seed)
  requests = [
    request(
      prompt(100 + i, int(rng.integers(1, 20))),
      max_tokens=int(rng.integers(1, 24)),
      stop_ids=tuple(rng.integers(61, size=2).tolist()),
      seed=i,
    )
    for i in range(16)
  ]
  found = []
  for look_ahead in (True, False):
    scheduler = serve_watched(look_ahead=look_ahead)
    results: queue.SimpleQueue = queue.SimpleQueue()
    # A request in the callback of another one: it arrives in the midst of calls.
    late = iter(requests[8:])

    def arrive(_, late=late, scheduler=scheduler, results=results):
      if (r := next(late, None)) is not None:
        results.put((r, scheduler.submit(r, None)))

    for r in requests[:8]:
      results.put((r, scheduler.submit(r, arrive)))
    one = {}
    while len(one) < 16:
      r, handle = results.get(timeout=TIMEOUT_S)
      one[r.sampling.seed] = handle.future.result(TIMEOUT_S)
    found.append(one)
  for seed_, result in found[0].items():
    assert result.tokens.tolist() == found[1][seed_].tokens.tolist()
    assert result.finish_reason == found[1][seed_].finish_reason
    np.testing.assert_allclose(result.logprobs, found[1][seed_].logprobs, atol=1e-5)


def test_a_cancelled_request_keeps_what_was_drawn(engine, serve_watched):
  """Cancelled while a call is in work: its tokens are of the same stream, another
  request goes on, and no page is lost."""
  watched = Watched(engine)
  scheduler = serve_watched(watched)
  want = run(scheduler, request(prompt(0, 5), max_tokens=30, seed=1))
  made, cancelled = threading.Event(), threading.Event()

  def hold(_):  # the next call has been made
    made.set()
    cancelled.wait(TIMEOUT_S)

  handle = scheduler.submit(request(prompt(0, 5), max_tokens=30, seed=1), hold)
  other = scheduler.submit(request(prompt(1, 5), max_tokens=30, seed=2))
  assert made.wait(TIMEOUT_S)
  handle.cancel()
  cancelled.set()
  result = handle.future.result(TIMEOUT_S)
  assert result.finish_reason == 'cancelled'
  assert result.tokens.tolist() == want.tokens[: len(result.tokens)].tolist()
  assert len(other.future.result(TIMEOUT_S).tokens) == 30
  again = run(scheduler, request(prompt(0, 5), max_tokens=30, seed=1))
  assert again.tokens.tolist() == want.tokens.tolist()
  stats = scheduler.stats()
  assert stats['free_pages'] + stats['cached_pages'] == stats['pages']


def test_tokens_have_the_version_that_drew_them(engine, serve_watched, variables):
  """New weights that arrive while a call is in work: it is read as of the old ones, and
  the next one is of the new ones."""
  scheduler = serve_watched(Watched(engine))
  swapped, newer = threading.Event(), init(7)

  def swap(_):
    if not swapped.is_set():
      swapped.set()
      scheduler.update_weights(newer, 1)  # the next call has been made

  handle = scheduler.submit(request(prompt(0, 5), max_tokens=40, temperature=0.0), swap)
  result = handle.future.result(TIMEOUT_S)
  versions = result.versions.tolist()
  assert versions == sorted(versions) and set(versions) == {0, 1}
  assert versions.count(0) % 2 == 0  # whole calls


def test_a_call_that_fails_ahead_fails_the_running_requests(engine, serve_watched):
  """And the next ones are served."""

  def fail():
    raise RuntimeError('the device is gone')

  watched = Watched(engine)
  scheduler = serve_watched(watched)
  watched.before[3] = fail
  with pytest.raises(EngineError, match='the device is gone'):
    run(scheduler, request(prompt(0, 5), max_tokens=20))
  assert len(run(scheduler, request(prompt(0, 5), max_tokens=20)).tokens) == 20


def test_no_sequence_is_retracted_for_a_call_made_ahead(few, serve_watched):
  """Where pages are left for one more call, but not for two."""
  watched = Watched(few)
  scheduler = serve_watched(watched, run=False)
  asked = [request(prompt(i, 12), max_tokens=22, seed=i) for i in range(2)]
  handles = [scheduler.submit(r) for r in asked]  # both before the first call
  scheduler.start(warmup=False)
  results = [handle.future.result(TIMEOUT_S) for handle in handles]
  assert [len(r.tokens) for r in results] == [22] * 2
  stats = scheduler.stats()
  assert stats['retractions'] == 0 and stats['peak_pages'] == stats['pages']
