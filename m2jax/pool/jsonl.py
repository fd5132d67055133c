"""The whole pool as JSON lines: for backups, other tools, and another database.

A pool that is written and then read into an empty database is the same pool: a run
continues on it, since its run id and states are there. One object a line, with a kind:

  pool        first: schema, run id, and what `retention` has deleted
  lineage     rows of `tables.lineages`
  item        rows of `tables.items`
  trajectory  `records.Trajectory`, superseded, and the reward or nulls
  completion  `records.Completion` with all its token ids, superseded, advantage; those
              of a session follow one another. Once pruned, the arrays are null. Expert
              ids are base64 of int16, beside their shape
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import sqlalchemy as sa

from m2jax import records
from m2jax.pool import tables
from m2jax.pool.database import Database, fatal
from m2jax.text import json_lines

SCHEMA = 1
_ARRAYS = 'prompt_ids', 'response_ids', 'logprobs', 'versions'
_REWARD = 'process', 'speed', 'perf', 'total'


def lines(database: Database) -> Iterator[str]:
  """The pool, a line at a time, in one read transaction."""
  with database.engine.connect() as connection:
    # All queries have to see one state.
    if database.server:
      connection = connection.execution_options(isolation_level='REPEATABLE READ')
    for kind, fields in _records(connection):
      yield json.dumps({'kind': kind, **fields}, separators=(',', ':'))


def _records(connection: sa.Connection) -> Iterator[tuple[str, dict[str, Any]]]:
  meta = {r.key: r.value for r in connection.execute(sa.select(tables.meta))}
  meta.pop('schema_version')
  yield 'pool', {'schema': SCHEMA, **meta}
  for table, kind, key in (
    (tables.lineages, 'lineage', 'lineage'),
    (tables.items, 'item', 'index'),
  ):
    for row in connection.execute(sa.select(table).order_by(table.c[key])):
      yield kind, dict(row._mapping)
  t, c = tables.trajectories, tables.completions
  for row in connection.execute(sa.select(t).order_by(t.c.row)):
    fields = {f: getattr(row, f) for f in (*_REWARD, 'superseded')}
    record = tables.trajectory(row)
    yield 'trajectory', {**vars(record), **fields, 'pruned': row.messages is None}
  first = sa.func.min(c.c.row)
  sessions = sa.select(c.c.session).group_by(c.c.session).order_by(first)
  for session in connection.scalars(sessions).all():
    query = sa.select(c).where(c.c.session == session).order_by(c.c.row)
    rows = connection.execute(query).all()
    found = tables.completions_of(rows)
    for row in rows:
      yield 'completion', _completion(row, found.get(row.id))


def _completion(row: sa.Row, record: records.Completion | None) -> dict[str, Any]:
  fields = {k: v for k, v in row._mapping.items() if k not in ('row', 'arrays')}
  fields |= dict.fromkeys((*_ARRAYS, 'experts'))
  if record is not None:
    fields |= {name: getattr(record, name).tolist() for name in _ARRAYS}
    if (ids := record.experts) is not None:
      text = base64.b64encode(ids.astype('<i2').tobytes()).decode()
      fields['experts'] = {'shape': ids.shape, 'base64': text}
  return fields


def load(database: Database, source: Iterable[str | bytes]) -> int:
  """Reads the lines of a pool into an empty database; returns their number.

  Raises:
    ValueError: the database has items or trajectories, or a line is not of a pool;
      names the line. Nothing is stored then.
  """
  with database.transaction() as connection:
    for table in (tables.items, tables.trajectories, tables.completions):
      if connection.scalar(sa.select(sa.func.count()).select_from(table)):
        raise ValueError(
          f'data pool {database.url}: has {table.name} already: import into an empty '
          'database'
        )
    number, of = 0, _Session()
    for number, line in enumerate(source, start=1):
      try:
        _insert(connection, json_lines.loads(line), of, first=number == 1)
      except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        why = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f'line {number}: not from a data pool: {why}') from error
      except sa.exc.SQLAlchemyError as error:
        if fatal(error):
          raise
        first = str(error).partition('\n')[0]
        raise ValueError(f'line {number}: not from a data pool: {first}') from error
    if not number:
      raise ValueError('no lines: not from a data pool')
  return number


class _Session:
  """Completions of the session that is being read, by id."""

  def __init__(self):
    self.name, self.found = '', {}


def _insert(connection, fields: dict[str, Any], of: _Session, first: bool) -> None:
  kind = fields.pop('kind')
  if first != (kind == 'pool'):
    raise ValueError(f'kind {kind!r}: the first line, and no other, is of kind pool')
  if kind == 'pool':
    if fields.pop('schema') != SCHEMA:
      raise ValueError(f'written by other code: this reads schema {SCHEMA}')
    m = tables.meta
    connection.execute(sa.delete(m).where(m.c.key != 'schema_version'))
    for key, value in fields.items():
      _add(connection, m, {'key': key, 'value': value})
  elif kind == 'lineage':
    _add(connection, tables.lineages, fields)
  elif kind == 'item':
    _add(connection, tables.items, fields)
  elif kind == 'trajectory':
    rest = {f: fields.pop(f) for f in (*_REWARD, 'superseded')}
    pruned = fields.pop('pruned')
    fields['messages'] = tables.checked_messages(fields['messages'])
    row = tables.trajectory_row(records.Trajectory(**fields)) | rest
    row['messages'] = None if pruned else row['messages']
    _add(connection, tables.trajectories, row)
  elif kind == 'completion':
    if fields['session'] != of.name:
      of.name, of.found = fields['session'], {}
    _add(connection, tables.completions, _completion_row(fields, of.found))
  else:
    raise ValueError(f'unknown kind {kind!r}')


def _add(connection: sa.Connection, table: sa.Table, row: dict[str, Any]) -> None:
  tables.check_row(table, row)
  connection.execute(sa.insert(table), row)


def _completion_row(
  fields: dict[str, Any], found: dict[str, records.Completion]
) -> dict[str, Any]:
  if fields['prompt_ids'] is None:
    rest = {k: v for k, v in fields.items() if k not in (*_ARRAYS, 'experts')}
    return rest | {'arrays': None}
  if (experts := fields['experts']) is not None:
    try:
      flat = np.frombuffer(base64.b64decode(experts['base64']), '<i2')
      fields['experts'] = flat.reshape(experts['shape']).astype(np.int16)
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f'experts: {error!r}') from error
  derived = {f: fields.pop(f) for f in ('superseded', 'advantage')}
  for name in ('prompt_tokens', 'response_tokens', 'first_version', 'last_version'):
    del fields[name]
  fields |= {name: tables.array(fields[name], name) for name in _ARRAYS}
  overrides = fields.pop('overrides')
  record = records.Completion(
    **fields, overrides=tuple(overrides.split(',')) if overrides else ()
  )
  tables.check_completion(record)
  row = tables.completion_row(record, found.get(record.parent)) | derived
  found[record.id] = record
  return row
