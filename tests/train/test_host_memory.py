"""That freed memory stays: a step does not clear its pages again."""

from __future__ import annotations

import pytest

from tests import processes


def faults(keep: str) -> float:
  """Page faults of a call, the median of many."""
  done = processes.run('tests.train.host_memory_worker', keep)
  if done.returncode == 3:
    pytest.skip('the C library is not glibc')
  assert not done.returncode, done.stderr
  return float(done.stdout)


def test_a_step_takes_no_new_pages():
  assert 10 * faults('keep') < faults('give_back')
