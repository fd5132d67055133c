"""That freed memory stays: a step does not clear its pages again."""

from __future__ import annotations

import subprocess
import sys

import pytest

_STEPS = """
import resource, sys
from m2jax.train import host_memory
if sys.argv[1] == 'keep' and not host_memory.keep_freed():
  sys.exit(3)
import jax, jax.numpy as jnp
f = jax.jit(lambda x, y: jnp.sort(x @ y, axis=0)[0])
x, y = jnp.ones((1 << 14, 8)), jnp.ones((8, 1 << 10))
for i in range(12):
  if i == 8:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
  f(x, y).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: str) -> int:
  """Page faults of four calls of a program with 64 MB of temporaries."""
  command = [sys.executable, '-c', _STEPS, keep]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300)
  if done.returncode == 3:
    pytest.skip('the C library is not glibc')
  assert not done.returncode, done.stderr
  return int(done.stdout)


def test_a_step_takes_no_new_pages():
  assert 10 * faults('keep') < faults('give back')
