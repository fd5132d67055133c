"""A prefill process; prints its address when it serves, and stops when stdin ends.

python -m tests.rollout.prefill_worker ADDRESS [KEY [PAUSE_S]]

Weights of even and odd versions as in `soak`; PAUSE_S before every prefill call.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from m2jax import platforms
from m2jax.rollout.disaggregation.prefill_engine import PrefillScheduler
from m2jax.rollout.disaggregation.prefill_server import PrefillServer
from m2jax.rollout.engine.engine import Engine
from tests.rollout import conftest as small


class Slow:
  """An engine whose prefill takes longer."""

  def __init__(self, engine, pause_s):
    self._engine, self._pause_s = engine, pause_s

  def __getattr__(self, name):
    return getattr(self._engine, name)

  def prefill_rows(self, *args):
    if np.any(args[-2]):  # no warm-up
      time.sleep(self._pause_s)
    return self._engine.prefill_rows(*args)


def main(address, key='', pause_s='0'):
  platforms.own_only()
  weights = [small.init(i) for i in range(2)]
  engine = Slow(Engine(small.CFG, small.RECORDING), float(pause_s))
  scheduler = PrefillScheduler(engine, weights[0], part_pages=3)
  server = PrefillServer(
    scheduler, address, load=lambda v: weights[v % 2], key=key.encode() or None
  ).start()
  print(server.address, flush=True)
  sys.stdin.read()
  server.stop()
  # Python aborts if a daemon thread is in XLA when the interpreter ends.
  os._exit(0)


if __name__ == '__main__':
  main(*sys.argv[1:])
