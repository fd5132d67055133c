"""The data pool: round trips, states, law 5 against a model, failures."""

import contextlib
import dataclasses
import pathlib
import sqlite3
import threading

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from m2jax.pool import data_pool, database, windowed_fifo
from m2jax.pool.data_pool import DataPool, Ledger
from m2jax.pool.ledger import LedgerMismatch
from m2jax.pool.work_queue import WorkQueue
from m2jax.records import Completion, Trajectory, WorkItem
from m2jax.rl.rewards import TrajectoryReward


@pytest.fixture
def pool(url):
  with DataPool(url) as pool:
    yield pool


def completion(key, turn=0, **fields):
  defaults = dict(
    id=f'{key}/{turn}',
    session=key,
    turn=turn,
    parent=None,
    fork_reason=None,
    prompt_ids=(1, 2, 3),
    response_ids=(4, 5),
    logprobs=(-0.5, -1.25),
    versions=(7, 8),
    finish_reason='stop',
    status='ok',
  )
  return Completion(**defaults | fields)


def trajectory(session, item, rank=0, **fields):
  defaults = dict(
    task='count lines', family='count', end_reason='answer', success=1.0, wall_s=0.5
  )
  return Trajectory(session, item, rank, tool_calls=2, **defaults | fields)


def play(pool, index, group_size=2, attempt=0, submit=True):
  """One whole group, from submission to completion."""
  if submit:
    pool.submit(WorkItem(index, f'task {index}', group_size))
  for rank in range(group_size):
    session = f'{index}.{attempt}.{rank}'
    pool.add_completion(completion(session, 0))
    pool.add_completion(completion(session, 1))
    messages = ({'role': 'user', 'content': 'go'},)
    pool.add_trajectory(trajectory(session, index, rank, messages=messages))
  pool.complete(index)


def execute(url, *statements):
  """Runs statements outside the pool, each in its own transaction."""
  url = url.replace('postgresql:', 'postgresql+psycopg:')
  engine = sa.create_engine(url, isolation_level='AUTOCOMMIT')
  try:
    with engine.connect() as connection:
      found = [connection.exec_driver_sql(x) for x in statements]
      return found[-1].scalar() if found[-1].returns_rows else None
  finally:
    engine.dispose()


def sessions(pool, **which):
  """Of all live trajectories that have messages, the oldest first."""
  stored = pool.sample_trajectories(10**6, **which)
  return [s.trajectory.session for s in stored]


# --- Records ---

IDS = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(
  st.characters(exclude_categories=['Cs'], exclude_characters='\0'), max_size=30
)
JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(max_size=10),
  lambda x: (
    st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3)
  ),
  max_leaves=5,
)


@st.composite
def completions(draw):
  n = draw(st.integers(0, 400))  # both below and above the size that is compressed
  single = draw(st.booleans())
  logprob = st.floats(-50, 0, width=32 if single else 64)

  def many(values):
    return tuple((draw(st.lists(values, min_size=1, max_size=8)) * n)[:n])

  prompt_ids = tuple(draw(st.lists(IDS, max_size=50)))
  experts = None
  if draw(st.booleans()):
    shape = len(prompt_ids) + n, draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    experts = rng.integers(-1, 2**15, shape).astype(np.int16)
  return completion(
    's',
    turn=draw(st.integers(0, 1000)),
    parent=draw(st.none() | TEXT),
    fork_reason=draw(st.none() | TEXT),
    follows=draw(st.none() | TEXT),
    prompt_ids=prompt_ids,
    response_ids=many(IDS),
    logprobs=many(logprob),
    versions=many(st.integers(0, 2**31 - 1)),
    finish_reason=draw(st.sampled_from(['stop', 'length', 'cancelled'])),
    status=draw(TEXT),
    overrides=draw(st.sampled_from([(), ('top_p',), ('temperature', 'top_k')])),
    request=draw(st.integers(0, 1000)),
    started_s=draw(st.floats(0, 2e9)),
    ended_s=draw(st.floats(0, 2e9)),
    experts=experts,
  )


@pytest.fixture(scope='module')
def shared(new_url):
  """One pool for a property that needs many records but no clean state."""
  with DataPool(new_url()) as pool:
    pool.counter = iter(range(10**6))
    yield pool


