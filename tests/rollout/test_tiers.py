"""Host memory and the pool behind the device cache: less is computed, nothing changes.

On an engine of 18 pages, which cannot keep two conversations.
"""

from __future__ import annotations

import dataclasses
import time

import jax
import numpy as np
import pytest

from m2jax.rollout import tiers
from m2jax.rollout.kv_pool.config import KvPoolConfig
from m2jax.rollout.page_layout import Layout
from m2jax.rollout.scheduler import Scheduler, SchedulerConfig
from tests.rollout.conftest import FEW
from tests.rollout.test_engine import prompt
from tests.rollout.test_scheduler import assert_logprobs, request, run

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
