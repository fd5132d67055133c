"""Thousands of requests with all that can happen to them, on few pages.

  python -m tests.rollout.soak [REQUESTS] [SEED]

Random prompts that share prefixes, some longer than the pages that are left, seeds,
cancellations, and weights that are replaced all the time. Each token's log-probability
must be that of its version's weights (for responses of one version; the K/V of others
are of several), and in the end every page must be free or cached. Prints one line.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from m2jax.rollout.api import GenerateRequest, SamplingParams
from m2jax.rollout.engine import Engine
from m2jax.rollout.scheduler import Scheduler, SchedulerConfig
from tests.rollout import conftest as small

CONFIG = dataclasses.replace(small.ENGINE_CONFIG, pages=1 + 12 + 14)
AT_ONCE = 24
TIMEOUT_S = 120


def soak(
  requests: int,
  seed: int = 0,
  engine: Engine | None = None,
  make: Callable[..., Scheduler] = Scheduler,
  replace_s: float = 0.05,
) -> dict[str, int]:
  """Runs the requests; returns the scheduler's counts.

  Args:
    make: the scheduler, from the arguments of `Scheduler`. If it is another one, only
      responses of the version that there was at their submission are checked: prompts
      may be prefilled long before they are decoded.
    replace_s: between weights.

  Raises:
    AssertionError: a token is wrong, or a page is lost.
  """
  random = np.random.default_rng(seed)
  weights = [small.init(i) for i in range(2)]  # of even and odd versions
  reference = small.Reference()
  engine = engine or Engine(small.CFG, CONFIG)
  scheduler = make(engine, weights[0], config=SchedulerConfig(decode_steps=4))
  scheduler.start()
  stems = random.integers(small.CFG.vocab_size, size=(5, 30))
  left = collections.deque()
  stop = threading.Event()
  submitted = [0]  # the version for the next request

  def replace_weights():
    version = 0
    while not stop.wait(replace_s):
      version += 1
      scheduler.update_weights(weights[version % 2], version)
      submitted[0] = version

  def check(prompt, handle, at):
    result = handle.future.result(TIMEOUT_S)
    assert len(result.tokens) == len(result.logprobs) == len(result.versions)
    assert np.all(np.diff(result.versions) >= 0)
    if len(result.tokens) and len(set(result.versions.tolist())) == 1:
      version = int(result.versions[0])
      if make is not Scheduler and version != at:
        return 0
      want = reference.logprobs(weights[version % 2], prompt, result.tokens)
      np.testing.assert_allclose(result.logprobs, want, atol=2e-4)
      return 1
    return 0

  thread = threading.Thread(target=replace_weights)
  thread.start()
  checked = 0
  try:
    for number in range(requests):
      stem = stems[random.integers(5), : random.integers(1, 31)]
      own = random.integers(small.CFG.vocab_size, size=random.integers(0, 12))
      prompt = np.concatenate([stem, own])
      sampling = SamplingParams(int(random.integers(1, 30)), seed=number)
      at = submitted[0]
      handle = scheduler.submit(GenerateRequest(prompt, sampling))
      left.append((prompt, handle, at))
      if random.random() < 0.1:
        left[random.integers(len(left))][1].cancel()
      if len(left) >= AT_ONCE:
        checked += check(*left.popleft())
    while left:
      checked += check(*left.popleft())
  finally:
    stop.set()
    thread.join()
  deadline = time.monotonic() + 10  # the last future resolves before its slot is free
  while (stats := scheduler.stats())['active_slots'] and time.monotonic() < deadline:
    time.sleep(0.01)
  scheduler.stop()
  assert stats['free_pages'] + stats['cached_pages'] == stats['pages'], stats
  assert scheduler.alive is False and not stats['failed']
  return {**stats, 'requests': requests, 'checked': checked}


def main(argv):
  found = soak(*map(int, argv or [20_000]))
  names = ('requests', 'checked', 'cancelled', 'retractions', 'weight_updates')
  names += ('prefix_hit_tokens', 'evicted_pages', 'sampled_tokens')
  print(', '.join(f'{name} {found[name]}' for name in names))


if __name__ == '__main__':
  main(sys.argv[1:])
