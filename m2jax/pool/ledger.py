"""Work items in the database: states, the checkpoint's ledger, rollback (law 5).

Functions on the writing connection; `data_pool` runs each in one transaction, and its
docstring explains how they implement law 5. Those that take a `lineage` are for the
learner that began it, and are rejected when another one has begun since.
"""

from __future__ import annotations

import dataclasses

import sqlalchemy as sa
from absl import logging

from m2jax import records
from m2jax.pool import tables
from m2jax.pool.database import PoolBroken

DELETED = 'deleted_'  # prefix of keys of `tables.meta`, see `deleted`
# Columns of an item that no other process runs (`leases`).
UNCLAIMED = {'lease': None, 'beats': 0, 'report': None}


class LedgerMismatch(RuntimeError):
  """The checkpoint's ledger does not fit this pool."""


class LineageOver(PoolBroken):
  """Another learner has begun on this pool: what this one still does is not stored."""


@dataclasses.dataclass(frozen=True)
class Ledger:
  """The items that the weights of a checkpoint were trained on; part of the checkpoint.

  Attributes:
    head: oldest item neither trained nor failed.
    taken: items after the head that were trained.
    next_index: number of items submitted so far.
    step: learner step of the checkpoint.
    run: id of the pool; an empty one matches every pool.
    lineage: lineage of the checkpoint's weights (`records.Lineages`).
  """

  head: int = 0
  taken: tuple[int, ...] = ()
  next_index: int = 0
  step: int = 0
  run: str = ''
  lineage: int = 0

  def to_dict(self) -> dict:
    """Plain JSON types."""
    return dataclasses.asdict(self) | {'taken': list(self.taken)}

  @classmethod
  def from_dict(cls, fields: dict) -> Ledger:
    """The inverse of `to_dict`."""
    return cls(**fields | {'taken': tuple(fields['taken'])})

  def trained(self, index: int) -> bool:
    """Whether an item, unless it failed, was trained into the checkpoint's weights."""
    return index < self.head or index in self.taken


def next_index(connection: sa.Connection) -> int:
  """Number of items submitted so far, which is the index of the next one."""
  last = connection.scalar(sa.select(sa.func.max(tables.items.c.index)))
  return 0 if last is None else last + 1


def submit(connection: sa.Connection, item: records.WorkItem, lineage: int) -> None:
  """Inserts a pending item. Raises ValueError unless it is the next in the stream."""
  i, row = tables.items, dataclasses.asdict(item) | {'state': 'pending'}
  values = [sa.literal(value, i.c[name].type) for name, value in row.items()]
  last = sa.select(sa.func.max(i.c.index)).scalar_subquery()
  fits = sa.func.coalesce(last, -1) == item.index - 1
  chosen = sa.select(*values).where(fits, _in_force(lineage))
  insert = sa.insert(i).from_select(list(row), chosen)
  if not connection.execute(insert.execution_options(preserve_rowcount=True)).rowcount:
    check_lineage(connection, lineage)
    raise ValueError(
      f'submit: item {item.index}: must be the next index of the stream, '
      f'{next_index(connection)}'
    )


def complete(connection: sa.Connection, index: int, lineage: int) -> None:
  """pending → completed. Raises ValueError if trajectories of the group are missing."""
  row = _item(connection, index, 'pending', 'complete', lineage)
  t = tables.trajectories.c
  have = connection.scalar(
    sa.select(sa.func.count()).where(t.item == index, ~t.superseded)
  )
  if have != row.group_size:
    check_lineage(connection, lineage)
    raise ValueError(
      f'complete: item {index} has {have} of {row.group_size} trajectories; add one '
      "with end_reason='infrastructure' for each episode that failed"
    )
  set_items(connection, [index], lineage, state='completed')


def fail(connection: sa.Connection, index: int, reason: str, lineage: int) -> None:
  """pending → failed, with its reason."""
  _item(connection, index, 'pending', 'fail', lineage)
  reason = tables.clean_text(reason)
  set_items(connection, [index], lineage, state='failed', reason=reason)


def take(
  connection: sa.Connection, indices: list[int], step: int, lineage: int
) -> None:
  """completed → taken, for all items or none."""
  for index in indices:
    _item(connection, index, 'completed', 'take', lineage)
  set_items(connection, indices, lineage, state='taken', step=step)


