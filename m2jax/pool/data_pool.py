"""The data pool: work items, trajectories and completions in a database (law 5).

Forge's Data Pool (facts/m2-and-forge.md §4.3) on SQLAlchemy Core: SQLite in WAL mode by
default, PostgreSQL by URL (`database`). One thread of a process writes (`writer`); any
thread may call.

How law 5 is implemented. A work item goes pending → completed → taken, or pending →
failed.

  accepted   `submit`, `complete`, `fail` and `take` return after their commit; an item
             completes only when all its trajectories and completions are committed.
  trained    the checkpoint of a step holds `ledger(step)` with the weights. The ledger
             determines what was trained, not the state in the database.
  restart    `rollback(ledger)` of the restored checkpoint: items taken after it become
             completed again; items still pending are returned for reissue with attempt
             + 1, and the records of their old attempt are superseded: stored, but never
             trained. Items submitted after the checkpoint remain: completed ones as
             they are, others are reissued. So the data position is `next_index` of the
             *pool*, and no item is submitted twice. Failed items remain failed: no
             weights depend on them. Completions retain their sampling
             log-probabilities, so off-policy correction is exact even if the policy
             that sampled them was rolled back.
  learners   each `rollback` begins a lineage. From then on the pool rejects writes of
             an older lineage's learner, in the statement that would change the item.

On SQLite, with synchronous=NORMAL, a commit survives a crash of the process; `ledger`
also makes everything before it survive a power failure. On PostgreSQL every commit
does. While a PostgreSQL server is away, or another process has locked the SQLite file,
calls wait for it, up to `outage_s`.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent import futures

import sqlalchemy as sa
from absl import logging

from m2jax import records
from m2jax.pool import (
  arrays,
  database,
  inserts,
  leases,
  reader,
  retention,
  tables,
  writer,
)
from m2jax.pool import ledger as ledger_lib

_REMEMBERED_IDS = 65_536

Ledger = ledger_lib.Ledger
PoolBroken = database.PoolBroken
Ended = reader.Ended
StoredTrajectory = reader.StoredTrajectory


class Rejected(ValueError):
  """The database rejected records; all others were written."""


class Duplicate(Rejected):
  """An id was added twice."""


class DataPool(reader.Reader):
  """The pool at a database URL, for example 'sqlite:////tmp/run/pool.db'.

  One process has the queue: `rollback`, then `submit`, `complete`, `fail`, `take`,
  `reissue`, `ledger`, `prune`, which raise LineageOver once another process has called
  `rollback`. Others may record completions, and run items under leases.

  Attributes:
    begun_lineage: the lineage that `rollback` began; 0 before.
  """

  def __init__(
    self,
    url: str,
    *,
    linger_s: float = 0.05,
    max_queued: int = 4096,
    outage_s: float = 60.0,
  ):
    """Opens the pool and creates its tables if they do not exist.

    Args:
      url: SQLAlchemy URL. SQLite needs a file: threads do not share one in memory.
        PostgreSQL needs a database that is empty or has a pool; the password may also
        be in libpq's password file or environment.
      linger_s, max_queued: see `writer.Writer`.
      outage_s: how long calls wait for a PostgreSQL server that is away or a SQLite
        file that is locked; then the pool is broken.

    Raises:
      ValueError: the URL cannot be used, or holds a pool of another schema version.
      PoolBroken: the server was away for longer than `outage_s`.
    """
    opened, self.run = database.open_database(url, outage_s)
    super().__init__(opened)
    # the last ids added, oldest first
    self._ids: collections.OrderedDict = collections.OrderedDict()
    self._ids_lock = threading.Lock()
    self._missed_syncs = 0
    self._lineage = self.lineages().current
    self._leads = False  # whether this process has the queue
    self.begun_lineage = 0
    self._recent = arrays.Recent()  # used by the writing thread only
    self._writer = writer.Writer(
      opened, self._insert, linger_s=linger_s, max_queued=max_queued
    )

  # --- Recording ---

  def submit(self, item: records.WorkItem) -> None:
    """Accepts a work item, which will then be trained or fail with a reason.

    Raises:
      ValueError: the index is not the next in the stream, or the group is empty.
    """
    if item.group_size < 1:
      raise ValueError(f'item {item.index}: group_size={item.group_size}: must be ≥ 1')
    self._writer.call(lambda c: ledger_lib.submit(c, item, self._lineage))

  def add_completion(self, completion: records.Completion) -> None:
    """Records a completion; durable before the item of its session can complete.

    A completion that arrives after its session's trajectory is stored as superseded:
    the agent never saw it.

    Raises:
      Duplicate: the id was added before. An id older than the last 65,536 is rejected
        by the database instead, which `flush` reports.
      ValueError: lengths differ, or a log-probability is not finite.
    """
    tables.check_completion(completion)
    self._remember('completion ' + completion.id)
    self._writer.put(dataclasses.replace(completion, lineage=self._lineage))

  def record_completion(self, completion: records.Completion) -> futures.Future:
    """Records a completion of the lineage that it has; the future is done at commit.

    For a gateway in another process than the agents. Raises as `add_completion`.
    """
    tables.check_completion(completion)
    self._remember('completion ' + completion.id)
    return self._writer.begin(lambda connection: self._insert(connection, [completion]))

  def add_trajectory(self, trajectory: records.Trajectory) -> None:
    """Records how an episode ended, and closes its session.

    A trajectory of an item that has already ended is stored as superseded.

    Raises:
      Duplicate: the session was added before (see `add_completion`).
    """
    self._remember('trajectory ' + trajectory.session)
    self._writer.put(trajectory)

  def completion_ids(self, session: str) -> set[str]:
    """Ids of all completions of a session that were added so far."""
    c = tables.completions.c
    query = sa.select(c.id).where(c.session == session)
    return set(self._writer.call(lambda connection: connection.scalars(query).all()))

  def set_rewards(
    self,
    by_session: Mapping[str, records.TrajectoryReward],
    advantages: Mapping[str, float] | None = None,
  ) -> None:
    """Records the learner's rewards and advantages, for reports.

    Args:
      by_session: rewards of trajectories, by session.
      advantages: advantages of judged completions, by id.
    """
    for session, reward in by_session.items():
      self._writer.put((session, reward))
    for id_, advantage in (advantages or {}).items():
      self._writer.put((id_, float(advantage)))

  def complete(self, index: int) -> None:
    """Marks a pending item as completed.

    Raises:
      ValueError: the item is not pending, or trajectories of its group are missing.
    """
    self._writer.call(lambda c: ledger_lib.complete(c, index, self._lineage))

  def fail(self, index: int, reason: str) -> None:
    """Fails a pending item, which is then never trained.

    Raises:
      ValueError: the item is not pending.
    """
    self._writer.call(lambda c: ledger_lib.fail(c, index, reason, self._lineage))

  def take(self, indices: Iterable[int], step: int) -> None:
    """Marks completed items as part of learner step `step`: all of them or none.

    Raises:
      ValueError: an item is not completed.
    """
    indices = list(indices)
    if len(set(indices)) != len(indices):
      raise ValueError(f'take: an index occurs twice in {indices}')
    self._writer.call(lambda c: ledger_lib.take(c, indices, step, self._lineage))

  # --- Items that other processes run (`leases`) ---

  def claim(self, owner: str, n: int) -> list[leases.Claim]:
    """Leases up to n pending items that nobody has; `owner` is for messages."""
    return self._writer.call(lambda connection: leases.claim(connection, owner, n))

  def heartbeat(self, held: Iterable[str]) -> set[str]:
    """Keeps leases; returns those that still hold. The others' groups must stop."""
    held = list(held)
    return self._writer.call(lambda connection: leases.heartbeat(connection, held))

  def report(
    self,
    claimed: leases.Claim,
    trajectories: Iterable[records.Trajectory],
    end: str = leases.COMPLETE,
  ) -> bool:
    """Records the trajectories of a claimed group and how it ended, at once.

    Returns:
      False, and nothing is recorded, if the lease is lost or was reported under before.
    """
    trajectories = list(trajectories)

    def run(connection):
      if not leases.holds(connection, claimed):
        return False
      self._insert(connection, trajectories)
      leases.report(connection, claimed, end)
      return True

    return self._writer.call(run)

  def open_leases(self) -> list[leases.Lease]:
    """The leases of pending items, by index."""
    return self._database.read(leases.current)

  def reissue(self, index: int) -> records.WorkItem:
    """Ends the lease of a pending item; the next claim is another attempt at it.

    Raises:
      ValueError: the item is not pending.
    """
    return self._writer.call(lambda c: leases.reissue(c, index, self._lineage))

  def flush(self) -> None:
    """Waits until everything added so far is committed.

    Raises:
      Rejected: the database rejected records since the last flush.
    """
    self._writer.call(lambda connection: None)
    if rejected := self._writer.pop_rejected():
      raise Rejected(f'data pool rejected {len(rejected)} records: {rejected[0]}')

  def close(self) -> None:
    """Writes queued records and closes the database. Idempotent."""
    self._writer.close()
    self._database.close()

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

    def run(connection):
      ledger_lib.check_lineage(connection, self._lineage)
      return ledger_lib.read(connection, self.run, step)

    ledger = self._writer.call(run)
    if not self._database.sync():
      self._missed_syncs += 1
      logging.warning(
        'data pool: a reader blocks the checkpoint of the write-ahead log, which grows '
        'until the reader ends its transaction (%d times so far)',
        self._missed_syncs,
      )
    return ledger

  def lineages(self) -> records.Lineages:
    """The lineages so far; `rollback` begins the current one."""
    return self._database.read(ledger_lib.lineages)

  def rollback(self, ledger: Ledger | None) -> list[records.WorkItem]:
    """Rolls the pool back to a restored checkpoint (law 5, see the module's docstring).

    Call it once at every start, before anything is submitted, with None if there is no
    checkpoint; then run the returned items. It also begins the lineage of the weights
    that sample from then on.

    Returns:
      The items to run again, in order of index, with their new attempt numbers.

    Raises:
      LedgerMismatch: the checkpoint belongs to another pool, is newer than this pool,
        or needs items that were pruned.
    """
    ledger = ledger or Ledger()

    def run(connection):
      self._recent.clear()  # its completions may be superseded now
      items = ledger_lib.rollback(connection, ledger, self.run)
      # Here, so that records which the same transaction inserts are of it.
      self._lineage = self.begun_lineage = ledger_lib.lineages(connection).current
      self._leads = True
      return items

    return self._writer.call(run)

  def prune(
    self,
    ledger: Ledger,
    *,
    keep_messages: int = 2000,
    abandoned_s: float = 0.0,
    keep_items: int | None = None,
  ) -> int:
    """Deletes what no restart can need, so that the database stays bounded.

    `retention` has what that is. Trajectories and rewards remain, unless `keep_items`.

    Args:
      ledger: ledger of the *oldest* checkpoint that may still be restored.
      keep_messages: approximate number of trajectories that retain their messages.
      abandoned_s: also delete the token ids of completions older than this that have no
        trajectory, since their agent was killed, and are not of a pending item's
        present attempt; 0: do not.
      keep_items: also delete the items before the ledger's head, with all that belongs
        to them, except for the last `keep_items`; None: delete none.

    Returns:
      The number of completions whose token ids were deleted.
    """
    before_s = time.time() - abandoned_s if abandoned_s else 0.0

    def run(connection):
      ledger_lib.check_lineage(connection, self._lineage)
      return retention.prune(connection, ledger, keep_messages, before_s, keep_items)

    return self._writer.call(run)

  def forget(self, *, before_s: float, keep_sessions: int, keep_bytes: int) -> int:
    """Deletes the oldest sessions of no work item, with all that belongs to them.

    Args:
      before_s: wall-clock time; sessions without a completion since then are deleted.
      keep_sessions, keep_bytes: the newest sessions that remain, and the bytes of their
        token ids; the newest session always remains.

    Returns:
      The number of deleted sessions.
    """

    def run(connection):
      gone = retention.forget(connection, before_s, keep_sessions, keep_bytes)
      self._recent.drop(set(gone))  # later completions must not refer to them
      return len(gone)

    return self._writer.call(run)

  # --- The workdir that it belongs to ---

  def owner(self) -> str:
    """What the last workdir called itself; '' before the first."""
    m = tables.meta.c
    (row,) = self._read(sa.select(m.value).where(m.key == tables.OWNER))
    return row.value

  def change_owner(self, before: str, after: str) -> bool:
    """Sets the owner; False if it is not `before` any more."""
    m = tables.meta.c
    mine = (m.key == tables.OWNER) & (m.value == before)
    change = sa.update(tables.meta).where(mine).values(value=after)
    return self._writer.call(lambda c: c.execute(change).rowcount == 1)

  # --- Counting ---

  def next_index(self) -> int:
    """The data position: the index of the next item to submit."""
    return self._database.read(ledger_lib.next_index)

  def counts(self) -> dict[str, int]:
    """Number of items by state; since the pool was opened, the number of records that
    came too late and of incomplete checkpoints of the write-ahead log."""
    out = self._database.read(ledger_lib.counts)
    return out | {
      'late_completions': self._writer.counts['completions'],
      'late_trajectories': self._writer.counts['trajectories'],
      'missed_syncs': self._missed_syncs,
    }

  # --- Internals ---

  def _remember(self, key: str) -> None:
    with self._ids_lock:
      if key in self._ids:
        raise Duplicate(f'data pool: {key} was added before')
      self._ids[key] = None
      if len(self._ids) > _REMEMBERED_IDS:
        self._ids.popitem(last=False)

  def _insert(self, connection: sa.Connection, batch: list) -> None:
    latest = ledger_lib.lineages(connection).current if self._leads else self._lineage
    current = latest == self._lineage
    self._writer.tally.update(inserts.insert(connection, batch, self._recent, current))
