"""Writes records of all kinds to the data pool's tables, in the order they were added.

A record that comes too late is stored as superseded, and never trained: a completion
whose session has its trajectory, a trajectory whose item is not pending, and all that a
learner still adds after another one has begun.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import sqlalchemy as sa

from m2jax import records
from m2jax.pool import arrays, tables
from m2jax.pool import ledger as ledger_lib

# A completion, a trajectory, the reward of a session, or the advantage of a completion.
Record = (
  records.Completion
  | records.Trajectory
  | tuple[str, records.TrajectoryReward]
  | tuple[str, float]
)


def insert(
  connection: sa.Connection,
  batch: Sequence[Record],
  recent: arrays.Recent,
  current: bool = True,
) -> collections.Counter[str]:
  """Inserts records, in order.

  Args:
    recent: completions that later ones may extend; updated.
    current: whether no learner has begun after the one that adds them.

  Returns:
    The number of completions and of trajectories that came too late.
  """
  t, i = tables.trajectories.c, tables.items.c
  closed = ledger_lib.existing(
    connection,
    t.session,
    {r.session for r in batch if isinstance(r, records.Completion)},
  )
  pending = ledger_lib.existing(
    connection,
    i.index,
    {r.item for r in batch if isinstance(r, records.Trajectory)},
    i.state == 'pending',
  )
  completions, trajectories, rewarded, credited = [], [], [], []
  added: dict[str, records.Completion] = {}
  for r in batch:
    if isinstance(r, records.Completion):
      parent = added.get(r.parent) or recent.get(r.parent)
      row = tables.completion_row(r, parent)
      row['superseded'] = not current or r.session in closed
      completions.append(row)
      added[r.id] = r
    elif isinstance(r, records.Trajectory):
      late = r.item >= 0 and (not current or r.item not in pending)
      trajectories.append(tables.trajectory_row(r) | {'superseded': late})
      closed.add(r.session)
    elif not current:
      continue
    elif isinstance(r[1], float):
      credited.append({'of_id': r[0], 'advantage': r[1]})
    else:
      rewarded.append(dataclasses.asdict(r[1]) | {'of_session': r[0]})
  if completions:
    connection.execute(sa.insert(tables.completions), completions)
  if trajectories:
    connection.execute(sa.insert(tables.trajectories), trajectories)
  if rewarded:
    matching = t.session == sa.bindparam('of_session')
    connection.execute(sa.update(tables.trajectories).where(matching), rewarded)
  if credited:
    matching = tables.completions.c.id == sa.bindparam('of_id')
    connection.execute(sa.update(tables.completions).where(matching), credited)
  for completion in added.values():  # only after the rows are inserted
    recent.add(completion)
  recent.drop({r['session'] for r in trajectories})
  return collections.Counter(
    completions=sum(r['superseded'] for r in completions),
    trajectories=sum(r['superseded'] for r in trajectories),
  )
