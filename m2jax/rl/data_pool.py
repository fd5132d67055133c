"""The data pool: work items, trajectories and completions in a database (law 5).

Forge's Data Pool (facts/m2-and-forge.md §4.3) on SQLAlchemy Core: SQLite in WAL mode by
default, another database by URL. One thread writes (`pool_writer`), any may call.

How law 5 is kept. A work item goes pending → completed → taken, or pending → failed.

  accepted   `submit`, `complete`, `fail` and `take` return after their commit; an item
             completes only when all its trajectories and completions are committed.
  trained    the checkpoint of a step holds `ledger(step)` beside the weights. What it
             says counts as trained, not the state in the database.
  restart    `rollback(ledger)` of the restored checkpoint: items taken after it become
             completed again; items still pending are returned for reissue with attempt
             + 1, and what their old attempt left is superseded: kept, never trained.
             Items submitted after the checkpoint stay: complete ones as they are,
             others reissued. So the data position is `next_index` of the *pool*, and no
             item is submitted twice. Failed items stay failed: no weight depends on
             them. Completions keep their sampling log-probabilities, so off-policy
             correction is exact even where the policy that sampled them was rolled
             back.

With synchronous=NORMAL a commit survives the death of the process; `ledger` also makes
everything before it survive the loss of power.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
from collections.abc import Iterable

import sqlalchemy as sa

from m2jax.rl import pool_ledger, pool_writer, records, rewards, windowed_fifo
from m2jax.rl import pool_tables as tables

_REMEMBERED_IDS = 65_536

Ledger = pool_ledger.Ledger
LedgerMismatch = pool_ledger.LedgerMismatch
PoolBroken = pool_writer.PoolBroken


class Rejected(ValueError):
  """The database refused records; the others are safe."""


class Duplicate(Rejected):
  """An id was added twice."""


@dataclasses.dataclass(frozen=True)
class StoredTrajectory:
  """A trajectory as people read it."""

  trajectory: records.Trajectory
  reward: rewards.TrajectoryReward | None
  superseded: bool


class DataPool:
  """The pool at a database URL, for example 'sqlite:////tmp/run/pool.db'."""

  def __init__(self, url: str, *, linger_s: float = 0.05, max_queued: int = 4096):
    """Opens the pool, making its tables when they do not exist.

    Args:
      url: SQLAlchemy URL. SQLite needs a file: threads do not share one in memory.
      linger_s, max_queued: see `pool_writer.Writer`.

    Raises:
      ValueError: the URL cannot be used, or holds a pool of another schema version.
    """
    self._engine, self.run = tables.open_database(url)
    self._ids = collections.OrderedDict()  # the last ids added, oldest first
    self._ids_lock = threading.Lock()
    self._late = collections.Counter()
    self._writer = pool_writer.Writer(
      self._engine, self._insert, linger_s=linger_s, max_queued=max_queued
    )

  # --- Recording ---

  def submit(self, item: records.WorkItem) -> None:
    """Accepts a work item; from its return on it will be trained or end with a reason.

    Raises:
      ValueError: the index is not the next of the stream, or the group is empty.
    """
    if item.group_size < 1:
      raise ValueError(f'item {item.index}: group_size={item.group_size}: must be ≥ 1')
    self._writer.call(lambda connection: pool_ledger.submit(connection, item))

  def add_completion(self, completion: records.Completion) -> None:
    """Records a completion; durable before the item of its session can complete.

    A completion that arrives after its session's trajectory is kept as superseded: the
    agent never saw it.

    Raises:
      Duplicate: the id was added before (an id older than the last 65,536 is refused by
        the database instead, which `flush` reports).
      ValueError: lengths differ, or a log-probability is not finite.
    """
    tables.check_completion(completion)
    self._remember('completion ' + completion.id)
    self._writer.put(completion)

  def add_trajectory(self, trajectory: records.Trajectory) -> None:
    """Records how an episode ended; afterwards its session is closed.

    A trajectory of an item that has already ended is kept as superseded.

    Raises:
      Duplicate: the session was added before (see `add_completion`).
    """
    self._remember('trajectory ' + trajectory.session)
    self._writer.put(trajectory)

  def set_rewards(self, by_session: dict[str, rewards.TrajectoryReward]) -> None:
    """Notes the learner's rewards beside trajectories, by session; for reports."""
    for session, reward in by_session.items():
      self._writer.put((session, reward))

  def complete(self, index: int) -> None:
    """Marks a pending item as ready to be taken.

    Raises:
      ValueError: it is not pending, or trajectories of its group are missing.
    """
    self._writer.call(lambda connection: pool_ledger.complete(connection, index))

  def fail(self, index: int, reason: str) -> None:
    """Ends a pending item; nothing of it will be trained.

    Raises:
      ValueError: it is not pending.
    """
    self._writer.call(lambda connection: pool_ledger.fail(connection, index, reason))

  def take(self, indices: Iterable[int], step: int) -> None:
    """Marks completed items as part of learner step `step`: all of them or none.

    Raises:
      ValueError: an item is not completed.
    """
    indices = list(indices)
    if len(set(indices)) != len(indices):
      raise ValueError(f'take: an index occurs twice in {indices}')
    self._writer.call(lambda connection: pool_ledger.take(connection, indices, step))

  def flush(self) -> None:
    """Waits until everything added so far is committed.

    Raises:
      Rejected: records were refused since the last flush.
    """
    self._writer.call(lambda connection: None)
    if rejected := self._writer.pop_rejected():
      raise Rejected(f'data pool refused {len(rejected)} records: {rejected[0]}')

  def close(self) -> None:
    """Writes what is queued and closes the database. Idempotent."""
    self._writer.close()
    self._engine.dispose()

  def __enter__(self) -> DataPool:
    return self

  def __exit__(self, *exc) -> None:
    self.close()

  # --- The ledger ---

  def ledger(self, step: int | None = None) -> Ledger:
    """The ledger for a checkpoint of `step`: items taken up to and including it.

    Args:
      step: last learner step in the weights; None counts everything taken so far.
    """
    ledger = self._writer.call(
      lambda connection: pool_ledger.read(connection, self.run, step)
    )
    tables.sync(self._engine)
    return ledger

  def rollback(self, ledger: Ledger | None) -> list[records.WorkItem]:
    """Rolls the pool back to a restored checkpoint (law 5, see the module's docstring).

    Call it once at every start, before anything is submitted; without a checkpoint pass
    None. Then `refill` a queue and run the returned items.

    Returns:
      The items to run again, in order of index, with their new attempt numbers.

    Raises:
      LedgerMismatch: the checkpoint is another pool's, newer than this pool, or older
        than what `prune` kept.
    """
    ledger = ledger or Ledger()
    return self._writer.call(
      lambda connection: pool_ledger.rollback(connection, ledger, self.run)
    )

  def refill(self, fifo: windowed_fifo.WindowedFifo) -> None:
    """Gives an unused queue this pool's items; completed ones have the result None."""
    head = self.ledger().head
    i = tables.items
    rows = self._read(sa.select(i).where(i.c.index >= head).order_by(i.c.index))
    fifo.restore(
      head,
      [r.index for r in rows if r.state in ('taken', 'failed')],
      rows[-1].index + 1 if rows else head,
      completed={r.index: None for r in rows if r.state == 'completed'},
      pending={r.index: tables.work_item(r) for r in rows if r.state == 'pending'},
    )

  def prune(self, ledger: Ledger, *, keep_messages: int = 1000) -> int:
    """Drops what no restart can need, so that the file stays bounded.

    Completions of items trained by `ledger`, of failed items, of evaluation and of
    superseded attempts go; so do the messages of all trajectories but the newest.
    The freed pages are used again.

    Args:
      ledger: of the *oldest* checkpoint that may still be restored.
      keep_messages: trajectories that keep their messages. Those of live items do too.

    Returns:
      How many completions were dropped.
    """
    return self._writer.call(
      lambda connection: pool_ledger.prune(connection, ledger, keep_messages)
    )

  # --- Reading ---

  def group(
    self, index: int
  ) -> list[tuple[records.Trajectory, list[records.Completion]]]:
    """The live trajectories of an item by rank, each with its completions by turn."""
    t, c = tables.trajectories, tables.completions
    mine = (t.c.item == index) & ~t.c.superseded
    rows = self._read(sa.select(t).where(mine).order_by(t.c.rank))
    by_session = {r.session: (tables.trajectory(r), []) for r in rows}
    query = (
      sa.select(c)
      .where(c.c.session.in_(list(by_session)), ~c.c.superseded)
      .order_by(c.c.turn, c.c.row)
    )
    for row in self._read(query):
      by_session[row.session][1].append(tables.completion(row))
    return list(by_session.values())

  def completions(self, session: str) -> list[records.Completion]:
    """Completions of a session by turn, superseded ones included; empty once pruned."""
    c = tables.completions
    query = sa.select(c).where(c.c.session == session).order_by(c.c.turn, c.c.row)
    return [tables.completion(row) for row in self._read(query)]

  def recent(self, n: int, *, evaluation: bool | None = None) -> list[StoredTrajectory]:
    """The newest n trajectories, newest first.

    Args:
      n: how many at most.
      evaluation: only those of evaluation (True) or training (False).
    """
    t = tables.trajectories
    query = sa.select(t).order_by(t.c.row.desc()).limit(n)
    if evaluation is not None:
      query = query.where(t.c.item < 0 if evaluation else t.c.item >= 0)
    return [_stored(row) for row in self._read(query)]

  def sample_trajectories(
    self, n: int, *, seed: int = 0, evaluation: bool | None = None
  ) -> list[StoredTrajectory]:
    """n live trajectories with messages, drawn without replacement, oldest first."""
    t = tables.trajectories
    query = sa.select(t.c.row).where(~t.c.superseded, t.c.messages.is_not(None))
    if evaluation is not None:
      query = query.where(t.c.item < 0 if evaluation else t.c.item >= 0)
    rows = [r.row for r in self._read(query.order_by(t.c.row))]
    chosen = random.Random(seed).sample(rows, min(n, len(rows)))
    query = sa.select(t).where(t.c.row.in_(chosen)).order_by(t.c.row)
    return [_stored(row) for row in self._read(query)]

  def items(self, *states: str) -> list[records.WorkItem]:
    """Work items by index, of the given states (all when none is given)."""
    i = tables.items
    query = sa.select(i).order_by(i.c.index)
    if states:
      query = query.where(i.c.state.in_(states))
    return [tables.work_item(row) for row in self._read(query)]

  def failures(self) -> dict[int, str]:
    """The reasons of the failed items, by index."""
    i = tables.items.c
    query = sa.select(i.index, i.reason).where(i.state == 'failed').order_by(i.index)
    return {row.index: row.reason for row in self._read(query)}

  def next_index(self) -> int:
    """The data position: the index of the next item to submit."""
    with self._engine.connect() as connection:
      return pool_ledger.next_index(connection)

  def counts(self) -> dict[str, int]:
    """Items by state, and records that came too late since the pool was opened."""
    i = tables.items.c
    out = dict.fromkeys(('pending', 'completed', 'taken', 'failed'), 0)
    query = sa.select(i.state, sa.func.count().label('n')).group_by(i.state)
    out |= {row.state: row.n for row in self._read(query)}
    return out | {
      'late_completions': self._late['completions'],
      'late_trajectories': self._late['trajectories'],
    }

  # --- Inside ---

  def _read(self, query: sa.Select) -> list[sa.Row]:
    with self._engine.connect() as connection:
      return list(connection.execute(query).all())

  def _remember(self, key: str) -> None:
    with self._ids_lock:
      if key in self._ids:
        raise Duplicate(f'data pool: {key} was added before')
      self._ids[key] = None
      if len(self._ids) > _REMEMBERED_IDS:
        self._ids.popitem(last=False)

  def _insert(self, connection: sa.Connection, batch: list) -> None:
    """Inserts completions, trajectories and (session, reward) pairs, in their order."""
    t, i = tables.trajectories.c, tables.items.c
    closed = _chosen(
      connection,
      t.session,
      {r.session for r in batch if isinstance(r, records.Completion)},
    )
    pending = _chosen(
      connection,
      i.index,
      {r.item for r in batch if isinstance(r, records.Trajectory)},
      i.state == 'pending',
    )
    completions, trajectories, rewarded = [], [], []
    for r in batch:
      if isinstance(r, records.Completion):
        row = tables.completion_row(r) | {'superseded': r.session in closed}
        completions.append(row)
      elif isinstance(r, records.Trajectory):
        late = r.item >= 0 and r.item not in pending
        trajectories.append(tables.trajectory_row(r) | {'superseded': late})
        closed.add(r.session)
      else:
        rewarded.append(dataclasses.asdict(r[1]) | {'of_session': r[0]})
    if completions:
      connection.execute(sa.insert(tables.completions), completions)
    if trajectories:
      connection.execute(sa.insert(tables.trajectories), trajectories)
    if rewarded:
      mine = t.session == sa.bindparam('of_session')
      connection.execute(sa.update(tables.trajectories).where(mine), rewarded)
    self._late['completions'] += sum(r['superseded'] for r in completions)
    self._late['trajectories'] += sum(r['superseded'] for r in trajectories)


def _chosen(
  connection: sa.Connection, column: sa.Column, values: set, *where: sa.ColumnElement
) -> set:
  """Which of the values the column holds, in rows that fit `where`."""
  out = set()
  for part in pool_ledger.parts(list(values)):
    out.update(connection.scalars(sa.select(column).where(column.in_(part), *where)))
  return out


def _stored(row: sa.Row) -> StoredTrajectory:
  reward = None
  if row.total is not None:
    reward = rewards.TrajectoryReward(
      row.process,
      row.speed,
      row.perf,
      row.total,
      tuple((turn, advantage) for turn, advantage in row.advantages),
    )
  return StoredTrajectory(tables.trajectory(row), reward, row.superseded)
