"""Thousands of requests with all that can happen to them, on few pages.

  python -m tests.rollout.soak [REQUESTS] [SEED] [REPLICAS]

Random prompts that share prefixes, some longer than the pages that are left, seeds,
cancellations, and weights that are replaced all the time. In the end every page must be
free or cached. Prints one line.

Each token's log-probability must be that of its version's weights over keys and values
that the weights made which the engine had when it computed them. When a request gets a
slot, all of its tokens so far are prefilled, or found in a cache of that version, by
the weights of that moment; every other token, by the weights that draw the next one. So
of a response whose weights changed in flight the engine's own computation is repeated
(`row_model.mixed_logits`); one of a single version is compared with the model itself.

With REPLICAS that many schedulers have a few pages of host memory each and share a pool
in a temporary directory, of which files are damaged and deleted meanwhile.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable

import jax
import numpy as np

from m2jax import platforms
from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine.engine import Engine
from m2jax.rollout.serving.config import SchedulerConfig
from m2jax.rollout.serving.scheduler import Scheduler
from m2jax.rollout.tiers.config import KvPoolConfig
from m2jax.rollout.tiers.page_layout import Layout
from tests import row_model
from tests.rollout import conftest as small

CONFIG = dataclasses.replace(small.ENGINE_CONFIG, pages=1 + 12 + 14)
AT_ONCE = 24, 3  # requests, by turns: with few of them calls are made ahead
PHASE = 100  # requests of a turn
HOST_PAGES, POOL_PAGES = 8, 200
TIMEOUT_S = 120
REPORTED = (
  'requests',
  'checked',
  'spans',
  'cancelled',
  'retractions',
  'weight_updates',
  'decode_calls',
  'ahead_calls',
)
REPORTED += ('prefix_hit_tokens', 'evicted_pages', 'sampled_tokens')
TIERS = ('host_hit_tokens', 'host_evicted_pages', 'pool_hit_tokens')
TIERS += ('pool_written_pages', 'pool_evicted_pages', 'pool_corrupt_pages')
TIERS += ('pool_dropped_pages', 'pool_errors', 'late_reads')

_mixed = jax.jit(functools.partial(row_model.mixed_logits, cfg=small.CFG))


class Soak:
  """Schedulers, their weights of even and odd versions, and a reference."""

  def __init__(
    self,
    seed: int,
    engine: Engine,
    configs: list[SchedulerConfig],
    make: Callable[..., Scheduler] = Scheduler,
  ):
    self.random = np.random.default_rng(seed)
    self.weights = [small.init(i) for i in range(2)]
    self.reference = small.Reference()
    self.stems = self.random.integers(small.CFG.vocab_size, size=(5, 30))
    self.version, self.other = 0, make is not Scheduler
    self.ended = 0  # responses
    self.schedulers = [make(engine, self.weights[0], config=c) for c in configs]
    self.placed = collections.defaultdict(list)  # by future, see `note`
    self.spans = 0  # responses of several versions that were checked
    for scheduler in self.schedulers:
      self.note(scheduler._batcher)
      scheduler.start()

  def note(self, batcher) -> None:
    """Notes (tokens drawn so far, version) whenever a request gets a slot."""
    take = batcher._take

    def noted(job, hit):
      self.placed[job.future].append((len(job.logprobs), batcher.version))
      take(job, hit)

    batcher._take = noted

  def replace_weights(self, version: int) -> None:
    for scheduler in self.schedulers:
      scheduler.update_weights(self.weights[version % 2], version)
    self.version = version

  def submit(self, number: int):
    """A random request: its prompt, handle, and the version that there was."""
    random = self.random
    stem = self.stems[random.integers(5), : random.integers(1, 31)]
    own = random.integers(small.CFG.vocab_size, size=random.integers(0, 12))
    prompt = np.concatenate([stem, own])
    sampling = SamplingParams(int(random.integers(1, 30)), seed=number)
    scheduler = self.schedulers[random.integers(len(self.schedulers))]
    version = self.version
    return prompt, scheduler.submit(GenerateRequest(prompt, sampling)), version

  def check(self, prompt, handle, submitted: int) -> int:
    """Whether the response could be checked."""
    result = handle.future.result(TIMEOUT_S)
    self.ended += 1
    assert len(result.tokens) == len(result.logprobs) == len(result.versions)
    assert np.all(np.diff(result.versions) >= 0)
    placed, several = self.placed.pop(handle.future, []), len(set(result.versions)) > 1
    if not len(result.tokens):
      return 0
    if self.other and (several or result.versions[0] != submitted):
      return 0
    if several:
      self.spans += 1
      want = self.recomputed(prompt, result, placed)
      np.testing.assert_allclose(result.logprobs, want, atol=2e-4)
      return 1
    weights = self.weights[int(result.versions[0]) % 2]
    want = self.reference.logprobs(weights, prompt, result.tokens)
    np.testing.assert_allclose(result.logprobs, want, atol=2e-4)
    return 1

  def recomputed(self, prompt, result, placed) -> np.ndarray:
    """Log-probabilities of the response's tokens, as the engine computed them."""
    n, out = len(prompt), np.zeros(len(result.tokens))
    tokens = np.zeros(small.CONTEXT, np.int32)
    tokens[: n + len(out)] = [*prompt, *result.tokens]
    ends = [drawn for drawn, _ in placed[1:]] + [len(out)]
    for (drawn, version), end in zip(placed, ends, strict=True):
      if drawn == end:  # retracted before it drew
        continue
      versions = np.full(small.CONTEXT, version)
      versions[n + drawn - 1 : n + end - 1] = result.versions[drawn:end]
      logits = np.float64(_mixed(self.weights, versions % 2, tokens))
      logprobs = small.log_softmax(logits)[n + drawn - 1 : n + end - 1]
      out[drawn:end] = logprobs[np.arange(end - drawn), result.tokens[drawn:end]]
    return out

  def finish(self) -> collections.Counter:
    """Stops; the sum of the schedulers' counts."""
    total = collections.Counter()
    for scheduler in self.schedulers:
      deadline = time.monotonic() + 10  # the last future resolves before its slot is
      busy = lambda stats: stats['active_slots'] or stats.get('moving_pages')
      while busy(stats := scheduler.stats()) and time.monotonic() < deadline:
        time.sleep(0.01)
      scheduler.stop()
      assert stats['free_pages'] + stats['cached_pages'] == stats['pages'], stats
      assert not scheduler.alive and not stats['failed'] and not busy(stats), stats
      total.update(stats)
    return total