@given(
  c=completions(),
  messages=st.lists(st.dictionaries(TEXT, JSON, max_size=3)),
  earned=st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False)),
)
def test_records_come_back_exactly(shared, c, messages, earned):
  """Round trips preserve every bit of log-probabilities and the sign of ids (law 4),
  and expert ids if there are any."""
  session = f's{next(shared.counter)}'
  c = dataclasses.replace(c, id=session, session=session)
  t = trajectory(session, -1, messages=tuple(messages), answer='é', end_reason='length')
  t = dataclasses.replace(t, rewards=earned)
  shared.add_completion(c)
  shared.add_trajectory(t)
  shared.flush()
  (got,) = shared.completions(session)
  assert got == c
  assert (got.experts is None) == (c.experts is None)
  if c.experts is not None:
    np.testing.assert_array_equal(got.experts, c.experts)
  stored = shared.sample_trajectories(10**6)[-1]
  assert (stored.trajectory, stored.reward, stored.superseded) == (t, None, False)


def test_ids_of_a_session_include_what_is_queued(pool):
  """A client is paid for the answer that it just got."""
  for turn in range(2):
    pool.add_completion(completion('paid', turn))
  pool.add_completion(completion('other'))
  assert pool.completion_ids('paid') == {'paid/0', 'paid/1'}
  assert pool.completion_ids('none') == set()


def test_hostile_text_is_kept_readable(pool):
  """Law 9: tool output with NUL or lone surrogates costs neither job nor record."""
  messages = ({'role': 'tool', 'content': 'a\0b\udc80'},)
  t = trajectory('s', -1, answer='x\0\udcff', error='\udc80', messages=messages)
  pool.add_trajectory(t)
  pool.flush()
  (stored,) = pool.sample_trajectories(1)
  got = stored.trajectory
  assert got.messages == messages and got.answer == 'x\ufffd?' and got.error == '?'


def test_untrainable_completions_are_refused(pool):
  """Nothing is silently padded (law 4): wrong lengths and non-numbers raise at once."""
  for field, value in (
    ('logprobs', (-1.0,)),
    ('versions', (1, 2, 3)),
    ('logprobs', (-1.0, float('nan'))),
    ('logprobs', (-1.0, float('-inf'))),
    ('experts', np.zeros((4, 1, 1), np.int16)),
    ('experts', np.zeros((5, 1, 1), np.int64)),
    ('experts', np.zeros((5, 1), np.int16)),
  ):
    with pytest.raises(ValueError, match=field):
      pool.add_completion(completion('s', **{field: value}))
  pool.flush()
  assert pool.completions('s') == []


def test_ids_are_unique(pool, url):
  """An id added twice raises: at once, or at flush when another process added it first.

  Other rows of the batch are unaffected.
  """
  pool.add_completion(completion('s'))
  pool.add_trajectory(trajectory('s', -1))
  with pytest.raises(data_pool.Duplicate, match='s/0'):
    pool.add_completion(completion('s'))
  with pytest.raises(data_pool.Duplicate, match='trajectory s'):
    pool.add_trajectory(trajectory('s', -1))
  pool.close()
  with DataPool(url) as pool:
    for turn in range(3):
      pool.add_completion(completion('s', turn, session='other'))
    pool.add_trajectory(trajectory('s', -1))
    pool.add_trajectory(trajectory('other', -1))
    with pytest.raises(data_pool.Rejected, match='rejected 2 records'):
      pool.flush()
    assert [c.turn for c in pool.completions('other')] == [1, 2]
    assert sessions(pool) == ['s', 'other']
    pool.flush()  # reported once


# --- Items ---


