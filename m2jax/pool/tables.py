"""The data pool's tables, and conversion between records and rows.

Token ids, log-probabilities, versions and expert ids of a completion are one blob
(`arrays`). Messages are JSON, compressed in the same way.
"""

from __future__ import annotations

import json
import os
import urllib.parse
import uuid
from collections.abc import Iterable
from typing import Any

import numpy as np
import sqlalchemy as sa

from m2jax import records
from m2jax.pool import arrays

SCHEMA_VERSION = 4

_metadata = sa.MetaData()
# SQLite gives rowids only to columns spelled INTEGER.
_RowId = sa.BigInteger().with_variant(sa.Integer(), 'sqlite')

meta = sa.Table(
  'meta',
  _metadata,
  sa.Column('key', sa.String, primary_key=True),
  sa.Column('value', sa.String, nullable=False),
)

items = sa.Table(
  'items',
  _metadata,
  sa.Column('index', sa.Integer, primary_key=True, autoincrement=False),
  sa.Column('task', sa.Text, nullable=False),
  sa.Column('group_size', sa.Integer, nullable=False),
  sa.Column('attempt', sa.Integer, nullable=False),
  sa.Column('state', sa.String, nullable=False),  # pending, completed, taken, failed
  sa.Column('reason', sa.Text, nullable=False, default=''),
  sa.Column('step', sa.Integer),  # learner step that took it
  sa.Column('taken_before', sa.Integer, nullable=False),
  sa.Column('pruned', sa.Boolean, nullable=False, default=False),
  sa.Column('lease', sa.String, unique=True),  # these three: see `leases`
  sa.Column('beats', sa.Integer, nullable=False, default=0),
  sa.Column('report', sa.Text),
  sa.Index('items_by_state', 'state', 'step', 'index'),
)

trajectories = sa.Table(
  'trajectories',
  _metadata,
  sa.Column('row', _RowId, primary_key=True),
  sa.Column('session', sa.String, nullable=False, unique=True),
  sa.Column('item', sa.Integer, nullable=False),
  sa.Column('rank', sa.Integer, nullable=False),
  sa.Column('task', sa.Text, nullable=False),
  sa.Column('family', sa.String, nullable=False),
  sa.Column('end_reason', sa.String, nullable=False),
  sa.Column('error', sa.Text, nullable=False),
  sa.Column('success', sa.Float, nullable=False),
  sa.Column('wall_s', sa.Float, nullable=False),
  sa.Column('tool_calls', sa.Integer, nullable=False),
  sa.Column('tool_errors', sa.Integer, nullable=False),
  sa.Column('answer', sa.Text, nullable=False),
  sa.Column('messages', sa.LargeBinary),  # null once pruned
  sa.Column('superseded', sa.Boolean, nullable=False),
  sa.Column('process', sa.Float),  # rewards: null until the learner sets them
  sa.Column('speed', sa.Float),
  sa.Column('perf', sa.Float),
  sa.Column('total', sa.Float),
  sa.Index('trajectories_by_item', 'item', 'superseded'),
)
# One live trajectory per rank in a group, except for superseded ones and evaluations.
_live_place = sa.and_(~trajectories.c.superseded, trajectories.c.item >= 0)
sa.Index(
  'one_live_trajectory_per_rank',
  trajectories.c.item,
  trajectories.c.rank,
  unique=True,
  sqlite_where=_live_place,
  postgresql_where=_live_place,
)

# See `records.Lineages`.
lineages = sa.Table(
  'lineages',
  _metadata,
  sa.Column('lineage', sa.Integer, primary_key=True, autoincrement=False),
  sa.Column('parent', sa.Integer, nullable=False),
  sa.Column('step', sa.Integer, nullable=False),
)

completions = sa.Table(
  'completions',
  _metadata,
  sa.Column('row', _RowId, primary_key=True),
  sa.Column('id', sa.String, nullable=False, unique=True),
  sa.Column('session', sa.String, nullable=False, index=True),
  sa.Column('turn', sa.Integer, nullable=False),
  sa.Column('parent', sa.String),
  sa.Column('follows', sa.String),
  sa.Column('fork_reason', sa.Text),
  sa.Column('finish_reason', sa.String, nullable=False),
  sa.Column('status', sa.String, nullable=False),
  sa.Column('overrides', sa.Text, nullable=False),
  sa.Column('started_s', sa.Float, nullable=False),
  sa.Column('ended_s', sa.Float, nullable=False),
  sa.Column('prompt_tokens', sa.Integer, nullable=False),
  sa.Column('response_tokens', sa.Integer, nullable=False),
  sa.Column('lineage', sa.Integer, nullable=False),
  sa.Column('first_version', sa.Integer),  # null without response tokens
  sa.Column('last_version', sa.Integer),
  sa.Column('advantage', sa.Float),  # null if it was not judged
  sa.Column('superseded', sa.Boolean, nullable=False),
  # Last, so that queries of the other columns need not read it. Null once pruned.
  sa.Column('arrays', sa.LargeBinary),
)


