"""Pool and queue change together; deadlines; ages; a blocked write-ahead log."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time

import pytest

from m2jax.pool import data_pool, windowed_fifo
from m2jax.pool.data_pool import DataPool
from m2jax.pool.ledger import LineageOver
from m2jax.pool.work_queue import WorkQueue
from tests.pool.test_data_pool import completion, trajectory
from tests.waiting import wait_until


@pytest.fixture
def pool(url):
  with DataPool(url) as pool:
    yield pool


@contextlib.contextmanager
def queue_of(pool, *args, **options):
  queue = WorkQueue(pool, *args, **options)
  queue.resume(None)
  try:
    yield queue
  finally:
    queue.stop()


def roll(pool, queue, index, attempt=0):
  pool.add_completion(completion(f'{index}.{attempt}'))
  pool.add_trajectory(trajectory(f'{index}.{attempt}', index))
  return queue.complete(index)


def states(pool, queue):
  """(pending, completed, taken, failed) of both, which must agree."""
  found, counts = queue.state(), pool.counts()
  both = [
    (found.pending, counts['pending']),
    (found.completed, counts['completed']),
    (found.taken, counts['taken']),
    (found.failed, counts['failed']),
  ]
  assert all(a == b for a, b in both), both
  return tuple(a for a, _ in both)


def test_an_item_ends_once(pool):
  """A second change is rejected by both, and changes neither."""
  with queue_of(pool, 3, None) as queue:
    for _ in range(3):
      queue.submit('t', 1)
    with pytest.raises(windowed_fifo.Full):
      queue.submit('t', 1)
    assert states(pool, queue) == (3, 0, 0, 0)
    with pytest.raises(ValueError, match='0 of 1 trajectories'):
      queue.complete(0)
    assert states(pool, queue) == (3, 0, 0, 0)
    assert queue.fail(0, 'broke') and not roll(pool, queue, 0)
    assert (queue.failed_in_a_row, queue.last_failure) == (1, 'broke')
    assert roll(pool, queue, 1) and not queue.fail(1, 'late')
    assert queue.failed_in_a_row == 0
    assert states(pool, queue) == (1, 1, 0, 1)
    assert [t.index for t in queue.take(1, step=1, timeout_s=0)] == [1]
    assert queue.take(1, step=2, timeout_s=0) == []
    assert pool.failures() == {0: 'broke'}
    queue.close()
    with pytest.raises(RuntimeError, match='close'):
      queue.submit('t', 1)
    assert pool.next_index() == 3


def test_two_learners(url):
  """A second learner on the pool, of a copied workdir or where the file system has no
  locks: from its start on the first one's calls change nothing, whatever it does next,
  and it finds out at once."""
  with DataPool(url) as old_pool, DataPool(url) as new_pool:
    with queue_of(old_pool, 6, None) as old:
      for _ in range(5):
        old.submit('t', 1)
      assert roll(old_pool, old, 0) and roll(old_pool, old, 1)
      with queue_of(new_pool, 6, None) as new:
        assert [item.index for item in new_pool.items('pending')] == [2, 3, 4]
        assert [t.index for t in new.take(1, step=1, timeout_s=0)] == [0]
        calls = {
          'take the same': lambda: old.take(1, step=1, timeout_s=0),
          'take another': lambda: old.take(1, step=1, timeout_s=0),
          'complete': lambda: roll(old_pool, old, 2),
          'fail': lambda: old.fail(3, 'broke'),
          'reissue': lambda: old.reissue(4),
          'submit': lambda: old.submit('t', 1),
          'checkpoint': lambda: old_pool.ledger(1),
          'prune': lambda: old_pool.prune(data_pool.Ledger(head=5, next_index=5)),
        }
        for name, call in calls.items():
          with pytest.raises(LineageOver, match='lineage 1 after 0'):
            call()
            raise AssertionError(name)
        old_pool.set_rewards({}, {'1.0/0': 5.0})
        old_pool.flush()
        assert [t.advantage for t in new_pool.turns('1.0')] == [None]
        # What its agents still record does not take the place of the new attempt.
        assert roll(new_pool, new, 2, attempt=1)
        ((trained, _),) = new_pool.group(2)
        assert trained.session == '2.1'
        assert [len(c) for _, c in new_pool.group(1)] == [1]  # nothing was pruned
        new.submit('t', 1)
        assert states(new_pool, new) == (3, 2, 1, 0)


def test_deadline(pool):
  """The head hangs under a strict window: at its deadline it fails in pool and queue
  with the reason, is reported once, and the window moves; items in time do not fail."""
  expired = []
  options = dict(deadline_s=2.0, on_expired=expired.append)
  with queue_of(pool, 4, 1, **options) as queue:
    for _ in range(3):
      queue.submit('t', 1)
    assert roll(pool, queue, 1) and roll(pool, queue, 2)
    assert queue.take(1, step=1, timeout_s=0) == []
    assert [t.index for t in queue.take(2, step=1, timeout_s=30)] == [1, 2]
    wait_until(lambda: expired)
    assert pool.failures() == {0: 'not complete after 2 s'} and expired == [0]
    assert not roll(pool, queue, 0)  # its group ends too late
    pool.flush()
    assert pool.counts()['late_trajectories'] == 1
    assert states(pool, queue) == (0, 0, 2, 1)


def test_reissued_items_have_a_deadline(url):
  """After a restart it counts from the reissue."""
  with DataPool(url) as pool, queue_of(pool, 4) as queue:
    queue.submit('t', 1)
  with DataPool(url) as pool:
    with queue_of(pool, 4, deadline_s=0.2) as queue:
      assert [item.attempt for item in pool.items('pending')] == [1]
      wait_until(lambda: queue.state().failed)
      assert states(pool, queue) == (0, 0, 0, 1)


def test_every_end_at_once(pool):
  """Completions, failures and deadlines race for the same items: each retires once,
  equally in both, and everything that completed can be taken."""
  items = 30
  with queue_of(pool, items, None, deadline_s=0.25) as queue:
    for _ in range(items):
      queue.submit('t', 1)
    ends, start = [], threading.Barrier(2)

    def run(end):
      start.wait()
      for index in range(items):
        ends.append(end(index))
        time.sleep(0.01)

    threads = [
      threading.Thread(target=run, args=(lambda i: roll(pool, queue, i),)),
      threading.Thread(target=run, args=(lambda i: queue.fail(i, 'broke'),)),
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    wait_until(lambda: not queue.state().pending)
    _, completed, _, failed = states(pool, queue)
    assert completed + failed == items and sum(ends) <= items
    if completed:
      assert len(queue.take(completed, step=1, timeout_s=0)) == completed
    states(pool, queue)


def test_age_over_restarts(url):
  """Age counts items taken between submission and taking in the surviving history: it
  does not restart at a restart, and rolled-back items are not counted twice."""
  with DataPool(url) as pool, queue_of(pool, 4, 2) as queue:
    for _ in range(4):
      queue.submit('t', 1)
    for index in range(4):
      roll(pool, queue, index)
    assert [t.age_items for t in queue.take(1, step=1)] == [0]
    ledger = pool.ledger(1)
    assert [t.age_items for t in queue.take(2, step=2)] == [1, 2]
    assert queue.submit('t', 1).taken_before == 3
    roll(pool, queue, 4)
  with DataPool(url) as pool:
    queue = WorkQueue(pool, 4, 2)
    assert queue.resume(ledger) == []
    # 1 and 2 are taken again, and item 4 has been waiting since before that
    assert [tuple(t[:2]) for t in queue.take(4, step=2)] == [
      (1, 1),
      (2, 2),
      (3, 3),
      (4, 3),
    ]


def test_a_log_that_a_reader_holds_up_is_noticed(tmp_path):
  """A reader that never ends blocks the checkpoint of the write-ahead log: the ledger
  counts it each time, until the reader has ended. SQLite only."""
  with (
    DataPool(f'sqlite:///{tmp_path}/pool.db') as pool,
    queue_of(pool, 4) as queue,
  ):
    queue.submit('t', 1)
    pool.ledger()
    assert pool.counts()['missed_syncs'] == 0
    reader = sqlite3.connect(tmp_path / 'pool.db')
    reader.execute('BEGIN')
    reader.execute('SELECT count(*) FROM items').fetchone()
    queue.submit('t', 1)
    pool.ledger()
    queue.submit('t', 1)
    pool.ledger()
    assert pool.counts()['missed_syncs'] == 2
    reader.close()
    pool.ledger()
    assert pool.counts()['missed_syncs'] == 2