def test_states(pool):
  """An item goes pending, completed, taken; any other way raises, changing nothing."""
  play(pool, 0)
  pool.submit(WorkItem(1, 't', 1))
  for call, message in (
    (
      lambda: pool.submit(WorkItem(1, 't', 1)),
      'must be the next index of the stream, 2',
    ),
    (
      lambda: pool.submit(WorkItem(3, 't', 1)),
      'must be the next index of the stream, 2',
    ),
    (lambda: pool.submit(WorkItem(2, 't', 0)), 'group_size=0'),
    (lambda: pool.complete(0), 'item 0 is completed, not pending'),
    (lambda: pool.complete(9), 'item 9 was never submitted'),
    (lambda: pool.complete(1), 'item 1 has 0 of 1 trajectories'),
    (lambda: pool.fail(0, 'late'), 'item 0 is completed'),
    (lambda: pool.take([0, 1], 1), 'item 1 is pending, not completed'),
    (lambda: pool.take([0, 0], 1), 'twice'),
  ):
    with pytest.raises(ValueError, match=message):
      call()
  assert [i.index for i in pool.items('completed')] == [0]
  pool.take([0], step=1)
  with pytest.raises(ValueError, match='item 0 is taken'):
    pool.take([0], step=2)
  pool.fail(1, 'timed out')
  assert pool.failures() == {1: 'timed out'}
  counts = pool.counts()
  assert (counts['taken'], counts['failed'], counts['pending']) == (1, 1, 0)
  assert pool.next_index() == 2


def test_group(pool):
  """A group is returned by rank and turn, without records of other groups."""
  pool.submit(WorkItem(0, 't', 2))
  play(pool, 1)
  for rank in (1, 0):
    for turn in (1, 0, 2):
      pool.add_completion(completion(f'g{rank}', turn))
    pool.add_trajectory(trajectory(f'g{rank}', 0, rank))
  pool.complete(0)
  group = pool.group(0)
  assert [t.session for t, _ in group] == ['g0', 'g1']
  assert [[c.id for c in cs] for _, cs in group] == [
    [f'g{rank}/{turn}' for turn in range(3)] for rank in range(2)
  ]
  assert pool.group(7) == []


def test_one_trajectory_per_rank(pool):
  """Two episodes of one rank would train one task twice: the second is rejected."""
  pool.submit(WorkItem(0, 't', 2))
  pool.add_trajectory(trajectory('a', 0, 0))
  pool.add_trajectory(trajectory('b', 0, 0))
  with pytest.raises(data_pool.Rejected, match='rejected 1'):
    pool.flush()
  with pytest.raises(ValueError, match='1 of 2 trajectories'):
    pool.complete(0)


def test_late_records_are_not_trained(pool):
  """No agent acted on records that arrive after the end of a session or its item."""
  pool.submit(WorkItem(0, 't', 1))
  pool.add_completion(completion('s', 0))
  pool.add_trajectory(trajectory('s', 0))
  pool.add_completion(completion('s', 1))  # in the same batch, but after the end
  pool.complete(0)
  pool.add_completion(completion('s', 2))
  pool.add_trajectory(trajectory('straggler', 0, 1))
  pool.flush()
  ((_, trained),) = pool.group(0)
  assert [c.turn for c in trained] == [0]
  assert len(pool.completions('s')) == 3  # stored for reports
  counts = pool.counts()
  assert (counts['late_completions'], counts['late_trajectories']) == (2, 1)


# --- Law 5 ---


def test_rollback(pool, url):
  """A worked example: each state of an item, before and after the checkpoint."""
  for i in range(4):
    play(pool, i)
  pool.submit(WorkItem(4, 'five', 2))
  pool.take([0, 2], step=1)
  ledger = pool.ledger(step=1)
  assert ledger == Ledger(head=1, taken=(2,), next_index=5, step=1, run=pool.run)
  pool.take([1], step=2)
  assert pool.ledger(step=1) == ledger  # taken ahead of the checkpoint's step
  play(pool, 5)
  pool.submit(WorkItem(6, 'seven', 2, taken_before=3))
  pool.add_completion(completion('half', 0))
  pool.add_completion(completion('done', 0))
  pool.add_trajectory(trajectory('done', 4, 0))
  pool.submit(WorkItem(7, 'eight', 2))
  pool.fail(7, 'timed out')
  pool.close()

  with DataPool(url) as pool:
    again = pool.rollback(Ledger.from_dict(ledger.to_dict()))
    # 3 were taken before item 6 was submitted; one of them is taken again after it
    assert again == [WorkItem(4, 'five', 2, 1), WorkItem(6, 'seven', 2, 1, 2)]
    assert [i.index for i in pool.items('completed')] == [1, 3, 5]
    assert [i.index for i in pool.items('taken')] == [0, 2]
    assert pool.failures() == {7: 'timed out'} and pool.next_index() == 8
    assert pool.group(4) == []  # the old attempt is superseded, but still readable
    assert [len(pool.completions(s)) for s in ('half', 'done')] == [1, 1]
    play(pool, 4, attempt=1, submit=False)
    assert [t.session for t, _ in pool.group(4)] == ['4.1.0', '4.1.1']
    # Even if a session's key is reused, its old completions are not trained.
    pool.add_completion(completion('half', 1))
    pool.add_trajectory(trajectory('half', 6, 0))
    pool.flush()
    ((_, trained),) = pool.group(6)
    assert [c.turn for c in trained] == [1]

  with DataPool(url) as pool:  # no checkpoint was made: everything is undone
    assert [i.index for i in pool.rollback(None)] == [6]
    assert [i.index for i in pool.items('completed')] == [0, 1, 2, 3, 4, 5]


