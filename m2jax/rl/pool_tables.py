"""The data pool's tables, and how records become rows and back.

Token ids, log-probabilities and versions of a completion lie in one blob: a header
byte, three little-endian int32 lengths, then int32 prompt ids, int32 response ids,
float32 log-probabilities (float64 where float32 would lose bits) and int32 versions;
where expert ids were recorded, two int32 (L, top_k) and the int16 ids follow. Messages
are JSON. Bodies above `COMPRESS_BYTES` are zstd frames.
"""

from __future__ import annotations

import json
import math
import struct
import threading
import uuid
from typing import Any

import numpy as np
import sqlalchemy as sa
import zstandard

from m2jax.rl import records

SCHEMA_VERSION = 2
COMPRESS_BYTES = 1024

_LENGTHS = struct.Struct('<iii')
_EXPERTS = struct.Struct('<ii')
_ZSTD, _FLOAT64, _HAS_EXPERTS = 1, 2, 4  # header bits
_local = threading.local()

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
  sa.Column('pruned', sa.Boolean, nullable=False, default=False),
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
  sa.Column('ended', sa.String, nullable=False),
  sa.Column('reason', sa.Text, nullable=False),
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
  sa.Column('advantages', sa.JSON),  # [[turn, advantage], …]
  sa.Index('trajectories_by_item', 'item', 'superseded'),
)
# One live trajectory per place in a group; superseded and evaluated ones are free.
_live_place = sa.and_(~trajectories.c.superseded, trajectories.c.item >= 0)
sa.Index(
  'one_live_trajectory_per_rank',
  trajectories.c.item,
  trajectories.c.rank,
  unique=True,
  sqlite_where=_live_place,
  postgresql_where=_live_place,
)

completions = sa.Table(
  'completions',
  _metadata,
  sa.Column('row', _RowId, primary_key=True),
  sa.Column('id', sa.String, nullable=False, unique=True),
  sa.Column('session', sa.String, nullable=False, index=True),
  sa.Column('turn', sa.Integer, nullable=False),
  sa.Column('parent', sa.String),
  sa.Column('fork_reason', sa.Text),
  sa.Column('finish_reason', sa.String, nullable=False),
  sa.Column('status', sa.String, nullable=False),
  sa.Column('overrides', sa.Text, nullable=False),
  sa.Column('started_s', sa.Float, nullable=False),
  sa.Column('ended_s', sa.Float, nullable=False),
  sa.Column('prompt_tokens', sa.Integer, nullable=False),
  sa.Column('response_tokens', sa.Integer, nullable=False),
  sa.Column('arrays', sa.LargeBinary, nullable=False),
  sa.Column('superseded', sa.Boolean, nullable=False),
)


