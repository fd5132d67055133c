"""Host memory and the pool behind the device cache: less is computed, nothing changes.

On an engine of 18 pages, which cannot keep two conversations.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from m2jax.rollout.api import EngineError
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.rollout.tiers import tiers
from m2jax.rollout.tiers.config import KvPoolConfig
from m2jax.rollout.tiers.page_layout import Layout
from tests.rollout import soak as soak_lib
from tests.rollout.conftest import FEW
from tests.rollout.engine.test_engine import prompt
from tests.rollout.serving.test_scheduler import assert_logprobs, request, run
from tests.waiting import wait_until

PAGE = FEW.page_tokens
HOST_BYTES = 1 << 20
PROMPTS = [prompt(20 + i, 21) for i in range(5)]


def pool(directory, **fields) -> KvPoolConfig:
  """Waits as long as it takes: tests must not depend on the machine's load."""
  fields = dict(bytes=1 << 22, wait_s=60.0) | fields
  return KvPoolConfig(f'file://{directory}/', **fields)


def turns(scheduler, prompts=PROMPTS, rounds=2, temperature=1.0):
  """Conversations whose turns alternate: (prompt, result) of each turn."""
  found, histories = [], [list(p) for p in prompts]
  for number in range(rounds):
    for i, history in enumerate(histories):
      asked = request(history, max_tokens=6, seed=i, temperature=temperature)
      result = run(scheduler, asked)
      found.append((list(history), result))
      history += [*result.tokens.tolist(), *prompt(40 + i + 10 * number, 3)]
  return found


def assert_same(got, want):
  for (tokens, a), (others, b) in zip(got, want, strict=True):
    assert tokens == others and a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
    np.testing.assert_array_equal(a.experts, b.experts)
    np.testing.assert_array_equal(a.versions, b.versions)


def assert_settled(scheduler):
  """All pages are free or cached, and none is on its way; returns the last counts."""
  deadline = time.monotonic() + 60
  busy = lambda stats: stats['active_slots'] or stats.get('moving_pages')
  while busy(scheduler.stats()) and time.monotonic() < deadline:
    time.sleep(0.005)  # the last future resolves before its slot is free
  scheduler.stop()
  stats = scheduler.stats()
  assert not busy(stats) and not stats['failed'] and not stats.get('pool_queued_pages')
  assert stats['free_pages'] + stats['cached_pages'] == stats['pages']
  return stats


@pytest.fixture(scope='module')
def plain(few, variables):
  """What the turns are without more memory, and the prompt tokens computed for it."""
  config = SchedulerConfig(decode_steps=4)
  scheduler = Scheduler(few, variables, config=config).start(warmup=False)
  found = turns(scheduler)
  stats = assert_settled(scheduler)
  return found, stats['prefill_tokens']


def test_evicted_pages_come_back_from_host_memory(
  serve, few, variables, reference, plain
):
  want, computed = plain
  scheduler = serve(few, host_cache_bytes=HOST_BYTES)
  got = turns(scheduler)
  stats = assert_settled(scheduler)
  assert_same(got, want)
  for tokens, result in got:
    assert_logprobs(reference, variables, tokens, result)
  # Each second turn finds the whole pages of the first: prompt and response but the
  # last token, (21 + 6 - 1) // 4 pages.
  found = stats['prefix_hit_tokens']
  assert found == len(PROMPTS) * 24 and 0 < stats['host_hit_tokens'] <= found
  assert stats['prefill_tokens'] == stats['prompt_tokens'] - found - len(got)
  assert stats['prefill_tokens'] < computed
  assert stats['host_pages'] > 18 and stats['host_evicted_pages'] == 0


def test_another_engine_finds_pages_in_the_pool(
  serve, few, variables, reference, plain, tmp_path
):
  want, _ = plain
  first = serve(few, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path))
  assert_same(turns(first), want)
  written = assert_settled(first)
  assert written['pool_written_pages'] == written['pool_pages'] > 5 * 6
  second = serve(few, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path))
  assert_same(turns(second), want)
  stats = assert_settled(second)
  # Also the first turns: (21 - 1) // 4 pages; the second ones as many as before, and
  # the tokens after them were not known to be a prompt.
  assert stats['prefix_hit_tokens'] == len(PROMPTS) * (20 + 24 + 4)
  assert stats['pool_hit_tokens'] > 0 and stats['late_reads'] == 0
  assert stats['pool_corrupt_pages'] == stats['pool_errors'] == 0


def test_pages_of_older_weights_are_not_found(
  serve, few, variables, other_variables, reference, tmp_path
):
  """Neither in host memory nor in the pool, where they stay for those weights."""
  scheduler = serve(few, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path))
  turns(scheduler, rounds=1)
  scheduler.update_weights(other_variables, 1)
  for tokens, result in turns(scheduler, rounds=1):
    assert_logprobs(reference, other_variables, tokens, result)
    assert set(result.versions.tolist()) == {1}
  stats = assert_settled(scheduler)
  assert stats['prefix_hit_tokens'] == stats['pool_hit_pages'] == 0
  # Another run whose weights have the same version, but other bits.
  other = serve(
    few, other_variables, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path)
  )
  for tokens, result in turns(other, rounds=1):
    assert_logprobs(reference, other_variables, tokens, result)
  assert assert_settled(other)['pool_hit_pages'] == 0