def open_database(url: str) -> tuple[sa.Engine, str]:
  """Opens a pool's database and creates missing tables.

  Connections with the execution option `write=True` begin write transactions.

  Returns:
    The engine, and the run id that the pool got when it was created.

  Raises:
    ValueError: the URL cannot be used, or holds a pool of another schema version.
  """
  try:
    parsed = sa.make_url(url)
  except sa.exc.ArgumentError as error:
    raise ValueError(
      f"data pool: {url!r} is not a database URL such as 'sqlite:////tmp/pool.db'"
    ) from error
  sqlite = parsed.get_backend_name() == 'sqlite'
  if sqlite and parsed.database in (None, '', ':memory:'):
    raise ValueError(f'data pool: {url!r}: SQLite needs a file')
  engine = sa.create_engine(parsed)
  if sqlite:
    sa.event.listen(engine, 'connect', _on_sqlite_connect)
    sa.event.listen(engine, 'begin', _on_sqlite_begin)
  try:
    with (
      engine.connect().execution_options(write=True) as connection,
      connection.begin(),
    ):
      return engine, _open_tables(connection, url)
  except BaseException:
    engine.dispose()
    raise


def _open_tables(connection: sa.Connection, url: str) -> str:
  """Creates the tables that are missing; returns the run id."""
  _metadata.create_all(connection)
  values = _meta(connection)
  if not values:
    values = {'schema_version': str(SCHEMA_VERSION), 'run': uuid.uuid4().hex}
    rows = [{'key': k, 'value': v} for k, v in values.items()]
    connection.execute(sa.insert(meta), rows)
  _check_schema(values, url)
  return values['run']


def open_read_only(path: str | os.PathLike) -> sa.Engine:
  """An engine that only reads a SQLite pool, whose run may be writing it meanwhile.

  Raises:
    ValueError: the file is not a data pool, or one of another schema version.
  """
  path = os.path.abspath(path)
  quoted = urllib.parse.quote(path)
  engine = sa.create_engine(f'sqlite:///file:{quoted}?mode=ro&uri=true')
  try:
    with engine.connect() as connection:
      _check_schema(_meta(connection), path)
  except sa.exc.DBAPIError as error:
    raise ValueError(f'{path}: not a data pool: {error.orig}') from error
  return engine


def _meta(connection: sa.Connection) -> dict[str, str]:
  return {r.key: r.value for r in connection.execute(sa.select(meta))}


def _check_schema(values: dict[str, str], name: str) -> None:
  version = values.get('schema_version')
  if version != str(SCHEMA_VERSION):
    raise ValueError(
      f'data pool: {name!r} has schema version {version}, this code reads '
      f'{SCHEMA_VERSION}: use the code that wrote it, or a new pool'
    )


def sync(engine: sa.Engine) -> bool:
  """Makes commits survive a power failure, on databases where they do not already.

  Returns:
    Whether SQLite's write-ahead log was moved into the database completely. A reader or
    another writer can block that; the log is then synced to disk, but continues to
    grow.
  """
  if engine.dialect.name != 'sqlite':
    return True
  connection = engine.raw_connection()
  try:
    query = 'PRAGMA wal_checkpoint(PASSIVE)'
    busy, frames, moved = connection.cursor().execute(query).fetchone()
  finally:
    connection.close()
  if not busy and frames == moved:
    return True
  log = os.open(engine.url.database + '-wal', os.O_RDONLY)
  try:
    os.fsync(log)
  finally:
    os.close(log)
  return False


def clean_text(text: str) -> str:
  """Replaces NUL and lone surrogates, which databases reject."""
  text = text.replace('\0', '\ufffd')
  return text.encode('utf-8', 'replace').decode('utf-8')


