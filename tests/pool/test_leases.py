"""Items that other processes run: one lease an item, one report, whatever is lost."""

from __future__ import annotations

import random
import threading
import time

import pytest

from m2jax import records
from m2jax.pool import leases
from m2jax.pool.data_pool import DataPool
from m2jax.pool.work_queue import WorkQueue


@pytest.fixture
def pool(url):
  """The pool of the queue's process."""
  with DataPool(url, linger_s=0.01) as pool:
    yield pool


@pytest.fixture
def other(url, pool):
  """The same pool as another process has it."""
  with DataPool(url, linger_s=0.01) as other:
    yield other


def queue_of(pool, items=4, **options):
  queue = WorkQueue(pool, 12, None, **options)
  queue.resume(None)
  for index in range(items):
    queue.submit(f'task {index}', 2)
  return queue


def completion(session, turn=0, **fields):
  fields = dict(versions=(0,), lineage=0) | fields
  return records.Completion(
    id=f'{session}.{turn}',
    session=session,
    turn=turn,
    parent=None,
    fork_reason=None,
    prompt_ids=(1, 2),
    response_ids=(3,),
    logprobs=(-0.5,),
    finish_reason='stop',
    status='ok',
    **fields,
  )


def play(gateway, claim, ranks=2):
  """Records a completion of each episode; returns the group's trajectories."""
  item, out = claim.item, []
  for rank in range(ranks):
    session = f'{item.session_prefix}-{claim.lease[-8:]}{rank}'
    gateway.record_completion(completion(session)).result(10)
    out.append(
      records.Trajectory(
        session, item.index, rank, item.task, 'toy', 'answer', 1.0, 0.1, 1
      )
    )
  return out


def test_the_oldest_items_are_claimed_once(pool, other):
  queue_of(pool)
  first, second = other.claim('a', 3), pool.claim('b', 3)
  assert [c.item.index for c in first] == [0, 1, 2]
  assert [c.item.index for c in second] == [3]
  assert not other.claim('c', 3)
  assert first[0].item.task == 'task 0' and first[0].lease.startswith('a/')
  assert [x.index for x in pool.open_leases()] == [0, 1, 2, 3]


def test_a_reported_group_is_trained(pool, other):
  """The completions that another process committed are there with the report."""
  queue = queue_of(pool, 1)
  (claim,) = other.claim('a', 1)
  assert other.report(claim, play(other, claim))
  (lease,) = pool.open_leases()
  assert lease.report == leases.COMPLETE
  assert queue.complete(0) and [t.index for t in queue.take(1, 1, 1.0)] == [0]
  group = pool.group(0)
  assert [t.rank for t, _ in group] == [0, 1]
  assert all(len(completions) == 1 for _, completions in group)


def test_a_report_counts_once(pool, other):
  """Sent again, or by one whose lease was lost, it records nothing."""
  queue = queue_of(pool, 1)
  (stale,) = other.claim('a', 1)
  late = play(other, stale)
  assert queue.reissue(0)
  assert other.heartbeat([stale.lease]) == set()
  (claim,) = other.claim('b', 1)
  assert claim.item.attempt == 1 and claim.lease != stale.lease
  assert not other.report(stale, late)
  mine = play(other, claim)
  assert other.report(claim, mine)
  assert not other.report(claim, mine)
  assert not other.report(stale, late)
  assert queue.complete(0)
  assert not other.report(claim, mine)  # nor once the item has retired
  assert {t.session for t, _ in pool.group(0)} == {t.session for t in mine}


def test_reissue_supersedes_what_the_lost_attempt_recorded(pool, other):
  """Also the completions of episodes that never ended; of this attempt only."""
  queue = queue_of(pool, 12)
  claims = {c.item.index: c for c in other.claim('a', 12)}
  for index in (1, 11):  # 'rl-1-0' is a prefix of no session of item 11
    play(other, claims[index])
  assert queue.reissue(1)
  live = {i: claims[i].item.session_prefix for i in (1, 11)}
  superseded = {
    i: [t.superseded for t in pool.turns(f'{p}-{claims[i].lease[-8:]}0')]
    for i, p in live.items()
  }
  assert superseded == {1: [True], 11: [False]}


def test_heartbeats(pool, other):
  queue = queue_of(pool, 2)
  a, b = other.claim('a', 2)
  before = {x.lease: x.beats for x in pool.open_leases()}
  assert other.heartbeat([a.lease, b.lease, 'unknown']) == {a.lease, b.lease}
  after = {x.lease: x.beats for x in pool.open_leases()}
  assert after == {lease: beats + 1 for lease, beats in before.items()}
  queue.fail(0, 'deadline')
  assert other.heartbeat([a.lease, b.lease]) == {b.lease}
  assert not other.report(a, play(other, a))
  assert pool.failures() == {0: 'deadline'}