def open_database(url: str) -> tuple[sa.Engine, str]:
  """Opens a pool's database, creating what is missing.

  Connections with the execution option `write=True` begin write transactions.

  Returns:
    The engine, and the run id that the pool got when it was made.

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
  values = {r.key: r.value for r in connection.execute(sa.select(meta))}
  if not values:
    values = {'schema_version': str(SCHEMA_VERSION), 'run': uuid.uuid4().hex}
    rows = [{'key': k, 'value': v} for k, v in values.items()]
    connection.execute(sa.insert(meta), rows)
  if values['schema_version'] != str(SCHEMA_VERSION):
    raise ValueError(
      f'data pool: {url!r} has schema version {values["schema_version"]}, this code '
      f'reads {SCHEMA_VERSION}: use the code that wrote it, or a new pool'
    )
  return values['run']


def sync(engine: sa.Engine) -> None:
  """Makes what is committed survive the loss of power, where commits do not already."""
  if engine.dialect.name == 'sqlite':
    connection = engine.raw_connection()
    try:
      connection.cursor().execute('PRAGMA wal_checkpoint(PASSIVE)').fetchall()
    finally:
      connection.close()


def clean_text(text: str) -> str:
  """Replaces NUL and lone surrogates, which databases refuse."""
  text = text.replace('\0', '\ufffd')
  return text.encode('utf-8', 'replace').decode('utf-8')


def check_completion(c: records.Completion) -> None:
  """Refuses a completion that could not be trained on as it was sampled (law 4).

  Raises:
    ValueError: naming the field; lengths differ, a log-probability is not finite, or
      expert ids are not int16 [tokens, L, top_k].
  """
  for field in ('logprobs', 'versions'):
    if len(getattr(c, field)) != len(c.response_ids):
      raise ValueError(
        f'completion {c.id}: {field} has {len(getattr(c, field))} entries for '
        f'{len(c.response_ids)} response tokens'
      )
  if not all(map(math.isfinite, c.logprobs)):
    raise ValueError(f'completion {c.id}: logprobs has a value that is not finite')
  tokens = len(c.prompt_ids) + len(c.response_ids)
  if (e := c.experts) is not None and (
    e.ndim != 3 or len(e) != tokens or e.dtype != np.int16
  ):
    raise ValueError(
      f'completion {c.id}: experts is {e.dtype} {e.shape}, want int16 of '
      f'({tokens}, L, top_k)'
    )


def completion_row(c: records.Completion) -> dict[str, Any]:
  """The completion as a row of `completions`, `superseded` false."""
  return dict(
    id=c.id,
    session=c.session,
    turn=c.turn,
    parent=c.parent,
    fork_reason=c.fork_reason,
    finish_reason=c.finish_reason,
    status=c.status,
    overrides=','.join(c.overrides),
    started_s=c.started_s,
    ended_s=c.ended_s,
    prompt_tokens=len(c.prompt_ids),
    response_tokens=len(c.response_ids),
    arrays=_pack_arrays(c),
    superseded=False,
  )


def completion(row: sa.Row) -> records.Completion:
  """The record of a row of `completions`, exactly as it was added."""
  prompt_ids, response_ids, logprobs, versions, experts = _unpack_arrays(row.arrays)
  return records.Completion(
    id=row.id,
    session=row.session,
    turn=row.turn,
    parent=row.parent,
    fork_reason=row.fork_reason,
    prompt_ids=prompt_ids,
    response_ids=response_ids,
    logprobs=logprobs,
    versions=versions,
    finish_reason=row.finish_reason,
    status=row.status,
    overrides=tuple(row.overrides.split(',')) if row.overrides else (),
    started_s=row.started_s,
    ended_s=row.ended_s,
    experts=experts,
  )


def trajectory_row(t: records.Trajectory) -> dict[str, Any]:
  """The trajectory as a row of `trajectories`, `superseded` false."""
  row = {f: getattr(t, f) for f in _TRAJECTORY_FIELDS}
  for field in ('answer', 'reason'):
    row[field] = clean_text(row[field])
  row['messages'] = _pack(0, json.dumps(t.messages, separators=(',', ':')).encode())
  row['superseded'] = False
  return row


def trajectory(row: sa.Row) -> records.Trajectory:
  """The record of a row of `trajectories`; messages are empty once pruned."""
  fields = {f: getattr(row, f) for f in _TRAJECTORY_FIELDS}
  messages = ()
  if row.messages is not None:
    messages = tuple(json.loads(_unpack(row.messages)[1]))
  return records.Trajectory(messages=messages, **fields)


def work_item(row: sa.Row) -> records.WorkItem:
  """The record of a row of `items`."""
  return records.WorkItem(row.index, row.task, row.group_size, row.attempt)


_TRAJECTORY_FIELDS = (
  'session',
  'item',
  'rank',
  'task',
  'family',
  'ended',
  'reason',
  'success',
  'wall_s',
  'tool_calls',
  'tool_errors',
  'answer',
)


def _pack_arrays(c: records.Completion) -> bytes:
  logprobs = np.array(c.logprobs, '<f8')
  narrow = logprobs.astype('<f4')
  flags = 0
  if np.array_equal(narrow, logprobs):
    logprobs = narrow  # the engine samples in float32: nothing is lost
  else:
    flags = _FLOAT64
  parts = [
    _LENGTHS.pack(len(c.prompt_ids), len(c.response_ids), len(c.versions)),
    np.array(c.prompt_ids, '<i4').tobytes(),
    np.array(c.response_ids, '<i4').tobytes(),
    logprobs.tobytes(),
    np.array(c.versions, '<i4').tobytes(),
  ]
  if c.experts is not None:
    flags |= _HAS_EXPERTS
    parts += [_EXPERTS.pack(*c.experts.shape[1:]), c.experts.astype('<i2').tobytes()]
  return _pack(flags, b''.join(parts))


def _unpack_arrays(blob: bytes) -> tuple[tuple, tuple, tuple, tuple, np.ndarray | None]:
  flags, body = _unpack(blob)
  prompt, response, versions = _LENGTHS.unpack_from(body)
  offset, out = _LENGTHS.size, []
  logprob_dtype = '<f8' if flags & _FLOAT64 else '<f4'
  for dtype, count in (
    ('<i4', prompt),
    ('<i4', response),
    (logprob_dtype, response),
    ('<i4', versions),
  ):
    values = np.frombuffer(body, dtype, count, offset)
    offset += values.nbytes
    out.append(tuple(values.tolist()))
  experts = None
  if flags & _HAS_EXPERTS:
    shape = prompt + response, *_EXPERTS.unpack_from(body, offset)
    offset += _EXPERTS.size
    experts = np.frombuffer(body, '<i2', math.prod(shape), offset).reshape(shape)
  return *out, experts


def _zstd() -> zstandard.ZstdCompressor:
  """This thread's compressor: making one costs as much as a completion."""
  if not hasattr(_local, 'zstd'):
    _local.zstd = zstandard.ZstdCompressor(level=1)
  return _local.zstd


def _pack(flags: int, body: bytes) -> bytes:
  if len(body) > COMPRESS_BYTES:
    return bytes([flags | _ZSTD]) + _zstd().compress(body)
  return bytes([flags]) + body


def _unpack(blob: bytes) -> tuple[int, bytes]:
  flags, body = blob[0], blob[1:]
  if flags & _ZSTD:
    body = zstandard.decompress(body)
  return flags, body


def _on_sqlite_connect(dbapi_connection, _) -> None:
  # The driver's own transaction control breaks savepoints: begin by hand, which is
  # SQLAlchemy's documented way.
  dbapi_connection.isolation_level = None
  cursor = dbapi_connection.cursor()
  cursor.execute('PRAGMA journal_mode=WAL')
  cursor.execute('PRAGMA synchronous=NORMAL')
  cursor.execute('PRAGMA busy_timeout=30000')
  cursor.close()


def _on_sqlite_begin(connection: sa.Connection) -> None:
  write = connection.get_execution_options().get('write')
  connection.exec_driver_sql('BEGIN IMMEDIATE' if write else 'BEGIN')
