"""The database behind the data pool: SQLite by default, PostgreSQL by URL.

The same statements run on both. This module handles the differences:

  writing   Write transactions of all processes run one after the other, so that a
            transaction that reads and then writes needs no lock of its own. On SQLite
            they begin with BEGIN IMMEDIATE; on PostgreSQL they first take an advisory
            lock, at READ COMMITTED, where each later statement sees all that was
            committed before. Reads wait for nobody.
  durable   SQLite: `sync`. PostgreSQL: a commit is on disk before it is acknowledged,
            unless the server has fsync off, which is logged.
  outage    A PostgreSQL server may go away. `retrying` repeats a read or a transaction
            for `outage_s` seconds. If the connection is lost in a commit, nobody knows
            whether it was done: each transaction of a writer therefore also stores its
            number (`writers`), and the next one looks for it; the server may reuse its
            own ids after a crash. A frozen server counts as away (`watch`); a client
            that stops in mid-transaction loses it, and the lock, after `_IDLE_S`. A
            SQLite file that another process has locked for `_BUSY_S` counts as away
            too; what failed then was not committed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import sqlalchemy as sa
from absl import logging

from m2jax.pool import tables, watch

_T = TypeVar('_T')
_LOCK = int.from_bytes(b'm2jax', 'big')  # advisory locks are per database
_IDLE_S = 30  # of a connection inside a transaction
_BUSY_S = 30.0  # for which SQLite itself waits for a lock
# Options of libpq: a server that vanished without a word is noticed in about 20 s.
_LIBPQ = dict(
  connect_timeout=5,
  keepalives_idle=10,
  keepalives_interval=5,
  keepalives_count=2,
  tcp_user_timeout=20_000,  # ms
  application_name='m2jax',
)
_LONGEST_PAUSE_S = 1.0
# SQLite's primary error codes of a lock that another connection has.
_LOCKED = sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL


class PoolBroken(RuntimeError):
  """The database cannot be used; nothing more is accepted. Fix it and restart."""

  repeatable = False


class Database:
  """An open database.

  Attributes:
    url: its URL without the password, for messages.
    engine: SQLAlchemy's; the option `write=True` is for connections that write.
    server: whether it is a server, whose connections may be lost.
    outage_s: seconds for which a lost server, or a locked file, is awaited.
  """

  def __init__(self, engine: sa.Engine, url: str, outage_s: float = 0.0):
    self.engine, self.url, self.outage_s = engine, shown_url(url), outage_s
    self.server = engine.dialect.name != 'sqlite'

  @contextlib.contextmanager
  def transaction(self) -> Iterator[sa.Connection]:
    """A write transaction, committed at the end of the block."""
    with self.engine.connect() as connection:
      connection = connection.execution_options(write=True)
      with watch.watched(connection, self.url), connection.begin():
        yield connection

  def read(self, function: Callable[[sa.Connection], _T]) -> _T:
    """Returns `function(connection)`, which only reads.

    Raises:
      PoolBroken: it cannot be read, or was away for longer than `outage_s`.
    """

    def run():
      with self.engine.connect() as connection, watch.watched(connection, self.url):
        return function(connection)

    try:
      return self.retrying(run)
    except sa.exc.DBAPIError as error:
      if not fatal(error):
        raise
      message = f'data pool {self.url}: cannot read: {first_line(error)}'
      raise PoolBroken(message) from error

  def retrying(self, run: Callable[[], _T]) -> _T:
    """Returns `run()`; repeats it while the database is away, for up to `outage_s`.

    Raises:
      PoolBroken: it stayed away; the last error is its cause.
    """
    give_up_s, pause_s = None, 0.05
    while True:
      try:
        return run()
      except sa.exc.DBAPIError as error:
        if not self._lost(error):
          raise
        now_s = time.monotonic()
        if give_up_s is None:
          give_up_s = now_s + self.outage_s
          logging.warning(
            'data pool %s: %s; trying again for %g s',
            *(self.url, first_line(error), self.outage_s),
          )
        if now_s >= give_up_s:
          raise PoolBroken(
            f'data pool {self.url}: no connection for {self.outage_s:g} s: '
            f'{first_line(error)}'
          ) from error
        time.sleep(min(pause_s, give_up_s - now_s))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

  def sync(self) -> bool:
    """Makes commits survive a power failure, on SQLite; on servers they do.

    Returns:
      Whether SQLite's write-ahead log was moved into the database completely. A reader
      or another writer can block that; the log is then synced to disk, but continues to
      grow.
    """
    if self.server:
      return True
    connection = self.engine.raw_connection()
    try:
      query = 'PRAGMA wal_checkpoint(PASSIVE)'
      busy, frames, moved = connection.cursor().execute(query).fetchone()
    finally:
      connection.close()
    if not busy and frames == moved:
      return True
    log = os.open(self.engine.url.database + '-wal', os.O_RDONLY)
    try:
      os.fsync(log)
    finally:
      os.close(log)
    return False

  def close(self) -> None:
    """Closes all connections. Idempotent."""
    self.engine.dispose()

  def _lost(self, error: sa.exc.DBAPIError) -> bool:
    """Whether the server is away or about to restart, or the SQLite file is locked."""
    if not self.server:
      return getattr(error.orig, 'sqlite_errorcode', 0) & 0xFF in _LOCKED
    lost = error.connection_invalidated or isinstance(error, sa.exc.OperationalError)
    return lost and not (_about_data(error) or _turned_away(error))


def open_database(url: str, outage_s: float = 0.0) -> tuple[Database, str]:
  """Opens a pool's database and creates missing tables.

  Returns:
    The database, and the run id that the pool got when it was created.

  Raises:
    ValueError: the URL cannot be used, or holds a pool of another schema version.
    PoolBroken: the server was away for longer than `outage_s`.
  """
  database = Database(_engine(url), url, outage_s)

  def run():
    with database.transaction() as connection:
      return _open_tables(connection, database.url)

  try:
    return database, database.retrying(run)
  except sa.exc.SQLAlchemyError as error:
    database.close()
    raise ValueError(
      f'data pool: {database.url!r}: cannot open it: {first_line(error)}'
    ) from error
  except BaseException:
    database.close()
    raise


def open_read_only(url: str | os.PathLike) -> Database:
  """A pool that is only read, while its run may be writing it.

  Args:
    url: a URL, or the path of a SQLite file.

  Raises:
    ValueError: it is not a data pool, or one of another schema version.
  """
  if '://' in str(url) and not str(url).startswith('sqlite:'):
    engine = _engine(str(url), read_only=True)
  else:
    path = os.path.abspath(str(url).removeprefix('sqlite:///'))
    quoted = urllib.parse.quote(path)
    engine = sa.create_engine(f'sqlite:///file:{quoted}?mode=ro&uri=true')
    sa.event.listen(engine, 'connect', _explicit_begin)
    sa.event.listen(engine, 'begin', _on_sqlite_begin)
  database = Database(engine, str(url))
  try:
    with engine.connect() as connection:
      _check_objects(connection, database.url)
      _check_schema(_meta(connection), database.url)
  except sa.exc.SQLAlchemyError as error:
    database.close()
    raise ValueError(f'{database.url}: not a data pool: {first_line(error)}') from error
  except BaseException:
    database.close()
    raise
  return database


def shown_url(url: str) -> str:
  """The URL without its passwords, for messages; also of URLs that do not parse."""
  if '://' in url:
    shown = re.sub(r'(?s)(://[^:@/]*):.*@', r'\1:***@', url, count=1)
  else:
    shown = re.sub(r'(?s):.*@', ':***@', url)
  return re.sub(r'(?i)(password=)[^&]*', r'\1***', shown)


def fatal(error: BaseException) -> bool:
  """Whether an error is the database's, not that of the data in a statement.

  Such as: disk full, lost connection, missing table, no privilege.
  """
  if not isinstance(error, sa.exc.DBAPIError) or _about_data(error):
    return False
  if error.connection_invalidated:
    return True
  if isinstance(error, sa.exc.ProgrammingError):
    return _sqlstate(error) is not None  # else the driver cannot convert a value
  return isinstance(error, (sa.exc.OperationalError, sa.exc.InternalError))


# --- Numbers of committed transactions ---


def committed(connection: sa.Connection, writer: str) -> int:
  """Number of the writer's last transaction that was committed; 0 before the first."""
  w = tables.writers.c
  found = connection.scalar(sa.select(w.batch).where(w.writer == writer))
  return found or 0


