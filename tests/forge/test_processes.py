"""RL in several processes: the weights of one device, and law 5 when one is killed."""

from __future__ import annotations

import json
import random
import subprocess
import time

import jax
import numpy as np
import pytest

from m2jax.checkpoint.manager import CheckpointManager
from m2jax.observe import metrics as metrics_lib
from m2jax.pool import data_pool
from tests import processes as processes_lib
from tests.faults import witness
from tests.forge import learn_worker

ITEMS = 20


def start(directory, mesh, *, devices, processes=1, **fields):
  """The processes of a run, started."""
  fields |= dict(directory=str(directory), mesh=mesh, devices=devices)
  fields |= dict(processes=processes)
  fields |= dict(coordinator=f'localhost:{processes_lib.free_port()}')
  return [
    processes_lib.start(
      'tests.forge.learn_worker', json.dumps({**fields, 'process': process})
    )
    for process in range(processes)
  ]


def finish(children):
  ended = processes_lib.finish(children)
  for child, (_, err) in zip(children, ended, strict=True):
    assert child.returncode == 0, err[-5000:]


def weights(directory):
  """Everything in the last checkpoint, and its step."""
  with CheckpointManager(directory / 'rl', read_only=True) as manager:
    restored = manager.restore()
  return restored.state, restored.step


def same(directory, reference):
  """Compares two finished runs: state and metrics."""
  (state, step), (want, last) = weights(directory), weights(reference)
  assert step == last
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10), state, want
  )
  names = ('step', 'loss', 'grad_norm', 'entropy', 'mtp_loss', 'max_violation')
  names += ('forest_tokens', 'chunked_trees', 'input_tokens')
  curves = [
    [[r.get(name, 0.0) for name in names] for r in metrics_lib.read(run, 'rl')]
    for run in (directory, reference)
  ]
  for got, wanted in zip(*curves, strict=True):
    assert got == pytest.approx(wanted, rel=1e-8)


@pytest.mark.thorough
def test_processes_learn_what_one_device_learns(tmp_path):
  """The same recorded groups, in rows and in chunks, over fsdp, expert and tensor in
  two processes: weights, optimizer, router biases and metrics of one device."""
  alone, run = tmp_path / 'alone', tmp_path / 'run'
  mesh = dict(fsdp=2, expert=2, tensor=2)
  children = start(run, mesh, devices=4, processes=2, items=4)
  finish(children + start(alone, {}, devices=1, items=4))
  same(run, alone)
  assert sum(r['chunked_trees'] for r in metrics_lib.read(alone, 'rl')) > 1
  assert not list((run / 'rl_steps').iterdir())  # the last checkpoint needs no files


def kill(children, victim: int, after: int, delay_s: float) -> float:
  """SIGKILL of a process some time after some updates; seconds until the others end."""
  for line in children[0].stdout:
    after -= '"update"' in line
    if not after:
      break
  time.sleep(delay_s)
  children[victim].kill()
  killed_s = time.monotonic()
  for child in children:
    try:
      child.communicate(timeout=120)
    except subprocess.TimeoutExpired:
      processes_lib.finish(children, 1)
      raise
    assert child.returncode != 0
  return time.monotonic() - killed_s


@pytest.mark.long
def test_one_of_two_processes_is_killed(tmp_path):
  """Either process, at random moments: the other ends by itself, and after restarts
  every item is trained exactly once in the lineage of the final weights, which are
  those of one device that was never interrupted. The last start is one process, on
  another mesh."""
  rng = random.Random(1)
  alone, run = tmp_path / 'alone', tmp_path / 'run'
  fields = dict(items=ITEMS, chunks=False)
  reference = start(alone, {}, devices=1, **fields)
  for victim, after in ((1, 3), (0, 4)):
    children = start(run, dict(fsdp=2, tensor=2), devices=2, processes=2, **fields)
    ended_s = kill(children, victim, after, rng.uniform(0, 0.3))
    assert ended_s < 2 * learn_worker.HEARTBEAT_S + 10
  finish(start(run, dict(fsdp=2, expert=2), devices=4, **fields) + reference)

  found = witness.surviving(witness.read(run))
  assert found.lives == 3 and found.undone > 0  # else nothing was tested
  assert found.items == list(range(ITEMS))
  with data_pool.DataPool(f'sqlite:///{run}/pool.db') as pool:
    assert pool.counts()['taken'] == ITEMS and not pool.failures()
  same(run, alone)