def test_stale_pages_come_back_from_host_memory_if_asked_for(
  serve, few, other_variables
):
  scheduler = serve(few, host_cache_bytes=HOST_BYTES, reuse_stale_prefix=True)
  turns(scheduler, rounds=1)
  scheduler.update_weights(other_variables, 1)
  turns(scheduler, rounds=1)
  stats = assert_settled(scheduler)
  assert stats['host_hit_tokens'] > 0
  assert stats['prefix_hit_tokens'] == len(PROMPTS) * 20


def test_a_failed_copy_loses_no_request(serve, few, plain):
  """That of the request fails it; those that wait, for its prefix too, are served."""
  want, _ = plain
  scheduler = serve(few, run=False, host_cache_bytes=HOST_BYTES)
  tiers_, failures = scheduler._batcher.tiers, [RuntimeError('no memory, say')]
  restore = tiers_.restore

  def fails_once(state, job):
    if failures:
      raise failures.pop()
    return restore(state, job)

  tiers_.restore = fails_once
  asked = [request(p, max_tokens=6, seed=i) for i, p in enumerate(PROMPTS)]
  handles = [scheduler.submit(made) for made in (asked[0], *asked)]
  scheduler.start(warmup=False)
  with pytest.raises(EngineError, match='no memory, say'):
    handles[0].future.result(60)
  for handle, (_, result) in zip(handles[1:], want, strict=False):
    assert handle.future.result(60).tokens.tolist() == result.tokens.tolist()


def test_damaged_pages_are_computed(serve, few, variables, plain, tmp_path):
  want, _ = plain
  first = serve(few, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path))
  turns(first)
  written = assert_settled(first)['pool_written_pages']
  for i, path in enumerate(sorted(tmp_path.glob('*/*.page'))):
    if i % 3 == 0:
      path.write_bytes(path.read_bytes()[:-1])
    elif i % 3 == 1:
      path.unlink()
  second = serve(few, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path))
  assert_same(turns(second), want)
  stats = assert_settled(second)
  assert stats['pool_corrupt_pages'] > 0 and stats['pool_miss_pages'] > 0
  assert stats['pool_pages'] >= written * 2 // 3 and stats['pool_errors'] == 0


def test_host_memory_is_bounded(serve, few, plain):
  """Four pages: most is computed again, and nothing is wrong."""
  want, _ = plain
  page = Layout.of(few.state_shapes().pages).page_bytes
  scheduler = serve(few, host_cache_bytes=5 * page - 1)
  assert_same(turns(scheduler), want)
  stats = assert_settled(scheduler)
  assert stats['host_bytes'] == 4 * page and stats['host_evicted_pages'] > 20


def test_a_read_that_takes_too_long_is_not_waited_for(serve, few, plain, tmp_path):
  want, _ = plain
  scheduler = serve(
    few, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path, wait_s=0.0), run=False
  )
  tiers, go = scheduler._batcher.tiers, threading.Event()
  read = tiers.pool._read
  tiers.pool._read = lambda keys: (go.wait(60), read(keys))[1]
  scheduler.start(warmup=False)
  assert_same(turns(scheduler, rounds=1), want[: len(PROMPTS)])
  assert scheduler.stats()['late_reads'] == len(PROMPTS)
  go.set()
  assert assert_settled(scheduler)['moving_pages'] == 0


def test_cancelled_while_its_pages_are_read(serve, few, variables, plain, tmp_path):
  """It ends at once; its read ends by itself, and a weight swap drops the rest."""
  scheduler = serve(few, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path), run=False)
  tiers, go = scheduler._batcher.tiers, threading.Event()
  read = tiers.pool._read
  tiers.pool._read = lambda keys: (go.wait(60), read(keys))[1]
  scheduler.start(warmup=False)
  first, second = (
    scheduler.submit(request(p, seed=i)) for i, p in enumerate(PROMPTS[:2])
  )
  first.cancel()
  assert first.future.result(60).finish_reason == 'cancelled'
  assert not second.future.done()
  scheduler.update_weights(variables, 1)
  deadline = time.monotonic() + 60
  while scheduler.stats()['policy_version'] == 0 and time.monotonic() < deadline:
    time.sleep(0.005)
  go.set()
  assert second.future.result(60).versions.tolist() == [1] * 6
  assert_settled(scheduler)