OPS = st.lists(
  st.sampled_from(
    ['submit'] * 4 + ['complete'] * 4 + ['fail', 'save', 'crash'] + ['take'] * 3
  ),
  max_size=40,
)


@given(OPS, st.randoms(use_true_random=False), st.sampled_from([1, 2, 4, None]))
def test_exactly_once(new_url, ops, rng, window):
  """Law 5 on random histories: work, checkpoints, crashes in any order; then drained.

  The lineage is a list of trained ids that a crash resets to its last checkpoint. The
  pool is reopened after each crash; test_kill.py does this with real processes.
  """
  url = new_url()
  weights, step, failed = [], 0, set()
  saved = ([], 0, None)
  attempts = {}

  def open_queue(ledger):
    pool = DataPool(url)
    queue = WorkQueue(pool, 6, window)
    for item in queue.resume(ledger):
      attempts[item.index] += 1
      assert item.attempt == attempts[item.index]
    return pool, queue

  pool, queue = open_queue(None)

  def step_once(op):
    nonlocal pool, queue, weights, step, saved
    pending = [item.index for item in pool.items('pending')]
    if op == 'submit':
      with contextlib.suppress(windowed_fifo.Full):
        attempts[queue.submit('t', 1).index] = 0
    elif op == 'complete' and pending:
      index = rng.choice(pending)
      session = f'{index}.{attempts[index]}'
      pool.add_completion(completion(session))
      pool.add_trajectory(trajectory(session, index))
      assert queue.complete(index)
      assert not queue.fail(index, 'too late')
    elif op == 'fail' and pending:
      index = rng.choice(pending)
      assert queue.fail(index, 'broke')
      assert not queue.complete(index)
      failed.add(index)
    elif op == 'take':
      step += 1
      for _ in range(2):
        for index, age_items, _ in queue.take(1, step, timeout_s=0):
          ((t, _),) = pool.group(index)
          assert t.session == f'{index}.{attempts[index]}'
          assert 0 <= age_items <= len(weights)
          weights.append(index)
    elif op == 'save':
      saved = (list(weights), step, pool.ledger(step))
    elif op == 'crash':
      pool.close()
      weights, step = list(saved[0]), saved[1]
      pool, queue = open_queue(saved[2])

  for op in ops:
    step_once(op)
  while queue.state().pending or queue.state().completed:
    step_once('complete')
    step_once('take')
  pool.close()
  assert sorted(weights) == sorted(set(attempts) - failed)


def test_ledger_must_fit(pool, new_url):
  """A checkpoint of another pool, or of a younger one, must not be trained on twice."""
  play(pool, 0)
  pool.take([0], step=1)
  ledger = pool.ledger(1)
  with DataPool(new_url()) as other:
    with pytest.raises(LedgerMismatch, match='belongs to pool'):
      other.rollback(ledger)
    with pytest.raises(LedgerMismatch, match='has 1 items, the pool 0'):
      other.rollback(dataclasses.replace(ledger, run=''))
  with pytest.raises(LedgerMismatch, match='has 5 items'):
    pool.rollback(dataclasses.replace(ledger, next_index=5))
  # A pool that lost its last commits but not the item: still never trained twice.
  ahead = dataclasses.replace(ledger, head=1, next_index=1)
  pool.rollback(None)
  assert pool.rollback(ahead) == [] and pool.counts()['taken'] == 1


