"""The data pool's tables, and conversion between records and rows.

Token ids, log-probabilities, versions and expert ids of a completion are one blob
(`arrays`). Messages are JSON, compressed in the same way.
"""

from __future__ import annotations

import collections
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import sqlalchemy as sa

from m2jax import records
from m2jax.pool import arrays
from m2jax.text import json_lines

SCHEMA_VERSION = 6
_INT32 = 2**31 - 1
_RANGES = {
  'prompt_ids': (0, _INT32, np.int32),
  'response_ids': (0, _INT32, np.int32),
  'versions': (-1, _INT32, np.int32),
  'logprobs': (-3e38, 1e-3, np.float32),  # up to 0, and what rounding adds
}
_MAX_TOKENS = 1 << 28  # of all completions of a session, each with its prompt

metadata = sa.MetaData()
# SQLite gives rowids only to columns spelled INTEGER.
_Long = sa.BigInteger().with_variant(sa.Integer(), 'sqlite')
# Compared by code points, as SQLite does: `leases.reissue` selects a range of sessions.
_Key = sa.String().with_variant(sa.String(collation='C'), 'postgresql')

OWNER = 'owner'  # a key of `meta`, see `DataPool.owner`

meta = sa.Table(
  'meta',
  metadata,
  sa.Column('key', sa.String, primary_key=True),
  sa.Column('value', sa.String, nullable=False),
)

items = sa.Table(
  'items',
  metadata,
  sa.Column('index', _Long, primary_key=True, autoincrement=False),
  sa.Column('task', sa.Text, nullable=False),
  sa.Column('group_size', sa.Integer, nullable=False),
  sa.Column('attempt', sa.Integer, nullable=False),
  sa.Column('state', sa.String, nullable=False),  # pending, completed, taken, failed
  sa.Column('reason', sa.Text, nullable=False, default=''),
  sa.Column('step', sa.Integer),  # learner step that took it
  sa.Column('taken_before', _Long, nullable=False),
  sa.Column('pruned', sa.Boolean, nullable=False, default=False),
  sa.Column('lease', _Key, unique=True),  # these three: see `leases`
  sa.Column('beats', sa.Integer, nullable=False, default=0),
  sa.Column('report', sa.Text),
  sa.Index('items_by_state', 'state', 'step', 'index'),
)

trajectories = sa.Table(
  'trajectories',
  metadata,
  sa.Column('row', _Long, primary_key=True),
  sa.Column('session', _Key, nullable=False, unique=True),
  sa.Column('item', _Long, nullable=False),
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
  sa.Column('rewards', sa.Text, nullable=False, default='{}'),  # JSON
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
  metadata,
  sa.Column('lineage', sa.Integer, primary_key=True, autoincrement=False),
  sa.Column('parent', sa.Integer, nullable=False),
  sa.Column('step', sa.Integer, nullable=False),
)

# The last transaction of each process that writes, see `database`.
writers = sa.Table(
  'writers',
  metadata,
  sa.Column('writer', sa.String, primary_key=True),
  sa.Column('batch', _Long, nullable=False),
)