def test_retracted_sequences_continue_from_host_memory(serve, few, variables):
  """With the tokens that they draw without more memory."""
  asked = [request(prompt(i, 7), max_tokens=36, seed=i) for i in range(4)]
  want = run(serve(few), *asked)
  scheduler = serve(few, host_cache_bytes=HOST_BYTES)
  got = run(scheduler, *asked)
  stats = assert_settled(scheduler)
  assert stats['retractions'] > 2 and stats['host_hit_tokens'] > 0
  for a, b in zip(want, got, strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_copies_are_compiled_by_the_warmup(few, variables):
  """Blocks of at most 32 pages, however long a prefix is."""
  config = SchedulerConfig(decode_steps=4, host_cache_bytes=HOST_BYTES)
  scheduler = Scheduler(few, variables, config=config).start()
  calls = few.read_pages, few.write_pages
  compiled = [call._cache_size() for call in calls]
  turns(scheduler)
  assert assert_settled(scheduler)['host_hit_tokens'] > 0
  assert [call._cache_size() for call in calls] == compiled


def test_pages_are_moving_until_they_are_stored(serve, few, tmp_path, monkeypatch):
  """Who waits for `moving_pages` of 0 finds them in the next memory."""
  more = dict(host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path))
  scheduler, moving = serve(few, **more), []
  tiers = scheduler._batcher.tiers
  put = tiers.host.put

  def watched(pages, **how):
    if not how:  # from the device
      moving.append(tiers.stats()['moving_pages'] >= len(pages))
    return put(pages, **how)

  monkeypatch.setattr(tiers.host, 'put', watched)
  run(scheduler, request(PROMPTS[0]))
  assert assert_settled(scheduler)['host_pages'] > 0
  assert moving and all(moving)


def test_pages_that_are_not_finite_go_nowhere(serve, few, variables, tmp_path):
  """Weights with NaN fail their requests, and leave nothing that others could find."""
  head = variables['params']['head']
  broken = {**variables, 'params': {**variables['params'], 'head': head * np.nan}}
  embed = variables['params']['embed']
  broken['params']['embed'] = embed * np.nan
  scheduler = serve(few, broken, host_cache_bytes=HOST_BYTES, kv_pool=pool(tmp_path))
  handle = scheduler.submit(request(PROMPTS[0]))
  with pytest.raises(EngineError, match='version 0 give non-finite'):
    handle.future.result(60)
  deadline = time.monotonic() + 20  # requests fail before the new state is made
  while (left := scheduler.stats()['host_pages']) and time.monotonic() < deadline:
    time.sleep(0.005)
  assert left == 0
  scheduler.update_weights(variables, 1)
  assert run(scheduler, request(PROMPTS[1])).versions.tolist() == [1] * 6
  pages = (len(PROMPTS[1]) + 6 - 1) // PAGE  # the last one leaves after the request
  wait_until(lambda: scheduler.stats()['pool_written_pages'] >= pages)
  stats = scheduler.stats()
  assert stats['pool_dropped_pages'] <= 5  # those that were copied before the failure
  assert stats['pool_written_pages'] == stats['host_pages'] == pages


class Distributed:
  """An engine of several processes."""

  moves_pages = False


@pytest.mark.parametrize(
  'fields, match',
  [
    (dict(host_cache_bytes=100), 'SchedulerConfig.host_cache_bytes=100.* 544'),
    (dict(host_cache_bytes=-1), 'SchedulerConfig.host_cache_bytes=-1'),
    (dict(kv_pool=KvPoolConfig('memory://a/')), 'SchedulerConfig.host_cache_bytes=0'),
    (
      dict(
        host_cache_bytes=HOST_BYTES,
        kv_pool=KvPoolConfig('memory://a/'),
        reuse_stale_prefix=True,
      ),
      'SchedulerConfig.reuse_stale_prefix',
    ),
  ],
)
def test_bad_settings_are_named(few, variables, fields, match):
  with pytest.raises(ValueError, match=match):
    Scheduler(few, variables, config=SchedulerConfig(decode_steps=4, **fields))


def test_several_processes_are_named():
  with pytest.raises(ValueError, match='SchedulerConfig.host_cache_bytes=5.*processes'):
    tiers.create(Distributed(), SchedulerConfig(host_cache_bytes=5))


def test_soak_of_all_memories(few):
  """Two engines on one pool that is being damaged: no page is lost in any memory, and
  no token is of other weights than its version says."""
  found = soak_lib.soak(80, replicas=2, engine=few)
  assert found['checked'] > 20 and found['cancelled']
  assert found['host_hit_tokens'] > 0 and found['pool_written_pages'] > 0


@pytest.mark.thorough  # minutes; the fast tests have a short one
def test_long_soak_of_all_memories(few):
  """For minutes; `python -m tests.rollout.soak 20000 0 2` runs 20,000 requests."""
  found = soak_lib.soak(1500, seed=1, replicas=2, engine=few)
  assert found['checked'] > 500 and found['pool_hit_tokens'] > 0
  assert found['retractions'] > 0 and found['weight_updates'] > 5
  assert found['pool_evicted_pages'] > 0 and not found['pool_errors']
