"""Leases on work items that other processes run, and their reports (law 5).

Functions on the writing connection, one transaction each (`data_pool`). The queue's
process alone changes states of items; others claim pending ones and report:

  claim      an item gets a lease, a unique token
  heartbeat  the holder counts up; a lease that is gone has to be given up
  report     the trajectories of the group and how it ended; only under the lease
  reissue    by the queue's process, which sees that a lease no longer counts up, or a
             report of AGAIN: attempt + 1, no lease, and the old records superseded

So a process that lost its lease changes nothing, whatever it still sends, and a report
that arrives twice counts once. No clocks are compared: the process that waits for a
heartbeat uses its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

import sqlalchemy as sa

from m2jax import records
from m2jax.pool import ledger, tables

# Reports: of a group that can be trained, and what the others begin with. A group that
# STOPPED says nothing of those to come.
COMPLETE, AGAIN, FAILED = '', 'again: ', 'failed: '
STOPPED = AGAIN + 'stopped: '


class Claim(NamedTuple):
  """An item to run, and the token under which to report it."""

  item: records.WorkItem
  lease: str


class Lease(NamedTuple):
  """A claimed item, as the queue's process sees it.

  Attributes:
    beats: heartbeats so far.
    report: None while it runs, COMPLETE, or AGAIN or FAILED and the reason.
  """

  index: int
  lease: str
  beats: int
  report: str | None


def claim(connection: sa.Connection, owner: str, n: int) -> list[Claim]:
  """Leases up to n pending items that nobody has, the oldest first."""
  i = tables.items.c
  free = sa.select(tables.items).where(i.state == 'pending', i.lease.is_(None))
  rows = connection.execute(free.order_by(i.index).limit(n)).all()
  claims = []
  for row in rows:
    lease = f'{owner}/{uuid.uuid4().hex}'
    ledger.set_items(connection, [row.index], lease=lease, beats=0, report=None)
    claims.append(Claim(tables.work_item(row), lease))
  return claims


def heartbeat(connection: sa.Connection, held: list[str]) -> set[str]:
  """Counts up the leases; returns those that still hold."""
  i, alive = tables.items.c, set()
  for part in tables.parts(held):
    mine = (i.state == 'pending') & i.lease.in_(part)
    connection.execute(sa.update(tables.items).where(mine).values(beats=i.beats + 1))
    alive.update(connection.scalars(sa.select(i.lease).where(mine)))
  return alive


def outcome(trajectories: Sequence[records.Trajectory]) -> str:
  """The report of a group that has ended: COMPLETE if any of it can be judged."""
  if any(t.end_reason != 'infrastructure' for t in trajectories):
    return COMPLETE
  return AGAIN + (trajectories[0].error or 'infrastructure')


def holds(connection: sa.Connection, claimed: Claim) -> bool:
  """Whether the claim's lease is valid and has no report yet."""
  i = tables.items.c
  mine = (i.index == claimed.item.index) & (i.lease == claimed.lease)
  query = sa.select(i.index).where(mine, i.state == 'pending', i.report.is_(None))
  return connection.scalar(query) is not None


def report(connection: sa.Connection, claimed: Claim, end: str) -> None:
  """Stores how the group of a claim that `holds` ended."""
  if end != COMPLETE and not end.startswith((AGAIN, FAILED)):
    raise ValueError(f'report: {end[:100]!r}: must begin with {AGAIN!r} or {FAILED!r}')
  text = tables.clean_text(end)
  ledger.set_items(connection, [claimed.item.index], report=text)


def current(connection: sa.Connection) -> list[Lease]:
  """The leases of pending items, by index."""
  i = tables.items.c
  query = sa.select(i.index, i.lease, i.beats, i.report).where(
    i.state == 'pending', i.lease.is_not(None)
  )
  return [Lease(*row) for row in connection.execute(query.order_by(i.index))]


def reissue(connection: sa.Connection, index: int, lineage: int) -> records.WorkItem:
  """Gives a pending item to the next process that claims it, as a new attempt.

  Raises:
    ValueError: the item is not pending.
  """
  row = ledger.pending(connection, index, 'reissue', lineage)
  t, c = tables.trajectories.c, tables.completions.c
  connection.execute(
    sa.update(tables.trajectories)
    .where(t.item == index, ~t.superseded)
    .values(superseded=True)
  )
  # Sessions of the attempt are between 'PREFIX-' and 'PREFIX.', the next character.
  prefix = tables.work_item(row).session_prefix
  connection.execute(
    sa.update(tables.completions)
    .where(c.session > f'{prefix}-', c.session < f'{prefix}.', ~c.superseded)
    .values(superseded=True)
  )
  item = records.WorkItem(
    index, row.task, row.group_size, row.attempt + 1, row.taken_before
  )
  values = {'attempt': item.attempt, **ledger.UNCLAIMED}
  ledger.set_items(connection, [index], lineage, **values)
  return item
