"""Histograms of generated, trained and dropped trajectories, in a real pool."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from m2jax.forge.sample_counts import SampleCounts
from m2jax.observe import sample_names
from m2jax.pool.data_pool import DataPool
from m2jax.records import Completion, Trajectory, WorkItem
from m2jax.rl import rewards


def add_group(pool, item, successes, tokens=3, wall_s=0.5):
  """A group that ended; a success of None is an infrastructure failure."""
  pool.submit(WorkItem(item, 't', len(successes)))
  for rank, success in enumerate(successes):
    session = f'{item}.{rank}'
    pool.add_completion(
      Completion(
        id=f'{session}/0',
        session=session,
        turn=0,
        parent=None,
        fork_reason=None,
        prompt_ids=(1, rank),
        response_ids=(7,) * tokens,
        logprobs=(-1.0,) * tokens,
        versions=[*range(tokens)],
        finish_reason='stop',
        status='ok',
      )
    )
    end = 'answer' if success is not None else 'infrastructure'
    judged = success or 0.0
    pool.add_trajectory(
      Trajectory(session, item, rank, 't', 'f', end, judged, wall_s, 0)
    )
  pool.flush()


def take(pool, counts, items, step, version):
  for item in items:
    pool.complete(item)
  pool.take(items, step)
  groups = [pool.group(item) for item in items]
  credits_ = [rewards.advantages(group, rewards.RewardConfig()) for group in groups]
  counts.take(groups, credits_, lambda c: version - np.asarray(c.versions))


def of(counts, kind):
  """quantity → bin → number, of a kind."""
  found = collections.defaultdict(dict)
  for key, value in counts.items():
    name, _, label = key.partition('/')
    if name.startswith(kind + '_'):
      found[name.removeprefix(kind + '_')][label] = value
  return dict(found)


@pytest.fixture
def pool(tmp_path):
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    yield pool


def test_each_trajectory_is_counted_once(pool):
  counts = SampleCounts(pool)
  add_group(pool, 0, [1, 0, 0.5])
  add_group(pool, 1, [1, 1], tokens=9, wall_s=5.0)
  add_group(pool, 2, [0, None])
  add_group(pool, 3, [0, 1])
  take(pool, counts, [0, 1], step=1, version=6)
  pool.fail(3, 'deadline')
  found = counts.pop(head=2)
  assert of(found, 'generated') == {
    'age': {'2': 7, '8': 2},  # from its first to its last version
    'length': {'2': 7, '8': 2},
    'latency': {'0.5': 7, '4': 2},
    'outcome': {'solved': 4, 'partly': 1, 'failed': 3, 'infrastructure': 1},
  }
  assert of(found, 'trained') == {
    'age': {'4': 2},  # 6 versions since its first token
    'length': {'2': 2},
    'latency': {'0.5': 2},
    'outcome': {'solved': 1, 'failed': 1},
  }
  # The third of item 0 has the mean reward; item 1 equal ones; item 3 has failed.
  assert of(found, 'dropped')['outcome'] == {'partly': 1, 'solved': 3, 'failed': 1}
  assert counts.pop(head=2) == {}
  take(pool, counts, [2], step=2, version=6)
  found = counts.pop(head=4)
  assert of(found, 'generated') == {}
  assert of(found, 'dropped')['outcome'] == {'failed': 1, 'infrastructure': 1}


def test_a_restart_counts_what_its_checkpoint_did_not(pool):
  """Along the surviving lineage: all that ended since the checkpoint, once."""
  counts = SampleCounts(pool)
  add_group(pool, 0, [1, 0])
  add_group(pool, 1, [1])
  pool.fail(1, 'broke')
  before, state = counts.pop(head=0), counts.state
  add_group(pool, 2, [0])
  add_group(pool, 3, [0])
  pool.fail(3, 'broke')
  lost = counts.pop(head=0)
  again = SampleCounts(pool)
  again.restore(state)
  assert again.pop(head=0) == lost
  assert of(before, 'dropped')['outcome'] == {'solved': 1}
  assert of(lost, 'dropped')['outcome'] == {'failed': 1}
  new = SampleCounts(pool)
  new.restore({})
  everything = collections.Counter(before) + collections.Counter(lost)
  assert new.pop(head=0) == everything


def test_bins():
  label = sample_names.label
  assert [label('age', v) for v in (0, 1, 2, 3, 4, 7, 8)] == list('0122448')
  assert [label('latency', v) for v in (0.01, 0.0625, 0.9, 1.5)] == [
    *('0', '0.0625', '0.5', '1'),
  ]