completions = sa.Table(
  'completions',
  metadata,
  sa.Column('row', _Long, primary_key=True),
  sa.Column('id', _Key, nullable=False, unique=True),
  sa.Column('session', _Key, nullable=False, index=True),
  sa.Column('turn', sa.Integer, nullable=False),
  sa.Column('parent', _Key),
  sa.Column('follows', _Key),
  sa.Column('fork_reason', sa.Text),
  sa.Column('finish_reason', sa.String, nullable=False),
  sa.Column('status', sa.String, nullable=False),
  sa.Column('overrides', sa.Text, nullable=False),
  sa.Column('request', sa.Integer, nullable=False, default=0),
  sa.Column('started_s', sa.Float, nullable=False),
  sa.Column('ended_s', sa.Float, nullable=False),
  sa.Column('tool_s', sa.Float, nullable=False, default=0.0),
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


def parts(values: list, size: int = 500) -> Iterator[list]:
  """Slices small enough for a database's limit on bound parameters."""
  return (values[i : i + size] for i in range(0, len(values), size))


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


def array(values: Any, name: str, where: str = '') -> np.ndarray:
  """An array of a completion of others, from JSON.

  Args:
    values: should be a list of numbers.
    name: field of `records.Completion`.
    where: the place of the values, for the message; '' is the name.

  Raises:
    ValueError: it is not a list of numbers, or has some that the field cannot have.
  """
  low, high, dtype = _RANGES[name]
  try:
    found = np.asarray(values)
  except ValueError:  # lists of different lengths
    found = np.zeros((0, 0))
  kinds = 'iuf' if dtype is np.float32 else 'iu'
  if found.ndim != 1 or found.size and found.dtype.kind not in kinds:
    raise ValueError(f'{where or name}: must be a list of numbers')
  if not ((found >= low) & (found <= high)).all():  # nan is not
    raise ValueError(f'{where or name}: must be within {low} and {high}')
  return found.astype(dtype)


def checked_messages(found: Any) -> tuple[dict, ...]:
  """The messages of a foreign trajectory. Raises ValueError for anything else."""
  if not isinstance(found, list) or not all(isinstance(m, dict) for m in found):
    raise ValueError('messages: must be a list of objects')
  return tuple(found)


def check_row(table: sa.Table, row: Mapping[str, Any]) -> None:
  """Checks the values of a row of others: SQLite stores any type in any column.

  Args:
    table: the row's table.
    row: some of its columns.

  Raises:
    ValueError: names the column.
  """
  for name, value in row.items():
    if name not in table.c:
      raise ValueError(f'{table.name} has no column {reprlib.repr(name)}')
    column, kind = table.c[name], table.c[name].type.python_type
    if value is None and column.nullable:
      continue
    fits = type(value) is kind or kind is float and type(value) is int
    if not fits or kind is int and not -(2**63) <= value < 2**63:
      shown = reprlib.repr(value)
      raise ValueError(f'{table.name}.{name} is {shown}: must be a {kind.__name__}')


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
    request=c.request,
    started_s=c.started_s,
    ended_s=c.ended_s,
    tool_s=c.tool_s,
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

  Raises:
    ValueError: a row is damaged, or a session has too many tokens for a machine.
  """
  out: dict[str, records.Completion] = {}
  tokens: collections.Counter[str] = collections.Counter()
  for row in rows:
    if row.arrays is None:
      continue
    check_row(completions, row._mapping)
    try:
      found = arrays.unpack(row.arrays, out.get(row.parent))
    except ValueError as error:
      raise ValueError(f'completion {row.id!a}: {error}') from error
    tokens[row.session] += len(found['prompt_ids']) + len(found['response_ids'])
    if tokens[row.session] > _MAX_TOKENS:  # a short row repeats all that precedes it
      raise ValueError(f'session {row.session!a}: more than {_MAX_TOKENS} tokens')
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
      request=row.request,
      started_s=row.started_s,
      ended_s=row.ended_s,
      tool_s=row.tool_s,
      lineage=row.lineage,
      **found,
    )
  return out


def trajectory_row(t: records.Trajectory) -> dict[str, Any]:
  """The trajectory as a row of `trajectories`, not superseded."""
  row = {f: getattr(t, f) for f in _TRAJECTORY_FIELDS}
  for field in ('answer', 'error'):
    row[field] = clean_text(row[field])
  row['rewards'] = json.dumps({id_: float(r) for id_, r in t.rewards.items()})
  text = json.dumps(t.messages, separators=(',', ':'))
  row['messages'] = arrays.compress(0, text.encode())
  row['superseded'] = False
  return row


def trajectory(row: sa.Row) -> records.Trajectory:
  """The record of a row of `trajectories`; messages are empty once pruned.

  Raises:
    ValueError: the row is damaged; names the session.
  """
  try:
    check_row(trajectories, row._mapping)
    fields = {f: getattr(row, f) for f in _TRAJECTORY_FIELDS}
    found = () if row.messages is None else messages(row.messages)
    rewards = json_lines.loads(row.rewards)
    return records.Trajectory(messages=found, rewards=rewards, **fields)
  except (ValueError, AttributeError) as error:
    raise ValueError(f'trajectory {row.session!a}: {error}') from error


def messages(blob: bytes) -> tuple[dict, ...]:
  """The messages of a row of `trajectories`. Raises ValueError if it is damaged."""
  return checked_messages(json_lines.loads(arrays.decompress(blob)[1]))


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
