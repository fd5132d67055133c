"""A pool read from its own lines is the same pool, on either database."""

from __future__ import annotations

import json

import numpy as np
import pytest

from m2jax.pool import database, jsonl
from m2jax.pool.data_pool import DataPool
from m2jax.records import TrajectoryReward, WorkItem
from tests.pool.test_data_pool import completion, play, trajectory


def lines_of(url):
  opened = database.open_read_only(url)
  try:
    return list(jsonl.lines(opened))
  finally:
    opened.close()


def load(url, lines):
  opened, _ = database.open_database(url)
  try:
    return jsonl.load(opened, lines)
  finally:
    opened.close()


@pytest.fixture
def used(url):
  """A pool with items in every state, a lineage more, pruned and superseded records."""
  with DataPool(url) as pool:
    pool.rollback(None)
    for index in range(4):
      play(pool, index)
    pool.take([0, 1], step=1)
    ledger = pool.ledger(1)
    pool.set_rewards({'0.0.0': TrajectoryReward(-1, 0.5, 1, 0.95)}, {'0.0.0/1': 0.2})
    pool.submit(WorkItem(4, 'four', 1))
    pool.fail(4, 'timed out')
    pool.submit(WorkItem(5, 'five', 1))
    ids = np.arange(10, dtype=np.int16).reshape(5, 1, 2)
    pool.add_completion(completion('half', experts=ids, overrides=('top_p',)))
    longer = dict(prompt_ids=(1, 2, 3, 4, 5, 9), parent='half/0', request=3)
    pool.add_completion(completion('half', 1, **longer))
    paid = dict(messages=({'role': 'user'},), rewards={'e/0': 0.5})
    pool.add_trajectory(trajectory('e', -1, **paid))
    pool.flush()
    pool.prune(ledger, keep_messages=3)
    pool.rollback(ledger)
    yield pool, url, ledger


def test_the_same_pool(used, new_url, tmp_path):
  pool, url, ledger = used
  lines = lines_of(url)
  for other in (new_url(), f'sqlite:///{tmp_path}/copy.db'):
    assert load(other, lines) == len(lines)
    assert lines_of(other) == lines
    with DataPool(other) as copy:
      assert copy.run == pool.run and copy.counts() == pool.counts()
      assert copy.lineages() == pool.lineages() and copy.failures() == pool.failures()
      for index in range(6):
        assert copy.group(index) == pool.group(index)
      for session in ('half', '2.0.1', '0.0.0'):
        assert copy.completions(session) == pool.completions(session)
        assert copy.turns(session) == pool.turns(session)
      (first, _) = copy.completions('half')
      np.testing.assert_array_equal(first.experts[:, 0, 1], [1, 3, 5, 7, 9])
      stored = copy.sample_trajectories(99)
      assert stored == pool.sample_trajectories(99)
      # The run continues on it.
      assert [i.attempt for i in copy.rollback(ledger)] == [2]
      play(copy, 5, attempt=2, group_size=1, submit=False)
      copy.submit(WorkItem(6, 'six', 1))


def test_what_is_no_pool(used, new_url):
  """The message names the line, and nothing is stored."""
  _, url, _ = used
  lines, empty = lines_of(url), new_url()
  for bad, message in (
    (lines[1:], 'line 1: .*first line'),
    ([*lines[:3], '{"kind": "thing"}'], "line 4: .*unknown kind 'thing'"),
    ([*lines[:3], '{"kind'], 'line 4'),
    ([lines[0].replace('"schema":1', '"schema":9')], 'line 1: .*reads schema 1'),
    ([*lines[:4], json.dumps({'kind': 'item', 'index': 77})], 'line 5'),
    ([], 'no lines'),
  ):
    with pytest.raises(ValueError, match=message):
      load(empty, bad)
  with pytest.raises(ValueError, match='has items already'):
    load(url, lines)
  with DataPool(empty) as pool:
    assert pool.next_index() == 0
  assert load(empty, lines) == len(lines)
