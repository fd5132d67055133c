"""PostgreSQL under faults: killed writers, a killed server, lost connections.

Law 5 over several processes: what was acknowledged is there, and every item is trained
once. Also: errors do not show passwords.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time

import psycopg
import pytest

from m2jax import records
from m2jax.pool import data_pool, database, leases
from m2jax.pool.data_pool import DataPool
from m2jax.pool.work_queue import WorkQueue
from tests import processes
from tests.pool import outage_worker
from tests.pool.test_data_pool import completion, play, trajectory

LEASE_S = 1.0


@pytest.fixture
def url(postgresql):
  return postgresql.new_url()


def start_worker(directory, url, name):
  return processes.popen('tests.pool.outage_worker', directory, url, name)


class Faults(threading.Thread):
  """Does to the server and the workers what `plan` says, as the work goes on.

  Attributes:
    plan: pairs of a number of trained items and a fault.
    error: what a fault raised.
  """

  def __init__(self, plan, trained):
    super().__init__(daemon=True)
    self.plan, self.error, self._trained = plan, None, trained

  def run(self):
    try:
      for count, fault in self.plan:
        while len(self._trained) < count:
          time.sleep(0.005)
        fault()
    except BaseException as error:
      self.error = error


def drain(directory, url, server, total, plan_of, workers=3):
  """Trains `total` items that worker processes run, under faults; returns the pool's
  view of them. `plan_of(killed, away)` makes the plan."""
  rng, trained, names = random.Random(0), [], iter(range(1000))
  running = [start_worker(directory, url, f'w{next(names)}') for _ in range(workers)]

  def kill_a_worker():
    victim = rng.randrange(workers)
    running[victim].kill()
    running[victim].wait()
    running[victim] = start_worker(directory, url, f'w{next(names)}')

  def away(seconds, end):
    def fault():
      end()
      time.sleep(seconds)
      server.start()

    return fault

  faults = Faults(plan_of(kill_a_worker, away), trained)
  faults.start()
  try:
    with DataPool(url, linger_s=0.01, outage_s=outage_worker.OUTAGE_S) as pool:
      learn(pool, total, trained, faults)
      (directory / 'stop').touch()
      assert [process.wait(60) for process in running] == [0] * workers
      check(pool, directory, total, trained)
  finally:
    for process in running:
      process.kill()
      process.wait()


def learn(pool, total, trained, faults):
  """The learner: submits, completes what was reported, reissues what was lost."""
  queue = WorkQueue(pool, 8, None)
  queue.resume(None)
  seen, deadline_s = {}, time.monotonic() + 120
  while len(trained) < total or faults.is_alive():
    assert time.monotonic() < deadline_s, (len(trained), faults.error)
    assert faults.error is None
    state = queue.state()
    if queue.next_index < total and state.pending + state.completed < queue.capacity:
      queue.submit(f'task {queue.next_index}', outage_worker.GROUP)
    for lease in pool.open_leases():
      before, since_s = seen.get(lease.index, (None, 0.0))
      if lease != before:
        seen[lease.index] = lease, time.monotonic()
      elif time.monotonic() - since_s > LEASE_S:
        queue.reissue(lease.index)
      if lease.report == leases.COMPLETE:
        queue.complete(lease.index)
    for taken in queue.take(1, len(trained) + 1, timeout_s=0.05):
      group = pool.group(taken.index)
      assert [t.rank for t, _ in group] == list(range(outage_worker.GROUP))
      for t, completions in group:
        assert [c.turn for c in completions] == list(range(outage_worker.TURNS))
        for c in completions:
          assert c == outage_worker.completion(t.session, c.turn, taken.index)
      assert len({t.session.rpartition('-')[0] for t, _ in group}) == 1
      trained.append(taken.index)


def check(pool, directory, total, trained):
  """Every item was trained once; every completion that was acknowledged is there."""
  assert sorted(trained) == list(range(total)) and pool.counts()['taken'] == total
  accepted = ''.join(f.read_text() for f in directory.glob('*.accepted')).split()
  assert len(accepted) == len(set(accepted)) >= 4 * total
  for id_ in accepted:
    session, _, turn = id_.partition('/')
    stored = [c for c in pool.completions(session) if c.id == id_]
    assert [c.turn for c in stored] == [int(turn)], id_


def test_writers_and_server_are_killed(postgresql, url, tmp_path):
  """SIGKILL of a writer, of a connection's process and of the server."""
  drain(
    tmp_path,
    url,
    postgresql,
    8,
    lambda kill, away: [
      (1, kill),
      (3, postgresql.kill_a_backend),
      (5, away(0.2, postgresql.kill)),
    ],
    workers=2,
  )


