"""Episodes of agents outside: begun and ended over the gateway (`episodes_api`).

`Recorded` records them, for a gateway without a learner. `Leased` hands out the work
items of a training run: it claims a group as `forge.remote.agents` does, gives each of
its episodes to the next agent that asks, and reports the group when all have ended. An
episode that nobody ends within `max_age_s` is an infrastructure failure (law 5).
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time

from absl import logging

from m2jax import tasks
from m2jax.gateway.episodes_api import Begun, End
from m2jax.gateway.sessions import Sessions
from m2jax.pool import leases
from m2jax.pool.data_pool import DataPool
from m2jax.records import Trajectory

_OWNER = 'gateway'


@dataclasses.dataclass
class _Group:
  """A claimed group: ranks that nobody has begun, and trajectories that ended."""

  claim: leases.Claim
  left: list[int]
  ended: list[Trajectory]


@dataclasses.dataclass(frozen=True)
class _Open:
  """An open episode. `group` is None outside training."""

  task: str
  family: str
  item: int
  rank: int
  group: _Group | None
  began_s: float

  def trajectory(self, key: str, end: End) -> Trajectory:
    return Trajectory(
      session=key,
      item=self.item,
      rank=self.rank,
      task=self.task,
      family=self.family,
      wall_s=time.monotonic() - self.began_s,
      tool_calls=0,
      **dataclasses.asdict(end),
    )


class Recorded:
  """Any number of episodes, recorded with their completions under a name."""

  def __init__(self, pool: DataPool, sessions: Sessions, mode: str = 'training'):
    self._pool, self._sessions, self._mode = pool, sessions, mode
    self._open: dict[str, _Open] = {}

  def begin(self, task: str | None) -> Begun:
    """See `episodes_api.Episodes`."""
    if not task:
      raise ValueError('name the task: this gateway has none to hand out')
    key = f'episode-{secrets.token_urlsafe(24)}'
    self._sessions.open(key, self._mode)
    family = task.partition('/')[0]
    self._open[key] = _Open(task, family, -1, 0, None, time.monotonic())
    return Begun(key, task)

  def end(self, key: str, end: End) -> bool:
    """See `episodes_api.Episodes`."""
    opened = self._open.pop(key, None)
    if opened is None:
      return False
    self._sessions.close(key)
    self._pool.add_trajectory(opened.trajectory(key, end))
    return True


class Leased:
  """Episodes of the work items that a learner submits to the pool; a context manager.

  Attributes:
    reported, lost: number of groups whose report counted, and whose lease was gone.
  """

  def __init__(
    self, pool: DataPool, sessions: Sessions, *, lease_s: float, max_age_s: float
  ):
    """Claims nothing yet.

    Args:
      lease_s: `RolesConfig.lease_s`.
      max_age_s: of an episode.
    """
    self._pool, self._sessions = pool, sessions
    self._lease_s, self._max_age_s = lease_s, max_age_s
    self._groups: dict[str, _Group] = {}  # by lease
    self._open: dict[str, _Open] = {}  # by key
    self._lock = threading.RLock()
    self.reported = self.lost = 0
    self._stopping = threading.Event()
    self._beats = threading.Thread(target=self._beat, name='outside', daemon=True)

  def __enter__(self) -> Leased:
    self._beats.start()
    return self

  def __exit__(self, *exc) -> None:
    """Gives unfinished groups back."""
    self._stopping.set()
    self._beats.join()
    for group in list(self._groups.values()):
      self._report(group, leases.AGAIN + 'the gateway was stopped')

  def begin(self, task: str | None) -> Begun | None:
    """See `episodes_api.Episodes`."""
    if task:
      raise ValueError('leave it out: the training run chooses the tasks')
    with self._lock:
      free = (group for group in self._groups.values() if group.left)
      group = next(free, None) or self._claim()
      if group is None:
        return None
      item, made = group.claim.item, tasks.make(group.claim.item.task)
      key = f'{item.session_prefix}-{secrets.token_urlsafe(24)}'
      self._sessions.open(key, 'training')
      rank = group.left.pop(0)
      self._open[key] = _Open(
        item.task, made.family, item.index, rank, group, time.monotonic()
      )
      return Begun(key, item.task, made.instruction)

  def end(self, key: str, end: End) -> bool:
    """See `episodes_api.Episodes`."""
    with self._lock:
      opened = self._open.pop(key, None)
      if opened is None:
        return False
      self._sessions.close(key)
      group = opened.group
      group.ended.append(opened.trajectory(key, end))
      if len(group.ended) == group.claim.item.group_size:
        judged = any(t.end_reason != 'infrastructure' for t in group.ended)
        reason = group.ended[0].error or 'infrastructure'
        self._report(group, leases.COMPLETE if judged else leases.AGAIN + reason)
      return True

  def _claim(self) -> _Group | None:
    claims = self._pool.claim(_OWNER, 1)
    if not claims:
      return None
    [claim] = claims
    group = _Group(claim, list(range(claim.item.group_size)), [])
    self._groups[claim.lease] = group
    return group

  def _report(self, group: _Group, end: str) -> None:
    with self._lock:
      self._forget(group)
      if self._pool.report(group.claim, group.ended, end):
        self.reported += 1
      else:
        self.lost += 1

  def _forget(self, group: _Group) -> None:
    self._groups.pop(group.claim.lease, None)
    for key in [key for key, opened in self._open.items() if opened.group is group]:
      del self._open[key]
      self._sessions.close(key)

  def _beat(self) -> None:
    """Keeps the leases; ends episodes that are too old."""
    while not self._stopping.wait(self._lease_s / 4):
      try:
        self._look()
      except Exception:
        logging.exception('episodes outside: the leases cannot be kept')

  def _look(self) -> None:
    with self._lock:
      held = list(self._groups)
      alive = self._pool.heartbeat(held)
      for lease in set(held) - alive:
        logging.warning('item %d: the lease is gone', self._index(lease))
        self._forget(self._groups[lease])
        self.lost += 1
      oldest_s = time.monotonic() - self._max_age_s
      late = [key for key, opened in self._open.items() if opened.began_s < oldest_s]
    for key in late:
      error = f'nobody ended the episode within {self._max_age_s:g} s'
      self.end(key, End(0.0, 'infrastructure', error=error))

  def _index(self, lease: str) -> int:
    return self._groups[lease].claim.item.index
