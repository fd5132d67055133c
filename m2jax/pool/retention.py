"""What the data pool retains: bounds on the size of its database.

Only what no restart can need is deleted: what was trained into the weights of the
*oldest* checkpoint that may still be restored, failed, or was superseded. Three levels:

  token ids   of all of that, at once; they are most of the size
  messages    of all but a sample over the whole run, for the report
  rows        of the items themselves, with their trajectories: only on request. Their
              number by state is retained, and the first index that is left, below
              which no ledger can be restored any more

A pool without items, where a gateway records and nothing is trained, has no ledger:
`forget` deletes its oldest sessions as a whole.

Freed pages of the file are reused (SQLite), or vacuumed by the server (PostgreSQL).
"""

from __future__ import annotations

import sqlalchemy as sa

from m2jax.pool import ledger as ledger_lib
from m2jax.pool import tables


def prune(
  connection: sa.Connection,
  ledger: ledger_lib.Ledger,
  keep_messages: int,
  abandoned_before_s: float = 0.0,
  keep_items: int | None = None,
) -> int:
  """Deletes what no restart from `ledger` or later needs; see `DataPool.prune`."""
  i, t, c = tables.items.c, tables.trajectories.c, tables.completions.c
  trained = i.state == 'taken'
  trained &= (i.index < ledger.head) | i.index.in_(ledger.taken)
  connection.execute(
    sa.update(tables.items).where(trained, ~i.pruned).values(pruned=True)
  )
  over = sa.exists().where(i.index == t.item, i.pruned | (i.state == 'failed'))
  done = t.superseded | (t.item < 0) | over
  closed = sa.exists().where(t.session == c.session)
  mine = c.superseded | closed.where(done)
  drop = sa.update(tables.completions).where(c.arrays.is_not(None)).values(arrays=None)
  dropped = connection.execute(drop.where(mine)).rowcount
  if abandoned_before_s:
    for part in tables.parts(_abandoned(connection, abandoned_before_s)):
      dropped += connection.execute(drop.where(c.session.in_(part))).rowcount
  # Every 2^k-th over the whole run, so that later calls select from the same rows.
  have = connection.scalar(sa.select(sa.func.count()).select_from(tables.trajectories))
  every = 1
  while have > every * keep_messages:
    every *= 2
  connection.execute(
    sa.update(tables.trajectories)
    .where(done, t.row % every != 0, t.messages.is_not(None))
    .values(messages=None)
  )
  shown = closed.where(t.messages.is_not(None))
  connection.execute(sa.delete(tables.completions).where(c.arrays.is_(None), ~shown))
  if keep_items is not None:
    _delete_items(connection, ledger, keep_items)
  return dropped


def forget(
  connection: sa.Connection, before_s: float, keep_sessions: int, keep_bytes: int
) -> list[str]:
  """Deletes sessions that are of no work item; see `DataPool.forget`.

  Returns:
    Their names. Whole sessions, since a completion is stored as what it adds to its
    parent.
  """
  t, c = tables.trajectories.c, tables.completions.c
  in_item = sa.exists().where(t.session == c.session, t.item >= 0)
  last_s = sa.func.max(c.started_s)
  size = sa.func.coalesce(sa.func.sum(sa.func.length(c.arrays)), 0)
  query = sa.select(c.session, last_s, size).where(~in_item).group_by(c.session)
  gone, total = [], 0
  for i, (session, began_s, size_bytes) in enumerate(
    connection.execute(query.order_by(last_s.desc()))
  ):
    total += size_bytes
    if began_s < before_s or i >= keep_sessions or (i and total > keep_bytes):
      gone.append(session)
  for part in tables.parts(gone):
    connection.execute(sa.delete(tables.completions).where(c.session.in_(part)))
    connection.execute(sa.delete(tables.trajectories).where(t.session.in_(part)))
  # Episodes that ended without a completion have no time: the last ones remain.
  empty = sa.and_(t.item < 0, ~sa.exists().where(c.session == t.session))
  last = sa.select(t.row).where(empty).order_by(t.row.desc()).offset(keep_sessions)
  first = connection.scalar(last.limit(1))
  if first is not None:
    connection.execute(sa.delete(tables.trajectories).where(empty, t.row <= first))
  return gone


def _abandoned(connection: sa.Connection, before_s: float) -> list[str]:
  """Sessions without a trajectory that began so long ago, by the writers' clocks.

  Not those of a present attempt: a clock may have jumped, and its group may complete.
  """
  i, t, c = tables.items.c, tables.trajectories.c, tables.completions.c
  closed = sa.exists().where(t.session == c.session)
  old = sa.select(c.session).where(
    c.started_s < before_s, c.arrays.is_not(None), ~closed
  )
  pending = sa.select(tables.items).where(i.state == 'pending')
  present = tuple(
    f'{tables.work_item(row).session_prefix}-' for row in connection.execute(pending)
  )
  found = connection.scalars(old.distinct())
  return [session for session in found if not session.startswith(present)]


def _delete_items(
  connection: sa.Connection, ledger: ledger_lib.Ledger, keep: int
) -> None:
  """Deletes all items but the last `keep` before the ledger's head."""
  i, t, c = tables.items.c, tables.trajectories.c, tables.completions.c
  gone = ledger_lib.deleted(connection)
  # The newest item stays: the next index is counted from it.
  below = min(ledger.head - keep, ledger_lib.next_index(connection) - 1)
  if below <= gone.get('below', 0):
    return
  old = i.index < below
  for state in ('taken', 'failed'):
    query = sa.select(sa.func.count()).where(old, i.state == state)
    gone[state] = gone.get(state, 0) + connection.scalar(query)
  gone['below'] = below
  mine = sa.exists().where(t.session == c.session, t.item >= 0, t.item < below)
  connection.execute(sa.delete(tables.completions).where(mine))
  connection.execute(sa.delete(tables.trajectories).where(t.item >= 0, t.item < below))
  connection.execute(sa.delete(tables.items).where(old))
  m = tables.meta
  connection.execute(sa.delete(m).where(m.c.key.startswith(ledger_lib.DELETED)))
  rows = [{'key': ledger_lib.DELETED + k, 'value': str(n)} for k, n in gone.items()]
  connection.execute(sa.insert(m), rows)
