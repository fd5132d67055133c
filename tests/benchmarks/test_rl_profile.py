"""The profile of RL divides the machine's time as its records and clocks say."""

import threading
import time

import pytest

from benchmarks import proc_stat, rl_profile
from benchmarks.rl_profile import Reading
from tests.waiting import wait_until

RECORDS = [  # an update of 10 s, and one of 5 s after an evaluation of 2 s
  dict(time_s=110.0, step_s=10.0, wait_s=8.0),
  dict(time_s=117.0, step_s=5.0, wait_s=1.0),
]


def test_processor_time_goes_to_the_phase_in_which_it_was_used():
  """The engine computes one second in each of the run, the sandbox while waiting."""
  readings = [
    Reading(100.0 + s, dict(model=float(s), sandbox=0.5 * min(s, 8))) for s in range(18)
  ]
  found = rl_profile.totals(readings, rl_profile.intervals(RECORDS), cores=2)
  waiting, training = found['waiting'], found['training']
  assert waiting['seconds'] == 8 + 1 and training['seconds'] == 2 + 4
  assert waiting['model'] == 9 and training['model'] == 6
  assert waiting['sandbox'] == 4 and training['sandbox'] == 0
  assert waiting['idle'] == 2 * 9 - 9 - 4
  shown = rl_profile.table(found)
  assert '| seconds | 9 | 6 |' in shown
  assert '| model | 50.0% | 50.0% |' in shown


def test_a_thread_that_computes_is_found_by_its_name():
  """Real clocks: a thread named as the gateway's is, and the time of the rest."""

  computed, end = threading.Event(), threading.Event()

  def compute():
    end_s = time.thread_time() + 0.5
    while time.thread_time() < end_s:
      pass
    computed.set()
    end.wait(60)

  def read_twice(sampler):  # the second one has begun after this call
    before = len(sampler.readings)
    wait_until(lambda: len(sampler.readings) >= before + 2)

  with rl_profile.Sampler() as sampler:
    thread = threading.Thread(target=compute, name='gateway')
    thread.start()
    assert computed.wait(60)
    read_twice(sampler)
    end.set()
    thread.join()
    read_twice(sampler)
  used = [reading.parts.get('gateway', 0.0) for reading in sampler.readings]
  assert used == sorted(used), 'what an ended thread used is kept'
  assert used[-1] == pytest.approx(0.5, abs=0.3)


def test_a_thread_that_ends_keeps_its_part(monkeypatch):
  """Python forgets it before the kernel does: what it used did not move elsewhere."""
  end = threading.Event()
  thread = threading.Thread(target=end.wait, name='gateway')
  thread.start()
  sampler = rl_profile.Sampler()
  monkeypatch.setattr(rl_profile, '_stat', lambda path: _used(1.0, path))
  assert sampler._read().parts['gateway'] == 1.0
  others = [t for t in threading.enumerate() if t is not thread]
  monkeypatch.setattr(threading, 'enumerate', lambda: others)
  assert sampler._read().parts['gateway'] == 1.0
  # Another thread may get its number.
  monkeypatch.setattr(rl_profile, '_stat', lambda path: _used(0.5, path))
  assert 'gateway' not in sampler._read().parts
  monkeypatch.undo()
  end.set()
  thread.join()


def _used(seconds, path):
  if not path.startswith('/proc/self/task/'):
    return None
  return proc_stat.ProcStat('python', 1, seconds, 0.0, 0.0, 0.0)


def test_a_run_without_updates_has_an_empty_table():
  found = rl_profile.totals([], rl_profile.intervals([]), cores=2)
  assert '| seconds | 0 | 0 |' in rl_profile.table(found)