@pytest.mark.long
def test_faults_at_random(postgresql, url, tmp_path):
  """The same, 25 times at random; once the server is away for 10 s."""
  rng, total = random.Random(7), 200

  def plan(kill, away):
    kinds = [kill] * 6 + [postgresql.kill_a_backend] * 2 + [away(0, postgresql.stop)]
    counts = sorted(rng.sample(range(total), 25))
    found = [(count, rng.choice(kinds)) for count in counts]
    found[12] = counts[12], away(10.0, postgresql.kill)
    return found

  drain(tmp_path, url, postgresql, total, plan)


def test_calls_wait_for_a_server_that_is_away(postgresql, url):
  """What was added before and meanwhile is there afterwards, once; reads wait too."""
  with DataPool(url, linger_s=0.01) as pool:
    pool.submit(records.WorkItem(0, 't', 1))
    pool.add_completion(completion('s', 0))
    postgresql.stop()
    pool.add_completion(completion('s', 1))
    pool.add_trajectory(trajectory('s', 0))
    done, reads = [], []

    def wait(calls):
      for call in calls:
        done.append(call())

    threads = [
      threading.Thread(target=wait, args=([lambda: pool.complete(0), pool.flush],)),
      threading.Thread(target=lambda: reads.append(pool.next_index())),
    ]
    for thread in threads:
      thread.start()
    time.sleep(0.3)
    assert not done and not reads
    postgresql.start()
    for thread in threads:
      thread.join(60)
    assert done == [None, None] and reads == [1]
    ((_, completions),) = pool.group(0)
    assert [c.turn for c in completions] == [0, 1]
    assert pool.counts()['completed'] == 1


def test_a_server_that_stays_away(postgresql, url):
  """Then the job stops with the reason; the next one finds all that was accepted."""
  with DataPool(url, linger_s=0.01, outage_s=0.3) as pool:
    play(pool, 0)
    postgresql.stop()
    try:
      with pytest.raises(
        data_pool.PoolBroken, match=r'm2jax-pg.*no connection for 0.3'
      ):
        pool.take([0], step=1)
      with pytest.raises(data_pool.PoolBroken):
        pool.add_completion(completion('late'))
      with pytest.raises(data_pool.PoolBroken, match='no connection'):
        pool.next_index()
      with pytest.raises(data_pool.PoolBroken, match='no connection'):
        DataPool(url, outage_s=0.1)
    finally:
      postgresql.start()
  with DataPool(url) as pool:
    assert [i.index for i in pool.items('completed')] == [0]
    assert [len(c) for _, c in pool.group(0)] == [2, 2]


def lose_next_commit(pool, done):
  """The connection breaks in the pool's next commit, done or not; returns a list that
  then has an entry."""
  dialect = pool._database.engine.dialect
  commit, lost = dialect.do_commit, []

  def lose(connection):
    if lost:
      return commit(connection)
    lost.append(True)
    if done:
      commit(connection)
    connection.dbapi_connection.close()
    raise psycopg.OperationalError('server closed the connection unexpectedly')

  dialect.do_commit = lose
  return lost


@pytest.mark.parametrize('done', [True, False])
def test_a_connection_lost_in_the_commit(url, done):
  """Whether or not the server had committed, each call takes effect once."""
  with DataPool(url, linger_s=0.01) as pool:
    for index in range(3):
      pool.submit(records.WorkItem(index, 't', 1))
    lost = lose_next_commit(pool, done)
    pool.add_completion(completion('s'))
    (claim,) = pool.claim('a', 1)
    assert lost
    assert [(x.index, x.lease) for x in pool.open_leases()] == [(0, claim.lease)]
    pool.flush()  # nothing was rejected as a duplicate
    assert len(pool.completions('s')) == 1
    assert [c.item.index for c in pool.claim('b', 9)] == [1, 2]


