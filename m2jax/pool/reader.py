"""Queries on the data pool: rollout groups for the learner, the rest for reports."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from m2jax import records
from m2jax.pool import tables
from m2jax.pool.database import Database


@dataclasses.dataclass(frozen=True)
class StoredTrajectory:
  """A trajectory with its reward, for reports."""

  trajectory: records.Trajectory
  reward: records.TrajectoryReward | None
  superseded: bool


@dataclasses.dataclass(frozen=True)
class StoredTurn:
  """A completion without its token ids, for reports; `prune` retains a sample of them.

  Attributes:
    turn, status: as in `records.Completion`.
    lineage: lineage of the weights that sampled it.
    versions: the first and the last version of these weights.
    response_tokens: number of sampled tokens.
    advantage: advantage of its tokens; None if it was not judged.
    superseded: stored, but never trained.
  """

  turn: int
  status: str
  lineage: int
  versions: tuple[int, ...]
  response_tokens: int
  advantage: float | None
  superseded: bool


@dataclasses.dataclass(frozen=True)
class Ended:
  """A trajectory of a work item in numbers, for histograms.

  Attributes:
    row: higher for those that were stored later.
    end_reason, success, wall_s: as in `records.Trajectory`.
    response_tokens: sampled tokens of all its completions.
    versions: the first and the last version that sampled them; () if none did.
    superseded: stored, but never trained.
  """

  row: int
  end_reason: str
  success: float
  wall_s: float
  response_tokens: int
  versions: tuple[int, ...]
  superseded: bool


class Reader:
  """Queries on a pool's database; any thread may call them.

  Raises:
    PoolBroken: from every query, if a database server stays away (`database`).
  """

  def __init__(self, database: Database):
    self._database = database

  def group(
    self, index: int
  ) -> list[tuple[records.Trajectory, list[records.Completion]]]:
    """The live trajectories of an item by rank, each with its completions by turn."""
    t, c = tables.trajectories, tables.completions
    live = (t.c.item == index) & ~t.c.superseded
    rows = self._read(sa.select(t).where(live).order_by(t.c.rank))
    sessions = [r.session for r in rows]
    # Superseded ones are read too: others may be stored as extensions of them.
    stored = self._read(sa.select(c).where(c.c.session.in_(sessions)).order_by(c.c.row))
    found = tables.completions_of(stored)
    live_ids = {r.id for r in stored if not r.superseded}
    by_session = {r.session: [] for r in rows}
    for completion in sorted(found.values(), key=lambda c: c.turn):
      if completion.id in live_ids:
        by_session[completion.session].append(completion)
    return [(tables.trajectory(r), by_session[r.session]) for r in rows]

  def completions(self, session: str) -> list[records.Completion]:
    """A session's completions by turn, including superseded ones; empty once pruned."""
    c = tables.completions
    rows = self._read(sa.select(c).where(c.c.session == session).order_by(c.c.row))
    return sorted(tables.completions_of(rows).values(), key=lambda c: c.turn)

  def turns(self, session: str) -> list[StoredTurn]:
    """A session's completions without token ids, in order of turn."""
    c = tables.completions.c
    query = (
      sa.select(
        c.turn,
        c.status,
        c.lineage,
        c.first_version,
        c.last_version,
        c.response_tokens,
        c.advantage,
        c.superseded,
      )
      .where(c.session == session)
      .order_by(c.turn, c.row)
    )
    rows = self._read(query)
    for row in rows:
      tables.check_row(tables.completions, row._mapping)
    return [
      StoredTurn(
        turn=r.turn,
        status=r.status,
        lineage=r.lineage,
        versions=tuple(sorted({r.first_version, r.last_version} - {None})),
        response_tokens=r.response_tokens,
        advantage=r.advantage,
        superseded=r.superseded,
      )
      for r in rows
    ]

  def sample_trajectories(
    self, n: int, *, seed: int = 0, evaluation: bool | None = None
  ) -> list[StoredTrajectory]:
    """Up to n live trajectories with messages, sampled uniformly, oldest first."""
    t = tables.trajectories
    query = sa.select(t.c.row).where(~t.c.superseded, t.c.messages.is_not(None))
    if evaluation is not None:
      query = query.where(t.c.item < 0 if evaluation else t.c.item >= 0)
    rows = [r.row for r in self._read(query.order_by(t.c.row))]
    chosen = random.Random(seed).sample(rows, min(n, len(rows)))
    found = []
    for part in tables.parts(sorted(chosen)):
      query = sa.select(t).where(t.c.row.in_(part)).order_by(t.c.row)
      found += [_stored(row) for row in self._read(query)]
    return found

  def each_trajectory(self) -> Iterator[StoredTrajectory]:
    """All trajectories that have messages, the oldest first; few in memory at once."""
    t, last = tables.trajectories, 0
    shown = sa.select(t).where(t.c.messages.is_not(None)).order_by(t.c.row).limit(100)
    while rows := self._read(shown.where(t.c.row > last)):
      yield from map(_stored, rows)
      last = rows[-1].row

  def newest_trajectories(
    self,
    n: int,
    *,
    evaluation: bool | None = None,
    success: bool | None = None,
    family: str | None = None,
  ) -> list[StoredTrajectory]:
    """Up to n live trajectories with messages, newest first; None is any.

    Args:
      evaluation: only those of evaluations, or only those of training.
      success: only those with a verdict of 1, or only those below.
      family: only tasks of this family.
    """
    t = tables.trajectories
    query = sa.select(t).where(~t.c.superseded, t.c.messages.is_not(None))
    if evaluation is not None:
      query = query.where(t.c.item < 0 if evaluation else t.c.item >= 0)
    if success is not None:
      query = query.where(t.c.success >= 1 if success else t.c.success < 1)
    if family is not None:
      query = query.where(t.c.family == family)
    return [_stored(row) for row in self._read(query.order_by(t.c.row.desc()).limit(n))]

  def ended(
    self, *, after: int | None = None, items: Sequence[int] | None = None
  ) -> list[Ended]:
    """Trajectories of work items in the order in which they were stored.

    Args:
      after: only those stored after this row.
      items: only those of these items.
    """
    t, c = tables.trajectories.c, tables.completions.c
    query = (
      sa.select(
        t.row,
        t.end_reason,
        t.success,
        t.wall_s,
        t.superseded,
        sa.func.coalesce(sa.func.sum(c.response_tokens), 0).label('tokens'),
        sa.func.min(c.first_version).label('first'),
        sa.func.max(c.last_version).label('last'),
      )
      .outerjoin_from(tables.trajectories, tables.completions, t.session == c.session)
      .where(t.item >= 0)
      .group_by(t.row)
      .order_by(t.row)
    )
    if after is not None:
      query = query.where(t.row > after)
    if items is None:
      rows = self._read(query)
    else:
      parts = tables.parts(list(items))
      rows = [r for part in parts for r in self._read(query.where(t.item.in_(part)))]
    return [
      Ended(
        row=r.row,
        end_reason=r.end_reason,
        success=r.success,
        wall_s=r.wall_s,
        response_tokens=int(r.tokens),
        versions=() if r.first is None else (r.first, r.last),
        superseded=r.superseded,
      )
      for r in rows
    ]

  def items(self, *states: str, first: int = 0) -> list[records.WorkItem]:
    """Work items by index, in the given states (all if none is given).

    Args:
      first: lowest index to include.
    """
    i = tables.items
    query = sa.select(i).where(i.c.index >= first).order_by(i.c.index)
    if states:
      query = query.where(i.c.state.in_(states))
    return [tables.work_item(row) for row in self._read(query)]

  def failures(self) -> dict[int, str]:
    """The reasons of the failed items, by index."""
    i = tables.items.c
    query = sa.select(i.index, i.reason).where(i.state == 'failed').order_by(i.index)
    return {row.index: row.reason for row in self._read(query)}

  def _read(self, query: sa.Select) -> list[sa.Row]:
    return self._database.read(lambda c: list(c.execute(query).all()))


def _stored(row: sa.Row) -> StoredTrajectory:
  reward = None
  if row.total is not None:
    reward = records.TrajectoryReward(row.process, row.speed, row.perf, row.total)
  return StoredTrajectory(tables.trajectory(row), reward, row.superseded)