def read(connection: sa.Connection, run: str, step: int | None) -> Ledger:
  """The ledger of the items taken up to and including `step` (None: all taken)."""
  i = tables.items.c
  open_ = i.state.in_(('pending', 'completed'))
  taken = i.state == 'taken'
  if step is None:
    step = connection.scalar(sa.select(sa.func.max(i.step)).where(taken)) or 0
  else:
    open_ |= taken & (i.step > step)
    taken &= i.step <= step
  end = next_index(connection)
  head = connection.scalar(sa.select(sa.func.min(i.index)).where(open_))
  head = end if head is None else head
  ids = connection.scalars(
    sa.select(i.index).where(taken, i.index > head).order_by(i.index)
  )
  return Ledger(head, tuple(ids), end, step, run, lineages(connection).current)


def counts(connection: sa.Connection) -> dict[str, int]:
  """Number of items by state, deleted ones included."""
  i, gone = tables.items.c, deleted(connection)
  out = dict.fromkeys(('pending', 'completed', 'taken', 'failed'), 0)
  query = sa.select(i.state, sa.func.count().label('n')).group_by(i.state)
  out |= {row.state: row.n for row in connection.execute(query)}
  return {state: n + gone.get(state, 0) for state, n in out.items()}


def deleted(connection: sa.Connection) -> dict[str, int]:
  """What `retention` has deleted: items by state, and 'below', the first index left."""
  m = tables.meta.c
  rows = connection.execute(sa.select(m.key, m.value).where(m.key.startswith(DELETED)))
  return {r.key.removeprefix(DELETED): int(r.value) for r in rows}


def lineages(connection: sa.Connection) -> records.Lineages:
  """The lineages so far; only the root before the first one begins."""
  table = tables.lineages
  rows = connection.execute(sa.select(table).order_by(table.c.lineage)).all()
  branches = tuple((r.parent, r.step) for r in rows)
  return records.Lineages(branches) if branches else records.Lineages()


def check_lineage(connection: sa.Connection, lineage: int) -> None:
  """Raises LineageOver unless the lineage is the current one."""
  if (current := lineages(connection).current) != lineage:
    raise LineageOver(
      f'the data pool belongs to another learner, which began lineage {current} after '
      f'{lineage} of this one, in the same workdir or a copy of it: nothing more of '
      'this one is stored. Let one of the two run'
    )


def _in_force(lineage: int) -> sa.ColumnElement[bool]:
  """The same as a condition of a statement."""
  last = sa.select(sa.func.max(tables.lineages.c.lineage)).scalar_subquery()
  return sa.func.coalesce(last, 0) == lineage


def _begin_lineage(connection: sa.Connection, ledger: Ledger) -> None:
  """Begins a lineage at the checkpoint's weights; the first one is the root."""
  table = tables.lineages
  last = connection.scalar(sa.select(sa.func.max(table.c.lineage)))
  row = {'lineage': 0, 'parent': -1, 'step': 0}
  if last is not None:
    row = {'lineage': last + 1, 'parent': ledger.lineage, 'step': ledger.step}
  connection.execute(sa.insert(table), row)


def rollback(
  connection: sa.Connection, ledger: Ledger, run: str
) -> list[records.WorkItem]:
  """Rolls the items' states back to the ledger; returns the items to run again."""
  i = tables.items.c
  set_items(connection, _undone(connection, ledger, run), state='completed', step=None)
  _complete_reported(connection)
  rows = connection.execute(
    sa.select(tables.items)
    .where(i.state.in_(('pending', 'completed')))
    .order_by(i.index)
  ).all()
  if behind := {r.index for r in rows if ledger.trained(r.index)}:
    # Only a pool file restored from an older copy can be behind its checkpoint.
    logging.warning('data pool: items %s were trained already', sorted(behind))
    set_items(connection, sorted(behind), state='taken', step=ledger.step)
  # Items rolled back were not taken before the submission of the live ones.
  trained = counts(connection)['taken']
  connection.execute(
    sa.update(tables.items)
    .where(i.state.in_(('pending', 'completed')), i.taken_before > trained)
    .values(taken_before=trained)
  )
  reissue = [r.index for r in rows if r.state == 'pending' and r.index not in behind]
  set_items(connection, reissue, attempt=i.attempt + 1, **UNCLAIMED)
  _supersede(connection, reissue)
  _begin_lineage(connection, ledger)
  pending = sa.select(tables.items).where(i.state == 'pending').order_by(i.index)
  return [tables.work_item(row) for row in connection.execute(pending)]


