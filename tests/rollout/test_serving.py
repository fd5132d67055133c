"""What serves requests keeps one contract, whatever is behind it (`api.Serving`)."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest

from m2jax import rollout
from m2jax.forge.config import EngineServerConfig, RemoteConfig
from m2jax.forge.remote import engine_client, engine_server
from m2jax.rollout.api import EngineError, PageEvent, PromptTooLong, Serving
from tests.rollout.conftest import CFG, CONTEXT, RECORDING
from tests.rollout.engine.test_engine import prompt
from tests.rollout.serving.test_scheduler import TIMEOUT_S, assert_logprobs, request
from tests.waiting import wait_until

HOW = rollout.HandoverConfig(local_tokens=4, part_pages=3)
REMOTE = RemoteConfig(poll_s=0.02)
PROMPT = prompt(5, 14)


@pytest.fixture(params=['one', 'apart', 'replicas', 'remote'])
def serving(request, engine, variables):
  """Each implementation over one engine, with the weights of version 0."""
  config = rollout.SchedulerConfig(decode_steps=4)
  one = rollout.Scheduler(engine, variables, config=config)
  with contextlib.ExitStack() as stack:
    stack.callback(one.stop)
    if request.param == 'apart':
      prefills = rollout.PrefillScheduler(engine, variables, part_pages=HOW.part_pages)
      made = rollout.Disaggregated(engine, variables, prefills, 0, config, HOW)
      made.start(warmup=False)
    else:
      made = one.start(warmup=False)
    if request.param == 'replicas':
      made = rollout.Router([one], config=rollout.RouterConfig(observe_s=0.02)).start()
    if request.param == 'remote':
      settings = EngineServerConfig()
      server = stack.enter_context(engine_server.EngineServer(settings, one))
      made = engine_client.RemoteScheduler(
        server.url, CFG.vocab_size, RECORDING, config=REMOTE
      ).start()
    stack.callback(made.stop)
    wait_until(lambda: made.alive)
    yield made


def test_it_is_declared(serving):
  """Callers name the protocol; every implementation names it, too."""
  assert Serving in type(serving).__mro__
  assert serving.context_tokens == CONTEXT
  assert serving.stopped_reason is None


def test_a_request_gets_the_policys_tokens(serving, variables, reference):
  """And hears of each token once, in order, before the result."""
  heard = []
  handle = serving.submit(request(PROMPT, max_tokens=9, temperature=0), heard.extend)
  result = handle.future.result(TIMEOUT_S)
  assert result.tokens.tolist() == heard == reference.greedy(variables, PROMPT, 9)
  assert (result.finish_reason, set(result.versions.tolist())) == ('length', {0})
  assert_logprobs(reference, variables, PROMPT, result)
  assert result.experts.shape[0] == len(PROMPT) + 9


def test_a_bad_request_is_refused_at_once(serving):
  """By the field, in the thread of the caller."""
  with pytest.raises(PromptTooLong):
    serving.submit(request(np.ones(CONTEXT, np.int32)))
  with pytest.raises(ValueError, match=r'sampling\.top_p'):
    serving.submit(request(PROMPT, top_p=0.0))


def test_a_cancelled_request_has_the_tokens_so_far(serving, variables, reference):
  """Unless it ended before."""
  handle = serving.submit(request(PROMPT, max_tokens=30, temperature=0))
  handle.cancel()
  result = handle.future.result(TIMEOUT_S)
  assert result.finish_reason in ('cancelled', 'length')
  whole = reference.greedy(variables, PROMPT, 30)
  assert result.tokens.tolist() == whole[: len(result.tokens)]
  assert len(result.tokens) == 30 or result.finish_reason == 'cancelled'
  handle.cancel()  # no effect


def test_new_weights_have_a_newer_version(serving, other_variables, reference):
  """One that reads them where they are published says so."""
  if isinstance(serving, engine_client.RemoteScheduler):
    with pytest.raises(EngineError, match='published'):
      serving.update_weights(other_variables, 1)
    return
  serving.update_weights(other_variables, 1)
  wait_until(lambda: serving.stats()['policy_version'] == 1)
  handle = serving.submit(request(PROMPT, max_tokens=5, temperature=0))
  result = handle.future.result(TIMEOUT_S)
  assert set(result.versions.tolist()) == {1}
  assert result.tokens.tolist() == reference.greedy(other_variables, PROMPT, 5)
  with pytest.raises(ValueError, match='version=1'):
    serving.update_weights(other_variables, 1)


def test_statistics_and_pages(serving):
  """What a gateway and a router read; only a router has no pages of its own."""
  serving.page_events()  # from now on changes are kept
  events, pages = [], not isinstance(serving, rollout.Router)
  for i in range(8):
    new = prompt(40 + i, 14)
    serving.submit(request(new, max_tokens=2)).future.result(TIMEOUT_S)
    events.extend(serving.page_events())
  wait_until(lambda: events.extend(serving.page_events()) or events or not pages)
  assert bool(events) == pages
  assert all(isinstance(event, PageEvent) for event in events)
  wait_until(lambda: serving.stats()['completions'] >= 8)
  stats = serving.stats()
  assert stats['slots'] == RECORDING.slots
  assert stats['queue_length'] == 0 <= stats['active_slots']
  assert stats['policy_version'] == 0 < stats['tokens_per_s']


def test_after_its_end_it_serves_nothing(serving):
  """And says why."""
  serving.stop()
  assert not serving.alive
  assert serving.stopped_reason == 'it was stopped'
  with pytest.raises(EngineError, match='not running|stopped'):
    serving.submit(request(PROMPT))
  serving.stop()  # no effect


def test_the_front_has_every_public_name():
  """`rollout.NAME`, wherever it is defined."""
  for name in rollout.__all__:
    assert getattr(rollout, name).__name__ == name
  assert set(rollout.__all__) <= set(dir(rollout))
  with pytest.raises(AttributeError, match='engines'):
    _ = rollout.engines


def test_records_of_a_request_need_no_jax():
  """A process that only submits requests imports `api` in a moment."""
  code = "import sys, m2jax.rollout.api; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, '-c', code]).returncode == 0