def soak(
  requests: int,
  seed: int = 0,
  replicas: int = 0,
  engine: Engine | None = None,
  make: Callable[..., Scheduler] = Scheduler,
  replace_s: float = 0.05,
  replace_after: int = 0,
) -> dict[str, int]:
  """Runs the requests; returns the schedulers' counts, the responses that were checked,
  and the spans among them: those of several versions.

  Args:
    make: the scheduler, from the arguments of `Scheduler`. If it is another one, only
      responses of the one version that there was at their submission are checked:
      prompts may be prefilled long before they are decoded.
    replace_s: between weights, at least.
    replace_after: responses between weights, at least: on a slow machine some must
      still be of one version.

  Raises:
    AssertionError: a token is wrong, or a page is lost.
  """
  engine = engine or Engine(small.CFG, CONFIG)
  if replicas:
    replace_s = 1.0  # leaves time to evict pages and to find them
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
    configs = [_more_memory(engine, directory)] * replicas
    run = Soak(seed, engine, configs or [SchedulerConfig(decode_steps=4)], make)
    stop = threading.Event()

    def replace_weights():
      version = replaced = 0
      while not stop.wait(replace_s):
        if run.ended >= replaced + replace_after:
          replaced = run.ended
          run.replace_weights(version := version + 1)

    thread = threading.Thread(target=replace_weights)
    thread.start()
    left, checked = collections.deque(), 0
    try:
      for number in range(requests):
        left.append(run.submit(number))
        if run.random.random() < 0.1:
          left[run.random.integers(len(left))][1].cancel()
        if number % 20 == 10 and replicas:
          _damage(pathlib.Path(directory), run.random)
        while len(left) >= AT_ONCE[number // PHASE % 2]:
          checked += run.check(*left.popleft())
      while left:
        checked += run.check(*left.popleft())
    finally:
      stop.set()
      thread.join()
    return {
      **run.finish(),
      'requests': requests,
      'checked': checked,
      'spans': run.spans,
    }


def _more_memory(engine: Engine, directory: str) -> SchedulerConfig:
  page = Layout.of(engine.state_shapes().pages).page_bytes
  pool = KvPoolConfig(f'file://{directory}/', bytes=POOL_PAGES * (page + 40))
  return SchedulerConfig(
    decode_steps=4, host_cache_bytes=HOST_PAGES * page, kv_pool=pool
  )


def _damage(directory: pathlib.Path, random) -> None:
  """Cuts, changes or deletes a third of the pool's pages. How many of them are read
  before they are evicted depends on the machine's speed."""
  for path in sorted(directory.glob('*/*.page')):
    try:
      match random.integers(9):
        case 0:
          os.truncate(path, random.integers(100))
        case 1:
          value = bytearray(path.read_bytes())
          value[random.integers(len(value))] ^= 1
          path.write_bytes(value)
        case 2:
          path.unlink()
    except (FileNotFoundError, ValueError):  # deleted or cut meanwhile
      pass


def main(argv):
  platforms.own_only()
  found = soak(*map(int, argv or [20_000]))
  names = REPORTED + (TIERS if 'host_pages' in found else ())
  print(', '.join(f'{name} {found[name]}' for name in names))


if __name__ == '__main__':
  main(sys.argv[1:])