def set_committed(connection: sa.Connection, writer: str, batch: int) -> None:
  """Makes the number a part of this transaction."""
  table = tables.writers
  changed = connection.execute(
    sa.update(table).where(table.c.writer == writer).values(batch=batch)
  )
  if not changed.rowcount:
    connection.execute(sa.insert(table), {'writer': writer, 'batch': batch})


def forget(connection: sa.Connection, writer: str) -> None:
  """Removes the row of a writer that ends."""
  table = tables.writers
  connection.execute(sa.delete(table).where(table.c.writer == writer))


# --- Opening ---


def _engine(url: str, read_only: bool = False) -> sa.Engine:
  shown = shown_url(url)
  try:
    parsed = sa.make_url(url)
  except (sa.exc.ArgumentError, ValueError):
    raise ValueError(
      f"data pool: {shown!r} is not a database URL such as 'sqlite:////tmp/pool.db' "
      "or 'postgresql://user@host/database'"
    ) from None  # the cause may show the password
  backend = parsed.get_backend_name()
  if backend not in ('sqlite', 'postgresql'):
    raise ValueError(f'data pool: {shown!r}: must be of sqlite or postgresql')
  if backend == 'sqlite':
    if parsed.database in (None, '', ':memory:'):
      raise ValueError(f'data pool: {shown!r}: SQLite needs a file')
    engine = sa.create_engine(parsed)
    sa.event.listen(engine, 'connect', _on_sqlite_connect)
    sa.event.listen(engine, 'begin', _on_sqlite_begin)
    return engine
  if parsed.drivername == 'postgresql':
    parsed = parsed.set(drivername='postgresql+psycopg')
  options = {k: v for k, v in _LIBPQ.items() if k not in parsed.query}
  try:
    engine = sa.create_engine(
      parsed, connect_args=options, isolation_level='READ COMMITTED'
    )
  except ImportError as error:
    raise ValueError(
      f'data pool: {shown!r}: the driver is missing ({error}): install '
      "'m2jax[postgresql]'"
    ) from error
  settings = [f'idle_in_transaction_session_timeout = {1000 * _IDLE_S}']
  if read_only:
    settings.append('default_transaction_read_only = on')

  def on_connect(connection, _):
    with connection.cursor() as cursor:
      for setting in settings:
        cursor.execute(f'SET {setting}')
      # A setting of the role or the database; others wait for more than this.
      cursor.execute(
        "SELECT set_config('synchronous_commit', 'on', false) "
        "WHERE current_setting('synchronous_commit') = 'off'"
      )
    connection.commit()

  sa.event.listen(engine, 'connect', on_connect)
  sa.event.listen(engine, 'begin', _on_postgresql_begin)
  return engine