def check_completion(c: records.Completion) -> None:
  """Checks that a completion can be trained on as it was sampled (law 4).

  Raises:
    ValueError: lengths differ, a log-probability is not finite, or expert ids are not
      int16 [tokens, L, top_k]; names the field.
  """
  for field in ('logprobs', 'versions'):
    if len(getattr(c, field)) != len(c.response_ids):
      raise ValueError(
        f'completion {c.id}: {field} has {len(getattr(c, field))} entries for '
        f'{len(c.response_ids)} response tokens'
      )
  if not np.isfinite(c.logprobs).all():
    raise ValueError(f'completion {c.id}: logprobs has a value that is not finite')
  tokens = len(c.prompt_ids) + len(c.response_ids)
  if (e := c.experts) is not None and (
    e.ndim != 3 or len(e) != tokens or e.dtype != np.int16
  ):
    raise ValueError(
      f'completion {c.id}: experts is {e.dtype} {e.shape}: must be int16 '
      f'({tokens}, L, top_k)'
    )


def completion_row(
  c: records.Completion, parent: records.Completion | None
) -> dict[str, Any]:
  """The completion as a row of `completions`, not superseded.

  Args:
    parent: see `arrays.pack`.
  """
  return dict(
    id=c.id,
    session=c.session,
    turn=c.turn,
    parent=c.parent,
    follows=c.follows,
    fork_reason=c.fork_reason,
    finish_reason=c.finish_reason,
    status=c.status,
    overrides=','.join(c.overrides),
    started_s=c.started_s,
    ended_s=c.ended_s,
    prompt_tokens=len(c.prompt_ids),
    response_tokens=len(c.response_ids),
    lineage=c.lineage,
    first_version=int(c.versions.min()) if c.versions.size else None,
    last_version=int(c.versions.max()) if c.versions.size else None,
    arrays=arrays.pack(c, parent),
    superseded=False,
  )


def completions_of(rows: Iterable[sa.Row]) -> dict[str, records.Completion]:
  """Completions by id, exactly as they were added, without pruned ones.

  Args:
    rows: all rows of `completions` of some sessions, in the order they were added.
  """
  out: dict[str, records.Completion] = {}
  for row in rows:
    if row.arrays is None:
      continue
    out[row.id] = records.Completion(
      id=row.id,
      session=row.session,
      turn=row.turn,
      parent=row.parent,
      fork_reason=row.fork_reason,
      follows=row.follows,
      finish_reason=row.finish_reason,
      status=row.status,
      overrides=tuple(row.overrides.split(',')) if row.overrides else (),
      started_s=row.started_s,
      ended_s=row.ended_s,
      lineage=row.lineage,
      **arrays.unpack(row.arrays, out.get(row.parent)),
    )
  return out


def trajectory_row(t: records.Trajectory) -> dict[str, Any]:
  """The trajectory as a row of `trajectories`, not superseded."""
  row = {f: getattr(t, f) for f in _TRAJECTORY_FIELDS}
  for field in ('answer', 'error'):
    row[field] = clean_text(row[field])
  text = json.dumps(t.messages, separators=(',', ':'))
  row['messages'] = arrays.compress(0, text.encode())
  row['superseded'] = False
  return row


def trajectory(row: sa.Row) -> records.Trajectory:
  """The record of a row of `trajectories`; messages are empty once pruned."""
  fields = {f: getattr(row, f) for f in _TRAJECTORY_FIELDS}
  messages = ()
  if row.messages is not None:
    messages = tuple(json.loads(arrays.decompress(row.messages)[1]))
  return records.Trajectory(messages=messages, **fields)


def work_item(row: sa.Row) -> records.WorkItem:
  """The record of a row of `items`."""
  return records.WorkItem(
    row.index, row.task, row.group_size, row.attempt, row.taken_before
  )


_TRAJECTORY_FIELDS = (
  'session',
  'item',
  'rank',
  'task',
  'family',
  'end_reason',
  'error',
  'success',
  'wall_s',
  'tool_calls',
  'tool_errors',
  'answer',
)


def _on_sqlite_connect(dbapi_connection, _) -> None:
  # The driver's own transaction control breaks savepoints; SQLAlchemy's documentation
  # says to begin transactions explicitly.
  dbapi_connection.isolation_level = None
  cursor = dbapi_connection.cursor()
  cursor.execute('PRAGMA busy_timeout=30000')  # also for the next one
  cursor.execute('PRAGMA journal_mode=WAL')
  cursor.execute('PRAGMA synchronous=NORMAL')
  cursor.close()


def _on_sqlite_begin(connection: sa.Connection) -> None:
  write = connection.get_execution_options().get('write')
  connection.exec_driver_sql('BEGIN IMMEDIATE' if write else 'BEGIN')