def _complete_reported(connection: sa.Connection) -> None:
  """Completes items whose groups were reported while no learner was running."""
  i = tables.items.c
  reported = sa.select(i.index).where(i.state == 'pending', i.report == '')
  lineage = lineages(connection).current
  for index in connection.scalars(reported).all():
    try:
      complete(connection, index, lineage)
    except ValueError as error:  # it is run again
      logging.warning('data pool: %s', error)


def _undone(connection: sa.Connection, ledger: Ledger, run: str) -> list[int]:
  """Items taken after the ledger. Raises LedgerMismatch if it does not fit the pool."""
  i = tables.items.c
  at = f'the checkpoint of step {ledger.step}'
  if ledger.run and ledger.run != run:
    raise LedgerMismatch(
      f'{at} belongs to pool {ledger.run}, this pool is {run}: use the pool of that '
      'run, or start a new run'
    )
  if (have := next_index(connection)) < ledger.next_index:
    raise LedgerMismatch(
      f'{at} has {ledger.next_index} items, the pool {have}: the pool was replaced '
      'or truncated'
    )
  if ledger.head < (below := deleted(connection).get('below', 0)):
    raise LedgerMismatch(
      f'{at} precedes the training of items below {below}, which were deleted: restore '
      'a newer checkpoint'
    )
  rows = connection.execute(
    sa.select(i.index, i.pruned).where(i.state == 'taken', i.index >= ledger.head)
  ).all()
  undone = [r for r in rows if not ledger.trained(r.index)]
  if pruned := [r.index for r in undone if r.pruned]:
    raise LedgerMismatch(
      f'{at} precedes the training of items {pruned[:5]}, whose completions were '
      'pruned: restore a newer checkpoint'
    )
  return [r.index for r in undone]


def _supersede(connection: sa.Connection, reissued: list[int]) -> None:
  """Marks the records of earlier attempts at these items as superseded."""
  t, c = tables.trajectories.c, tables.completions.c
  for part in tables.parts(reissued):
    connection.execute(
      sa.update(tables.trajectories)
      .where(t.item.in_(part), ~t.superseded)
      .values(superseded=True)
    )
  # Also completions of sessions without a trajectory.
  closed = sa.exists().where(t.session == c.session, ~t.superseded)
  connection.execute(
    sa.update(tables.completions).where(~c.superseded, ~closed).values(superseded=True)
  )


def existing(
  connection: sa.Connection, column: sa.Column, values: set, *where: sa.ColumnElement
) -> set:
  """The values that occur in the column, in rows that satisfy `where`."""
  out = set()
  for part in tables.parts(list(values)):
    out.update(connection.scalars(sa.select(column).where(column.in_(part), *where)))
  return out


def pending(connection: sa.Connection, index: int, verb: str, lineage: int) -> sa.Row:
  """The row of a pending item. Raises ValueError, about `verb`, if it is not."""
  return _item(connection, index, 'pending', verb, lineage)


def _item(
  connection: sa.Connection, index: int, state: str, verb: str, lineage: int
) -> sa.Row:
  query = sa.select(tables.items).where(tables.items.c.index == index)
  row = connection.execute(query).one_or_none()
  if row is None or row.state != state:
    check_lineage(connection, lineage)
    found = 'was never submitted' if row is None else f'is {row.state}'
    raise ValueError(f'{verb}: item {index} {found}, not {state}')
  return row


def set_items(
  connection: sa.Connection, indices: list[int], lineage: int | None = None, **values
) -> None:
  """Sets columns of some items; with a lineage only while it is the current one."""
  i = tables.items
  fence = sa.true() if lineage is None else _in_force(lineage)
  for part in tables.parts(indices):
    which = i.c.index.in_(part) & fence
    changed = connection.execute(sa.update(i).where(which).values(**values))
    if lineage is not None and changed.rowcount != len(part):
      check_lineage(connection, lineage)
