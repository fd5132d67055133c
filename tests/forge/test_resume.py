"""Law 5 on the whole job: killed by SIGKILL in the middle of RL, it resumes exactly.

Real model, sandbox, gateway, pool and checkpoints in a child process; the test only
chooses when to kill it.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import signal
import subprocess
import time

import pytest

from m2jax.checkpoint.manager import CheckpointManager
from m2jax.observe import metrics as metrics_lib
from m2jax.pool import data_pool
from tests import processes
from tests.faults import witness
from tests.forge import forge_worker

MARK = 'M2JAX_TEST_RESUME'


def start(workdir: pathlib.Path) -> subprocess.Popen:
  with open(workdir.with_suffix('.log'), 'a') as log:
    return processes.popen(
      'tests.forge.forge_worker',
      workdir,
      env={**os.environ, MARK: str(workdir)},
      stdout=subprocess.PIPE,
      stderr=log,
      text=True,
      start_new_session=True,
    )


def log_of(workdir: pathlib.Path) -> str:
  return workdir.with_suffix('.log').read_text()[-5000:]


def kill_after(child: subprocess.Popen, what: str, count: int, delay_s: float) -> bool:
  """SIGKILL `delay_s` after the count-th line of a kind; False if the child ended."""
  for line in child.stdout:
    if line.startswith('{') and json.loads(line)['what'] == what:
      count -= 1
      if count == 0:
        time.sleep(delay_s)
        child.kill()
        break
  child.communicate(timeout=120)
  return child.returncode == -signal.SIGKILL


def left_running(workdir: pathlib.Path) -> list[str]:
  """Command lines of processes that a killed run left behind."""
  found = []
  for process in pathlib.Path('/proc').glob('[0-9]*'):
    try:
      if f'{MARK}={workdir}'.encode() in (process / 'environ').read_bytes():
        found.append((process / 'cmdline').read_bytes().replace(b'\0', b' ').decode())
    except OSError:
      continue
  return found


def check_sizes(records: list[dict]) -> None:
  """Each update but the last of the queue has enough useful items, or took the maximum
  number."""
  short = 0
  for record in records:
    if record['what'] == 'update':
      assert record['useful'] <= forge_worker.PER_STEP
      full = record['useful'] == forge_worker.PER_STEP
      short += not full and len(record['items']) < forge_worker.MOST_PER_STEP
  assert short <= 1


# What to wait for, how often, and how long then at most.
MOMENTS = (
  ('saved', 3, 0.3),  # a third save begins: the first is certainly committed
  ('saved', 1, 0.05),  # while the checkpoint is being written
  ('update', 2, 0.2),
)


@pytest.mark.long
def test_killed_in_rl(tmp_path):
  """Killed at random moments of RL, then left to drain its finite queue: every item is
  trained exactly once in the final weights' lineage, each process began with the saved
  state bit for bit, and the metrics are consistent."""
  rng = random.Random(0)
  workdir, kills = tmp_path / 'run', 0
  for what, count, delay_s in MOMENTS:
    child = start(workdir)
    kills += kill_after(child, what, count, rng.uniform(0, delay_s))
    assert child.returncode in (0, -signal.SIGKILL), log_of(workdir)
  deadline_s = time.monotonic() + 20
  while left_running(workdir) and time.monotonic() < deadline_s:
    time.sleep(0.2)
  assert not left_running(workdir)
  child = start(workdir)
  child.communicate(timeout=600)
  assert child.returncode == 0, log_of(workdir)

  records = witness.read(workdir)
  found = witness.surviving(records)
  check_sizes(records)
  # otherwise nothing was tested
  assert kills >= 2 and found.undone > 0
  assert len({r['step'] for r in records if r['what'] == 'resumed'}) > 1
  trained, steps = found.items, sorted(found.updates)
  assert steps == list(range(1, len(steps) + 1))
  with data_pool.DataPool(f'sqlite:///{workdir}/pool.db') as pool:
    failed = list(pool.failures())
    assert pool.counts()['taken'] == len(trained)
    assert pool.next_index() == forge_worker.ITEMS
  assert sorted(trained + failed) == list(range(forge_worker.ITEMS))
  assert len(set(trained)) == len(trained)

  with CheckpointManager(workdir / 'rl', read_only=True) as manager:
    last = manager.restore()
  assert last.step == steps[-1]
  assert last.host['ledger']['head'] == forge_worker.ITEMS
  digests = {r['digest'] for r in records if r['what'] == 'saved'}
  assert len(digests) > 2  # the weights changed

  records = metrics_lib.read(workdir, 'rl')
  assert [r['step'] for r in records] == steps
  times = [r['time_s'] for r in records]
  assert times == sorted(times)
  lineages = [r['lineage'] for r in records]
  assert lineages == sorted(lineages) and len(set(lineages)) > 1
  assert all(r['policy/lag_max'] >= 0 for r in records if 'policy/lag_max' in r)
  for phase in ('sft', 'eval'):
    records = metrics_lib.read(workdir, phase)
    names = ('step', 'stage', 'split', 'temperature', 'family', 'calls')
    keys = [
      tuple(r.get(name) for name in names)
      for r in records
      if r.get('stage')
      != 'during RL'  # measured again after a roll-back: the last counts
    ]
    assert len(set(keys)) == len(keys), f'{phase} records twice'
  assert (workdir / 'report.html').stat().st_size > 10_000

  # Started once more, the finished run has nothing left to do.
  child = start(workdir)
  child.communicate(timeout=600)
  assert child.returncode == 0, log_of(workdir)
  assert witness.surviving(witness.read(workdir)).updates == found.updates
