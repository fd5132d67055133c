"""That freed memory stays: a step does not clear its pages again."""

from __future__ import annotations

import subprocess
import sys

import pytest

_STEPS = """
import resource, statistics, sys
from m2jax.train import host_memory
if sys.argv[1] == 'keep' and not host_memory.keep_freed():
  sys.exit(3)
import jax, jax.numpy as jnp
f = jax.jit(lambda x, y: (x @ y) @ y.T)
x, y = jnp.ones((1 << 14, 8)), jnp.ones((8, 1 << 10))
def call():
  before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  f(x, y).block_until_ready()
  return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults = [call() for _ in range(120)]
print(statistics.fmean(faults[60:]))
"""


def faults(keep: str) -> float:
  """Page faults of a call of a program with 64 MB of temporaries, the mean.

  The first 60 calls are not counted: the process still grows in up to ten of them,
  where a small allocation has split the room that the last call left.
  """
  command = [sys.executable, '-c', _STEPS, keep]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  if done.returncode == 3:
    pytest.skip('the C library is not glibc')
  assert not done.returncode, done.stderr
  return float(done.stdout)


def test_a_step_takes_no_new_pages():
  assert 10 * faults('keep') < faults('give back')