def test_a_restart_finds_the_reports_that_came_meanwhile(url, pool, other):
  """Complete groups stay complete; what was running or failed is another attempt."""
  queue_of(pool, 3)
  done, running, failed = other.claim('a', 3)
  assert other.report(done, play(other, done))
  assert other.report(failed, [], leases.AGAIN + 'no gateway')
  with DataPool(url) as again:
    queue = WorkQueue(again, 8, None)
    assert [(i.index, i.attempt) for i in queue.resume(None)] == [(1, 1), (2, 1)]
    assert queue.state().completed == 1
    assert not other.report(running, play(other, running))
    assert [c.item.attempt for c in other.claim('b', 9)] == [1, 1]


def test_a_report_without_all_trajectories_is_run_again(url, pool, other):
  """Which no agents' process sends; complete() would not accept it either."""
  queue = queue_of(pool, 1)
  (claim,) = other.claim('a', 1)
  assert other.report(claim, play(other, claim, ranks=1))
  with pytest.raises(ValueError, match='1 of 2 trajectories'):
    queue.complete(0)
  with DataPool(url) as again:
    assert [i.attempt for i in WorkQueue(again, 8, None).resume(None)] == [1]


def test_a_report_that_means_nothing(pool, other):
  queue_of(pool, 1)
  (claim,) = other.claim('a', 1)
  with pytest.raises(ValueError, match='must begin with'):
    other.report(claim, [], 'broken')
  assert pool.open_leases()[0].report is None


def test_completions_keep_the_lineage_of_their_weights(pool, other):
  """The gateway's pool has not begun a lineage of its own."""
  queue_of(pool, 1)
  other.record_completion(completion('s', lineage=3)).result(10)
  assert pool.completions('s')[0].lineage == 3


def test_abandoned_completions_are_pruned(pool, other):
  """Token ids of an agent that was killed do not stay forever; those in use do."""
  queue_of(pool, 1)
  other.record_completion(completion('old', started_s=1.0)).result(10)
  (claim,) = other.claim('a', 1)
  other.report(claim, play(other, claim))
  pool.complete(0)
  assert pool.prune(pool.ledger()) == 0
  assert pool.prune(pool.ledger(), abandoned_s=3600) == 1
  assert not pool.completions('old')
  assert all(completions for _, completions in pool.group(0))


@pytest.mark.parametrize('lineage, steps', [(0, [-1, 0, 7]), (1, [-1]), (900, [5, 4])])
def test_policy_versions(lineage, steps):
  """One number for a version, higher for later ones."""
  numbers = [records.policy_version(lineage, step) for step in steps]
  found, back = records.split_versions(numbers)
  assert found == lineage and back.tolist() == steps
  assert max(numbers) < records.policy_version(lineage + 1, -1) < 2**31


def test_versions_of_two_lineages():
  mixed = [records.policy_version(0, 3), records.policy_version(1, 2)]
  with pytest.raises(ValueError, match=r'lineages \[0, 1\]'):
    records.split_versions(mixed)
  assert records.split_versions([])[0] == 0


def test_claims_race(url, pool):
  """Several workers claim, lose leases and report at random: each item completes once,
  with the trajectories of one attempt."""
  items, errors = 24, []
  queue = WorkQueue(pool, items, None)
  queue.resume(None)
  for index in range(items):
    queue.submit(f'task {index}', 2)
  finished = threading.Event()

  def work(seed):
    rng = random.Random(seed)
    try:
      with DataPool(url, linger_s=0.01) as mine:
        while not finished.is_set():
          for claim in mine.claim(str(seed), 2):
            trajectories = play(mine, claim)
            if rng.random() < 0.3:
              continue  # killed before its report
            assert mine.report(claim, trajectories) in (True, False)
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
  for thread in threads:
    thread.start()
  completed, rng = [], random.Random(9)
  while len(completed) < items and not errors:
    for lease in pool.open_leases():
      if lease.report == leases.COMPLETE:
        completed.append(lease.index)
        assert queue.complete(lease.index)
      elif rng.random() < 0.1:
        queue.reissue(lease.index)  # also of some that are alive
    time.sleep(0.005)
  finished.set()
  for thread in threads:
    thread.join()
  assert not errors and sorted(completed) == list(range(items))
  for index in range(items):
    group = pool.group(index)
    assert [t.rank for t, _ in group] == [0, 1]
    assert len({t.session.rpartition('-')[0] for t, _ in group}) == 1
    assert all(len(completions) == 1 for _, completions in group)
