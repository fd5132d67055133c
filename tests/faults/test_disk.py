"""The disk is full, or slow: nothing accepted is lost, and nothing is half there."""

from __future__ import annotations

import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from m2jax import records
from m2jax.checkpoint import files
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.observe import metrics
from m2jax.pool import data_pool
from tests.faults import witness
from tests.forge.roles.role_processes import Roles
from tests.pool.test_data_pool import completion


def test_checkpoints_on_a_full_disk(small_disk):
  """The save fails with the reason; the last one is intact; the next start saves."""
  disk, state = small_disk('8m'), {'x': jnp.arange(200_000.0)}
  with (
    pytest.raises(OSError, match='No space left'),
    CheckpointManager(disk.path / 'rl') as manager,
  ):
    manager.save(1, state)
    manager.wait()
    disk.fill()
    manager.save(2, state)
    manager.wait()
  assert manager.steps() == [1]
  disk.make_room()
  with CheckpointManager(disk.path / 'rl') as manager:
    manager.save(3, state)
    manager.wait()
    assert manager.steps() == [1, 3]
    np.testing.assert_array_equal(manager.restore(like=state).state['x'], state['x'])


def test_metrics_on_a_full_disk(small_disk):
  """The write fails, and no torn line is left; with room the next one is written."""
  disk = small_disk('1m')
  with metrics.MetricsWriter(disk.path, use_tensorboard=False) as writer:
    writer.write('eval', 0, n=0)
    disk.fill()
    with pytest.raises(OSError, match='No space left'):
      for step in range(1, 200):
        writer.write('eval', step, stage='x' * 100)
    written = [r['step'] for r in metrics.read(disk.path)]
    assert written == list(range(len(written)))
    disk.make_room()
    writer.write('eval', 999, n=1)
  assert [r['step'] for r in metrics.read(disk.path)] == [*written, 999]


def test_the_pool_on_a_full_disk(small_disk):
  """It is broken, with the reason; what was acknowledged is there at the restart."""
  disk, accepted, rng = small_disk('4m'), [], np.random.default_rng(0)
  url = f'sqlite:///{disk.path}/pool.db'
  pool = data_pool.DataPool(url, linger_s=0.0)
  disk.fill()
  with pytest.raises(data_pool.PoolBroken, match='full'):
    for turn in range(2000):
      noise = rng.integers(0, 60_000, 500), rng.normal(size=500).astype(np.float32)
      fields = dict(zip(('response_ids', 'logprobs'), noise, strict=True))
      record = completion('s', turn, versions=[0] * 500, **fields)
      pool.record_completion(record).result(30)
      accepted.append(turn)
  with pytest.raises(data_pool.PoolBroken, match='full'):
    pool.submit(records.WorkItem(0, 't', 1))
  pool.close()
  disk.make_room()
  with data_pool.DataPool(url) as pool:
    assert [c.turn for c in pool.completions('s')] == accepted
    pool.submit(records.WorkItem(0, 't', 1))


@pytest.mark.long
def test_a_run_on_a_full_disk(small_disk, tmp_path):
  """It ends with one line that says so; with room the same command resumes, and every
  item is trained once."""
  disk = small_disk('48m')
  workdir = disk.path / 'run'
  with Roles(tmp_path, '--config.rl.max_items=24', workdir=workdir) as run:
    run.start('all')
    run.more_updates(3)
    disk.fill()
    assert run.children['all'].wait(120) == 2, run.log('all')
    last = run.log('all').strip().splitlines()[-1]
    assert last.startswith('error: ') and ('No space' in last or 'full' in last), last
    disk.make_room()
    run.start('all')
    child = run.children['all']
    run.wait(lambda: child.poll() == 0)
    found = witness.surviving(run.witness('resumed', 'update'))
  assert sorted(found.items) == list(range(24))


def test_training_goes_on_while_a_slow_disk_saves(tmp_path, monkeypatch):
  """Only the next save waits, and both are whole."""
  crc32 = files.zlib.crc32

  def slow(*args):
    time.sleep(0.3)
    return crc32(*args)

  with CheckpointManager(tmp_path) as manager:
    manager.save(1, {'x': jnp.zeros(1)})
    manager.wait()
    monkeypatch.setattr(files.zlib, 'crc32', slow)
    began_s = time.monotonic()
    manager.save(2, {'x': jnp.ones(1)})
    saved_s = time.monotonic() - began_s
    manager.wait()
    waited_s = time.monotonic() - began_s
    assert saved_s < waited_s / 2 and manager.steps() == [1, 2]


def test_the_pool_on_a_slow_disk(postgresql):
  """A commit takes half a second: many records share one, and leases are kept."""
  with data_pool.DataPool(postgresql.new_url(), linger_s=0.01) as pool:
    for index in range(3):
      pool.submit(records.WorkItem(index, 't', 1))
    held = [claim.lease for claim in pool.claim('a', 3)]
    dialect, commits = pool._database.engine.dialect, []
    commit = dialect.do_commit

    def slow(connection):
      commits.append(time.sleep(0.5))
      commit(connection)

    dialect.do_commit = slow
    began_s, alive = time.monotonic(), []
    beats = threading.Thread(
      target=lambda: alive.extend(pool.heartbeat(held) for _ in range(3))
    )
    beats.start()
    done = [pool.record_completion(completion('s', turn)) for turn in range(300)]
    for future in done:
      future.result(30)
    beats.join(30)
    assert alive == [set(held)] * 3
    assert time.monotonic() - began_s < 10 and len(commits) < 12
    dialect.do_commit = commit
    assert len(pool.completions('s')) == 300
