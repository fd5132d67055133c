"""Law 5 on the whole job: killed by SIGKILL in the middle of RL, it resumes exactly.

Real model, sandbox, gateway, pool and checkpoints in a child process; the test only
chooses when to kill it.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from m2jax.checkpoint.manager import CheckpointManager
from m2jax.observe import metrics as metrics_lib
from m2jax.pool import data_pool
from tests.forge import forge_worker

REPO = pathlib.Path(__file__).parents[2]
MARK = 'M2JAX_TEST_RESUME'


def start(workdir: pathlib.Path) -> subprocess.Popen:
  return subprocess.Popen(
    [sys.executable, '-m', 'tests.forge.forge_worker', str(workdir)],
    cwd=REPO,
    env={**os.environ, MARK: str(workdir)},
    stdout=subprocess.PIPE,
    stderr=open(workdir.with_suffix('.log'), 'a'),
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


def lives(workdir: pathlib.Path) -> list[list[dict]]:
  """Witness lines of each process that came as far as RL; a torn last line is left."""
  by_pid = collections.defaultdict(list)
  for line in (workdir / 'witness.jsonl').read_text().splitlines():
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      continue
    by_pid[record['pid']].append(record)
  return list(by_pid.values())


def surviving_updates(workdir: pathlib.Path) -> tuple[dict[int, list[int]], int]:
  """step → items of the updates in the final weights, and the number of updates undone.

  Also checks that each process began with exactly the last saved state of its step, and
  that each update except the last of the queue has enough useful items or took the
  maximum number.
  """
  updates: dict[int, list[int]] = {}
  saved: dict[int, str] = {}
  undone = short = 0
  for life in lives(workdir):
    if life[0]['what'] == 'done':  # a finished run is only reported again
      continue
    assert life[0]['what'] == 'resumed'
    first = life[0]
    if first['step']:
      assert saved[first['step']] == first['digest'], 'other weights than were saved'
    assert first['served'] == first['step']  # the engine serves them too
    later = [step for step in updates if step > first['step']]
    undone += len(later)
    for step in later:
      del updates[step]
    for record in life[1:]:
      if record['what'] == 'update':
        assert record['step'] == max(updates, default=0) + 1
        updates[record['step']] = record['items']
        assert record['useful'] <= forge_worker.PER_STEP
        full = record['useful'] == forge_worker.PER_STEP
        full |= len(record['items']) == forge_worker.MOST_PER_STEP
        short += not full
      elif record['what'] == 'saved':
        saved[record['step']] = record['digest']
  assert short <= 1
  return updates, undone


# What to wait for, how often, and how long then at most.
LONG = (
  ('saved', 3, 0.3),  # a third save begins: the first is certainly committed
  ('saved', 1, 0.05),  # while the checkpoint is being written
  ('update', 2, 0.2),
)
THOROUGH = (
  *LONG[:1],
  ('resumed', 1, 0.3),
  ('saved', 1, 0.05),
  ('update', 1, 0.3),
  ('saved', 3, 0.3),
  ('update', 2, 0.2),
)


@pytest.mark.parametrize(
  'moments',
  [
    pytest.param(LONG, marks=pytest.mark.long),
    pytest.param(THOROUGH, marks=pytest.mark.thorough),
  ],
)
def test_killed_in_rl(tmp_path, moments):
  """Killed at random moments of RL, then left to drain its finite queue: every item is
  trained exactly once in the final weights' lineage, each process began with the saved
  state bit for bit, and the metrics are consistent."""
  rng = random.Random(0)
  workdir, kills = tmp_path / 'run', 0
  for what, count, delay_s in moments:
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

  updates, undone = surviving_updates(workdir)
  # otherwise nothing was tested
  assert kills >= 2 * len(moments) // 3 and undone > 0
  assert len({life[0]['step'] for life in lives(workdir)}) > 1 + len(moments) // 4
  steps = sorted(updates)
  assert steps == list(range(1, len(steps) + 1))
  trained = [item for step in steps for item in updates[step]]
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
  digests = {
    r['digest'] for life in lives(workdir) for r in life if r['what'] == 'saved'
  }
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
  assert surviving_updates(workdir)[0] == updates