def test_prune_keeps_what_a_restart_needs(pool):
  """A long run's file stays bounded, and roll-back to the pruned ledger still works."""
  pool.add_trajectory(trajectory('old evaluation', -1, messages=({},)))
  pool.add_completion(completion('old evaluation'))
  for i in range(4):
    play(pool, i)
  pool.take([0], step=1)
  first = pool.ledger(1)
  pool.take([1], step=2)
  second = pool.ledger(2)
  pool.take([2], step=3)
  assert pool.prune(second, keep_messages=3) == 9
  assert pool.completions('1.0.0') == [] == pool.completions('old evaluation')
  # of 9 trajectories every fourth, and the live items'
  assert sessions(pool) == ['1.0.0', '2.0.0', '2.0.1', '3.0.0', '3.0.1']
  assert [len(pool.turns(f'{i}.0.0')) for i in range(4)] == [0, 2, 2, 2]
  assert pool.prune(second) == 0
  with pytest.raises(LedgerMismatch, match='were pruned'):
    pool.rollback(first)
  assert pool.rollback(second) == []
  assert [len(cs) for _, cs in pool.group(2)] == [2, 2]


def began(session, started_s, turns=2, **fields):
  """Completions of a session, each of which extends the one before."""
  for turn in range(turns):
    parent = f'{session}/{turn - 1}' if turn else None
    tokens = np.random.default_rng(turn).integers(0, 9999, 50 * (turn + 1))
    yield completion(
      *(session, turn), parent=parent, started_s=started_s + turn, prompt_ids=tokens
    )


def test_forgetting_the_oldest_sessions(pool):
  """Whole sessions by age, number and bytes; nothing that belongs to an item."""
  play(pool, 0)
  for i in range(6):
    for c in began(f's{i}', 100.0 * i):
      pool.add_completion(c)
  for i in (0, 3):
    pool.add_trajectory(trajectory(f's{i}', -1))
  for i in range(3):
    pool.add_trajectory(trajectory(f'nothing{i}', -1))
  most = dict(before_s=0.0, keep_sessions=100, keep_bytes=1 << 40)
  assert pool.forget(**most) == 0
  assert pool.forget(**most | {'before_s': 150.0}) == 2
  left = lambda: [i for i in range(6) if pool.completions(f's{i}')]
  assert left() == [2, 3, 4, 5]
  assert pool.forget(**most | {'keep_sessions': 2}) == 2
  assert left() == [4, 5]
  ended = {t.trajectory.session for t in pool.each_trajectory()}
  assert ended == {'0.0.0', '0.0.1', 'nothing1', 'nothing2'}
  assert pool.forget(**most | {'keep_bytes': 1}) == 1
  assert left() == [5]  # the newest
  assert [len(cs) for _, cs in pool.group(0)] == [2, 2]


def test_a_forgotten_session_may_go_on(pool):
  """What it adds is readable: it does not refer to what was deleted."""
  first, second = began('s', 10.0)
  pool.add_completion(first)
  pool.flush()
  assert pool.forget(before_s=99.0, keep_sessions=9, keep_bytes=9) == 1
  pool.add_completion(second)
  pool.flush()
  assert pool.completions('s') == [second]


def test_a_recording_stays_bounded(pool, url):
  """Ten times the sessions do not make ten times the file."""
  sizes = []
  for i in range(40):
    for c in began(f's{i}', float(i), turns=20):
      pool.add_completion(c)
    pool.forget(before_s=0.0, keep_sessions=99, keep_bytes=150_000)
    pool.ledger()  # writes the log into the file
    sizes.append(stored_bytes(url))
  assert 2 < sum(bool(pool.completions(f's{i}')) for i in range(40)) < 10
  assert 2 * sizes[-1] < 3 * sizes[9]


def test_the_report_reads_all_of_a_run(pool):
  """After any number of prunings the retained messages, about as many as requested, and
  their turns are spread over the whole run."""
  for i in range(50):
    pool.submit(WorkItem(i, 't', 1))
    pool.add_completion(completion(f's{i}'))
    pool.add_trajectory(trajectory(f's{i}', i, messages=({},)))
    pool.complete(i)
    pool.take([i], step=i)
    if i % 7 == 0 or i == 49:
      pool.prune(pool.ledger(i), keep_messages=10)
  kept = [int(session[1:]) for session in sessions(pool)]
  assert 5 <= len(kept) <= 10
  assert max(np.diff([0, *kept, 49])) < 20
  assert all(len(pool.turns(f's{i}')) == 1 for i in kept)
  assert sum(len(pool.turns(f's{i}')) for i in range(50)) == len(kept)