@pytest.mark.parametrize('done', [True, False])
def test_late_records_are_counted_once(url, done):
  """Also if their transaction was repeated."""
  with DataPool(url, linger_s=0.01) as pool:
    pool.add_trajectory(trajectory('s', -1))
    pool.flush()
    lost = lose_next_commit(pool, done)
    pool.add_completion(completion('s'))
    pool.flush()
    assert lost and pool.counts()['late_completions'] == 1


def test_a_client_that_stops_in_a_transaction(url, monkeypatch):
  """It loses the transaction, and with it the lock that the others wait for."""
  with DataPool(url) as pool:
    pool.submit(records.WorkItem(0, 't', 1))
  monkeypatch.setattr(database, '_IDLE_S', 1)
  with DataPool(url) as stuck, DataPool(url, linger_s=0.01) as other:
    with contextlib.suppress(Exception), stuck._database.transaction() as connection:
      database.set_committed(connection, 'me', 1)
      assert len(other.claim('b', 1)) == 1
    assert stuck._database.read(lambda c: database.committed(c, 'me')) == 0


def test_writers_leave_nothing_behind(url):
  with DataPool(url) as pool:
    pool.submit(records.WorkItem(0, 't', 1))
  with DataPool(url) as pool:
    rows = pool._database.read(
      lambda c: c.exec_driver_sql('SELECT count(*) FROM writers').scalar()
    )
  assert rows == 0


def test_keys_are_compared_by_code_points(url):
  """Whatever the server's language, in which '-' and '.' may count for nothing."""
  with DataPool(url) as pool:
    collations = pool._database.read(
      lambda c: dict(
        c.exec_driver_sql(
          'SELECT column_name, collation_name FROM information_schema.columns '
          'WHERE table_schema = current_schema() '
          "AND column_name IN ('session', 'id', 'lease')"
        ).all()
      )
    )
  assert collations == {'session': 'C', 'id': 'C', 'lease': 'C'}


def test_what_waiting_does_not_cure_fails_at_once(postgresql, url):
  """Unlike a server that is away."""
  missing = url.replace('/postgres?', '/missing?')
  with pytest.raises(ValueError, match='cannot open it: .*does not exist'):
    DataPool(missing)


def test_processes_open_a_new_database_at_once(postgresql):
  """Each finds the tables or makes them."""
  url, runs = postgresql.new_url(), []

  def open_pool():
    with DataPool(url) as pool:
      runs.append(pool.run)

  threads = [threading.Thread(target=open_pool) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(runs) == 4 and len(set(runs)) == 1


SECRETS = (
  ('postgresql://me:secret@host:5432/pool', 'postgresql://me:***@host:5432/pool'),
  ('postgresql+psycopg://me:se/c:r@secret@h/p', 'postgresql+psycopg://me:***@h/p'),
  ('postgresql://h/p?user=me&password=secret&x=1', None),
  ('postgresql:/me:secret@host/pool', 'postgresql:***@host/pool'),
  ('postgresql://me:secret@host:port/pool', 'postgresql://me:***@host:port/pool'),
  ('postgresql://me@host/pool', 'postgresql://me@host/pool'),
  ('sqlite:////tmp/a:b/pool.db', 'sqlite:////tmp/a:b/pool.db'),
)


@pytest.mark.parametrize('url, shown', SECRETS)
def test_urls_are_shown_without_passwords(url, shown):
  assert 'secret' not in database.shown_url(url)
  assert shown is None or database.shown_url(url) == shown


@pytest.mark.parametrize(
  'url',
  [
    'postgresql://me:secret@127.0.0.1:1/pool',
    'postgresql://me:secret@127.0.0.1:port/pool',
    'mysql://me:secret@127.0.0.1/pool',
    'me:secret@127.0.0.1',
  ],
)
def test_errors_do_not_tell_the_password(url):
  wrong = ValueError, data_pool.PoolBroken
  with pytest.raises(wrong, match='data pool:? .*(me|mysql)') as raised:
    DataPool(url, outage_s=0.0)
  error = raised.value
  while error is not None:
    assert 'secret' not in str(error)
    error = error.__cause__