def _open_tables(connection: sa.Connection, url: str) -> str:
  """Creates the tables that are missing; returns the run id."""
  _check_objects(connection, url)
  tables.metadata.create_all(connection)
  values = _meta(connection)
  if not values:
    values = {'schema_version': str(tables.SCHEMA_VERSION), 'run': uuid.uuid4().hex}
    values[tables.OWNER] = ''
    rows = [{'key': k, 'value': v} for k, v in values.items()]
    connection.execute(sa.insert(tables.meta), rows)
  _check_schema(values, url)
  if connection.dialect.name == 'postgresql':
    fsync = connection.exec_driver_sql("SELECT current_setting('fsync')").scalar()
    if fsync == 'off':
      logging.warning(
        'data pool %s: the server has fsync off: a power failure loses commits', url
      )
  return values['run']


def _check_objects(connection: sa.Connection, url: str) -> None:
  """Raises ValueError if a SQLite file has more than tables and indices.

  In place of a table it could have a view, whose query never ends, and triggers.
  """
  if connection.dialect.name != 'sqlite':
    return
  found = connection.exec_driver_sql(
    "SELECT 1 FROM sqlite_master WHERE type NOT IN ('table', 'index') "
    "OR sql LIKE 'CREATE VIRTUAL%'"
  )
  if found.first():
    raise ValueError(f'data pool: {url!r} has views, triggers or virtual tables')


def _meta(connection: sa.Connection) -> dict[str, str]:
  return {r.key: r.value for r in connection.execute(sa.select(tables.meta))}


def _check_schema(values: dict[str, str], name: str) -> None:
  version = values.get('schema_version')
  if version != str(tables.SCHEMA_VERSION):
    raise ValueError(
      f'data pool: {name!r} has schema version {version}, this code reads '
      f'{tables.SCHEMA_VERSION}: use the code that wrote it, or a new pool'
    )


# --- Errors ---


def _sqlstate(error: sa.exc.DBAPIError) -> str | None:
  return getattr(error.orig, 'sqlstate', None)


def _about_data(error: sa.exc.DBAPIError) -> bool:
  """Limits of the program, such as the length of an indexed text: of one row."""
  return (_sqlstate(error) or '').startswith('54')


def _turned_away(error: sa.exc.DBAPIError) -> bool:
  """Whether a server refused the connection for a reason that waiting does not cure."""
  text = str(error.orig)
  for_now = 'the database system is' in text or 'too many' in text or 'slots' in text
  return _sqlstate(error) is None and 'FATAL: ' in text and not for_now


def first_line(error: BaseException) -> str:
  """The message of an error without the statement and its values, which follow."""
  return str(getattr(error, 'orig', None) or error).strip().partition('\n')[0]


# --- Events ---


def _explicit_begin(dbapi_connection: Any, _=None) -> None:
  # The driver's own transaction control breaks savepoints; SQLAlchemy's documentation
  # says to begin transactions explicitly.
  dbapi_connection.isolation_level = None


def _on_sqlite_connect(dbapi_connection: Any, _) -> None:
  _explicit_begin(dbapi_connection)
  cursor = dbapi_connection.cursor()
  cursor.execute(f'PRAGMA busy_timeout={1000 * _BUSY_S:.0f}')  # also for the next one
  cursor.execute('PRAGMA journal_mode=WAL')
  cursor.execute('PRAGMA synchronous=NORMAL')
  cursor.close()


def _on_sqlite_begin(connection: sa.Connection) -> None:
  write = connection.get_execution_options().get('write')
  connection.exec_driver_sql('BEGIN IMMEDIATE' if write else 'BEGIN')


def _on_postgresql_begin(connection: sa.Connection) -> None:
  if connection.get_execution_options().get('write'):
    connection.exec_driver_sql(f'SELECT pg_advisory_xact_lock({_LOCK})')