def stored_bytes(url):
  """Of the database's file or, on a server, of its tables once they are vacuumed."""
  if url.startswith('sqlite'):
    return pathlib.Path(sa.make_url(url).database).stat().st_size
  size = (
    'SELECT sum(pg_total_relation_size(oid)) FROM pg_class '
    "WHERE relnamespace = current_schema()::regnamespace AND relkind = 'r'"
  )
  return execute(url, 'VACUUM items, trajectories, completions', size)


def test_file_stays_bounded(pool, url):
  """With pruning, ten times the work does not make ten times the file."""
  big = dict(prompt_ids=tuple(range(5000)))
  sizes = []
  for i in range(40):
    pool.submit(WorkItem(i, 't', 1))
    pool.add_completion(completion(f's{i}', **big))
    pool.add_trajectory(trajectory(f's{i}', i))
    pool.complete(i)
    pool.take([i], step=i)
    pool.prune(pool.ledger(i))
    sizes.append(stored_bytes(url))
  assert sizes[-1] < 2 * sizes[3]


# --- Reading, threads, failures ---


def test_reports_read_rewards(pool):
  """The report shows each trajectory with the reward that the learner gave it."""
  play(pool, 0, group_size=3)
  pool.add_trajectory(trajectory('e', -1))
  reward = TrajectoryReward(process=-1, speed=0.5, perf=1, total=0.95)
  pool.set_rewards({'0.0.1': reward}, {'0.0.1/1': 0.2})
  pool.flush()
  stored = pool.sample_trajectories(9)
  by_session = {s.trajectory.session: s.reward for s in stored}
  assert by_session == {'e': None, '0.0.0': None, '0.0.1': reward, '0.0.2': None}
  assert sessions(pool, evaluation=True) == ['e']
  assert [t.advantage for t in pool.turns('0.0.1')] == [None, 0.2]
  assert pool.turns('0.0.1')[1].versions == (7, 8)
  drawn = pool.sample_trajectories(2, seed=1, evaluation=False)
  assert len({s.trajectory.session for s in drawn} - {'e'}) == 2
  assert drawn == pool.sample_trajectories(2, seed=1, evaluation=False)


