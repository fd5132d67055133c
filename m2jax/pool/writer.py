"""One thread that writes to the data pool for all others, many operations per commit.

Write transactions of all processes run one after the other (`database`); with one
writing thread no other thread waits for that, and all operations that arrived meanwhile
share a commit. They are applied in the order in which they were put, so records added
before a `call` are committed no later than the call. A row that the database rejects
affects no other row.

While a database server is away, a whole transaction is repeated until it is known to be
committed: callers wait, and their records are neither lost nor added twice.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import uuid
from collections.abc import Callable
from concurrent import futures
from typing import Any

import sqlalchemy as sa
from absl import logging

from m2jax.pool import database as database_lib
from m2jax.pool.database import Database, PoolBroken


class Writer:
  """Inserts records in batches and runs calls one by one, all in one thread.

  `put` returns at once; its record is durable after the next `call`. A call runs a
  function on the writing connection, inside a savepoint, and returns its result once
  the transaction is committed; an exception of the function is raised to the caller.
  The function may run more than once, but is committed once.

  Attributes:
    tally: counts of the present transaction, made by the functions that it runs.
    counts: sums of the committed ones.
  """

  def __init__(
    self,
    database: Database,
    insert: Callable[[sa.Connection, list[Any]], None],
    *,
    linger_s: float = 0.05,
    max_queued: int = 4096,
  ):
    """Starts the thread.

    Args:
      database: the database to write to.
      insert: inserts consecutive records in order, all or none of them.
      linger_s: how long records wait to be batched if no call comes.
      max_queued: `put` blocks while this many operations wait.
    """
    self.tally: collections.Counter[str] = collections.Counter()
    self.counts: collections.Counter[str] = collections.Counter()
    self._database = database
    self._id, self._batches = uuid.uuid4().hex, 0  # see `database.committed`
    self._insert = insert
    self._linger_s = linger_s
    self._max_queued = max_queued
    self._changed = threading.Condition()
    # A record to insert with None, or a function to call with its future.
    self._queue: collections.deque[tuple[Any, futures.Future | None]] = (
      collections.deque()
    )
    self._calls = 0  # queued operations with a waiting caller
    self._closing = False
    self._error: BaseException | None = None
    self._rejected: list[str] = []
    self._thread = threading.Thread(target=self._run, name='pool-writer', daemon=True)
    self._thread.start()

  def put(self, record: Any) -> None:
    """Queues a record for insertion."""
    self._append(record, None)

  def call(self, function: Callable[[sa.Connection], Any]) -> Any:
    """Runs `function(connection)` after earlier records; waits for the commit."""
    return self.begin(function).result()

  def begin(self, function: Callable[[sa.Connection], Any]) -> futures.Future:
    """Queues such a call; the future has its result once it is committed."""
    future = futures.Future()
    future.set_running_or_notify_cancel()  # nobody else can end it
    self._append(function, future)
    return future

  def pop_rejected(self) -> list[str]:
    """Descriptions of the records that the database rejected since the last call."""
    with self._changed:
      rejected, self._rejected = self._rejected, []
      return rejected

  def close(self) -> None:
    """Writes queued records and ends the thread. Idempotent."""
    with self._changed:
      self._closing = True
      self._changed.notify_all()
    self._thread.join()

  def _append(self, operation: Any, future: futures.Future | None) -> None:
    with self._changed:
      self._changed.wait_for(
        lambda: len(self._queue) < self._max_queued or self._closing or self._error
      )
      if self._error:
        raise self._broken() from self._error
      if self._closing:
        raise RuntimeError('data pool: used after close()')
      self._queue.append((operation, future))
      self._calls += future is not None
      if future is not None or len(self._queue) in (1, self._max_queued):
        self._changed.notify_all()

  def _next_batch(self) -> list:
    with self._changed:
      self._changed.wait_for(lambda: self._queue or self._closing)
      self._changed.wait_for(
        lambda: self._calls or self._closing or len(self._queue) >= self._max_queued,
        self._linger_s,
      )
      batch = list(self._queue)
      self._queue.clear()
      self._calls = 0
      self._changed.notify_all()
      return batch

  def _run(self) -> None:
    while batch := self._next_batch():
      try:
        results = self._commit(batch)
      except BaseException as error:  # the batch is lost: fail permanently
        self._break(error, batch)
        return
      for future, result, error in results:
        if error is None:
          future.set_result(result)
        else:
          future.set_exception(error)
    if self._batches and self._database.server:
      with contextlib.suppress(sa.exc.DBAPIError), self._database.transaction() as last:
        database_lib.forget(last, self._id)

  def _commit(self, batch: list) -> list[tuple]:
    """Applies a batch in one transaction; returns `_apply`'s results."""
    self._batches += 1
    applied: list[list[tuple]] = []  # by a transaction whose commit may have been lost

    def attempt():
      with self._database.transaction() as connection:
        if applied and database_lib.committed(connection, self._id) == self._batches:
          return
        applied.clear()
        self.tally.clear()
        results = self._apply(connection, batch)
        if self._database.server:
          database_lib.set_committed(connection, self._id, self._batches)
        applied.append(results)

    self._database.retrying(attempt)
    self.counts.update(self.tally)
    return applied[0]

  def _break(self, error: BaseException, batch: list) -> None:
    """Fails the batch, and all that is queued now or later."""
    with self._changed:
      self._error = error
      batch += self._queue
      self._queue.clear()
      self._changed.notify_all()
    logging.error('%s', self._broken())
    for _, future in batch:
      if future is not None:
        broken = self._broken()
        broken.__cause__ = error
        future.set_exception(broken)

  def _broken(self) -> PoolBroken:
    """The error of all later calls, in one line: what is written is not shown."""
    if isinstance(self._error, PoolBroken):
      return PoolBroken(str(self._error))
    return PoolBroken(
      f'data pool {self._database.url}: cannot write: '
      f'{database_lib.first_line(self._error)}'
    )

  def _apply(self, connection: sa.Connection, batch: list) -> list[tuple]:
    """Applies a batch; returns (future, result, error) of each call."""
    results, waiting = [], []
    for operation, future in batch:
      if future is None:
        waiting.append(operation)
        continue
      self._insert_all(connection, waiting)
      waiting = []
      try:
        with connection.begin_nested():
          results.append((future, operation(connection), None))
      except Exception as error:
        if database_lib.fatal(error):
          raise
        results.append((future, None, error))
    self._insert_all(connection, waiting)
    return results

  def _insert_all(self, connection: sa.Connection, batch: list[Any]) -> None:
    """Inserts records together or, if that fails, one by one."""
    if not batch:
      return
    try:
      with connection.begin_nested():
        self._insert(connection, batch)
    except Exception as error:
      if database_lib.fatal(error):
        raise
      if len(batch) > 1:
        for record in batch:
          self._insert_all(connection, [record])
        return
      message = f'{batch[0]!r:.120}: {getattr(error, "orig", error)}'
      logging.error('data pool: rejected %s', message)
      with self._changed:
        self._rejected.append(message)