def test_threads(url):
  """Gateway, agents and learner at once, with a queue small enough to block them."""
  with DataPool(url, max_queued=8) as pool:
    items, size = 24, 3
    queue = WorkQueue(pool, items, None)
    queue.resume(None)
    for _ in range(items):
      queue.submit('t', size)
    errors = []

    def agents(mine):
      try:
        for index in mine:
          for rank in range(size):
            for turn in range(4):
              pool.add_completion(completion(f'{index}.{rank}', turn))
            pool.add_trajectory(trajectory(f'{index}.{rank}', index, rank))
          queue.complete(index)
      except Exception as error:
        errors.append(error)
        raise

    threads = [
      threading.Thread(target=agents, args=(range(k, items, 6),)) for k in range(6)
    ]
    for thread in threads:
      thread.start()
    for step in range(items // 4):
      for index in [t.index for t in queue.take(4, step, timeout_s=60)]:
        group = pool.group(index)
        assert [len(cs) for _, cs in group] == [4] * size
    for thread in threads:
      thread.join()
    assert not errors and pool.counts()['taken'] == items


def test_broken_database_stops_the_job(pool, url):
  """Fail closed: if the database cannot be written, no call reports success."""
  play(pool, 0)
  execute(url, 'DROP TABLE completions')
  pool.add_completion(completion('s'))
  with pytest.raises(data_pool.PoolBroken, match='no such table|does not exist'):
    pool.take([0], step=1)
  with pytest.raises(data_pool.PoolBroken):
    pool.add_completion(completion('t'))
  pool.close()


def test_a_file_that_is_locked(tmp_path, monkeypatch):
  """Another process that writes for longer than SQLite waits: calls wait on, and what
  was added before and meanwhile is there once; after `outage_s` the pool is broken."""
  monkeypatch.setattr(database, '_BUSY_S', 0.01)
  path, waited = tmp_path / 'pool.db', []
  with contextlib.closing(
    sqlite3.connect(path, isolation_level=None, check_same_thread=False)
  ) as other:

    def sleep(seconds):
      waited.append(seconds)
      if len(waited) == 3:
        other.execute('ROLLBACK')

    monkeypatch.setattr(database.time, 'sleep', sleep)
    with DataPool(f'sqlite:///{path}') as pool:
      pool.submit(WorkItem(0, 't', 1))
      other.execute('BEGIN IMMEDIATE')
      pool.add_completion(completion('s'))
      pool.add_trajectory(trajectory('s', 0))
      pool.complete(0)
      assert len(waited) == 3 and [len(c) for _, c in pool.group(0)] == [1]
    monkeypatch.undo()
    monkeypatch.setattr(database, '_BUSY_S', 0.01)
    with DataPool(f'sqlite:///{path}', outage_s=0.05) as pool:
      other.execute('BEGIN IMMEDIATE')
      with pytest.raises(data_pool.PoolBroken, match='0.05 s: database is locked'):
        pool.take([0], step=1)
      other.execute('ROLLBACK')
  with DataPool(f'sqlite:///{path}') as pool:
    assert pool.counts()['completed'] == 1


def test_opening(pool, url):
  """Wrong URLs and other schemas get an error that names them; a run id is stable."""
  with DataPool(url) as again:
    assert again.run == pool.run
  with pytest.raises(ValueError, match='not a database URL'):
    DataPool('pool.db')
  with pytest.raises(ValueError, match='needs a file'):
    DataPool('sqlite://')
  pool.close()
  with pytest.raises(RuntimeError, match='after close'):
    pool.flush()
  execute(url, "UPDATE meta SET value = '1' WHERE key = 'schema_version'")
  with pytest.raises(ValueError, match='schema version 1'):
    DataPool(url)


def test_old_items_are_deleted_on_request(pool, url):
  """All that belongs to them goes; counts, ages and the data position stay."""
  for i in range(8):
    play(pool, i)
  pool.submit(WorkItem(8, 't', 1))
  pool.fail(8, 'broke')
  pool.add_trajectory(trajectory('evaluation', -1))
  pool.take([0, 1, 2], step=1)
  first = pool.ledger(1)
  pool.take([3, 4, 6], step=2)
  second = pool.ledger(2)
  pool.prune(second, keep_items=2)
  counts = pool.counts()
  assert (counts['taken'], counts['completed'], counts['failed']) == (6, 2, 1)
  assert [i.index for i in pool.items()] == [3, 4, 5, 6, 7, 8]
  assert pool.group(2) == [] and [t.rank for t, _ in pool.group(5)] == [0, 1]
  assert pool.turns('2.0.0') == []
  assert sessions(pool, evaluation=True) == ['evaluation']
  assert pool.prune(second, keep_items=2) == 0 and pool.counts() == counts
  with pytest.raises(LedgerMismatch, match='were pruned'):
    pool.rollback(first)
  assert pool.rollback(second) == []
  pool.submit(WorkItem(9, 't', 1, taken_before=6))
  pool.take([5, 7], step=3)
  pool.fail(9, 'broke')
  # Nothing is left to train: the last item stays, from which indices are counted.
  pool.prune(pool.ledger(3), keep_items=0)
  assert [i.index for i in pool.items()] == [9] and pool.next_index() == 10
  counts = pool.counts()
  assert (counts['taken'], counts['failed']) == (8, 2)
  pool.close()
  with DataPool(url) as pool:
    with pytest.raises(LedgerMismatch, match='were deleted'):
      pool.rollback(None)


def test_ended(pool):
  """Trajectories of work items in numbers, in the order in which they were stored."""
  play(pool, 0)
  pool.add_trajectory(trajectory('e', -1))
  pool.submit(WorkItem(1, 't', 1))
  pool.add_trajectory(trajectory('s', 1, success=0.0))
  pool.complete(1)
  pool.add_trajectory(trajectory('late', 1, 1))
  pool.flush()
  found = pool.ended(after=0)
  assert [e.response_tokens for e in found] == [4, 4, 0, 0]
  assert [e.versions for e in found] == [(7, 8), (7, 8), (), ()]
  assert [e.success for e in found] == [1, 1, 0, 1]
  assert [e.superseded for e in found] == [False, False, False, True]
  assert pool.ended(after=found[1].row) == found[2:]
  assert pool.ended(items=[0]) == found[:2] and pool.ended(items=[]) == []
