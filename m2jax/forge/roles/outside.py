"""Episodes of agents outside: begun and ended over the gateway (`episodes_api`).

`Recorded` records them, for a gateway without a learner, within the bounds of
`RecordedConfig`. `Leased` hands out the work
items of a training run: it claims a group as `forge.roles.agents` does, gives each of
its episodes to the next agent that asks, and reports the group when all have ended. An
episode that nobody ends within `max_age_s` is an infrastructure failure (law 5).
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
import uuid

from absl import logging

from m2jax import tasks
from m2jax.forge.config import RecordedConfig
from m2jax.gateway.episodes_api import Begun, End
from m2jax.gateway.errors import ApiError
from m2jax.gateway.sessions import Session, Sessions
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

  session: Session
  task: str
  family: str
  item: int
  rank: int
  group: _Group | None
  began_s: float

  def check(self, end: End, pool: DataPool) -> None:
    """Raises ValueError if a reward is for no completion of the session."""
    if end.rewards:
      known = pool.completion_ids(self.session.name)
      for id_ in end.rewards.keys() - known:
        raise ValueError(f'this episode has no response {id_[:100]}')

  def trajectory(self, end: End) -> Trajectory:
    return Trajectory(
      session=self.session.name,
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

  def __init__(
    self,
    pool: DataPool,
    sessions: Sessions,
    config: RecordedConfig | None = None,
  ):
    self._pool, self._sessions = pool, sessions
    self._config = config or RecordedConfig()
    self._open: dict[bytes, _Open] = {}  # by digest of the key
    self._lock = threading.Lock()

  def begin(self, task: str | None) -> Begun:
    """See `episodes_api.Episodes`."""
    if not task:
      raise ValueError('name the task: this gateway has none to hand out')
    key, name = f'key-{secrets.token_urlsafe(24)}', f'episode-{uuid.uuid4().hex}'
    with self._lock:
      if len(self._open) >= self._config.max_open:
        raise ApiError(503, f'{self._config.max_open} episodes are open; end some')
      session = self._sessions.open(key, 'training', name)
      family = task.partition('/')[0]
      opened = _Open(session, task, family, -1, 0, None, time.monotonic())
      self._open[session.digest] = opened
    return Begun(key, task)

  def end(self, key: str, end: End) -> bool:
    """See `episodes_api.Episodes`."""
    return self._end(self._sessions.digest(key), end)

  def _end(self, digest: bytes, end: End) -> bool:
    with self._lock:
      opened = self._open.get(digest)
      if opened is None:
        return False
      opened.check(end, self._pool)
      del self._open[digest]
    self._sessions.close_digest(digest)
    self._pool.add_trajectory(opened.trajectory(end))
    return True

  def clean(self) -> None:
    """Ends what is idle, and deletes what is old or too much.

    Raises:
      PoolBroken: the database cannot be written.
    """
    config = self._config
    oldest_s = time.monotonic() - config.idle_s
    with self._lock:
      idle = [d for d, opened in self._open.items() if opened.session.used_s < oldest_s]
    error = f'no request and no end for {config.idle_s:g} s'
    for digest in idle:
      self._end(digest, End(0.0, 'infrastructure', error=error))
    self._sessions.forget_idle(config.idle_s)
    self._pool.forget(
      before_s=time.time() - config.keep_s,
      keep_sessions=config.keep_sessions,
      keep_bytes=config.keep_bytes,
    )


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
      max_age_s: largest age of an episode.
    """
    self._pool, self._sessions = pool, sessions
    self._lease_s, self._max_age_s = lease_s, max_age_s
    self._groups: dict[str, _Group] = {}  # by lease
    self._open: dict[bytes, _Open] = {}  # by digest of the key
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
      self._report(group, leases.STOPPED + 'the gateway')

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
      key = f'key-{secrets.token_urlsafe(24)}'
      name = f'{item.session_prefix}-{uuid.uuid4().hex}'
      session = self._sessions.open(key, 'training', name)
      rank = group.left.pop(0)
      self._open[session.digest] = _Open(
        *(session, item.task, made.family, item.index, rank, group, time.monotonic())
      )
      return Begun(key, item.task, made.instruction)

  def end(self, key: str, end: End) -> bool:
    """See `episodes_api.Episodes`."""
    return self._end(self._sessions.digest(key), end)

  def _end(self, digest: bytes, end: End) -> bool:
    with self._lock:
      opened = self._open.get(digest)
      if opened is None:
        return False
      opened.check(end, self._pool)
      del self._open[digest]
      self._sessions.close_digest(digest)
      group = opened.group
      group.ended.append(opened.trajectory(end))
      if len(group.ended) == group.claim.item.group_size:
        self._report(group, leases.outcome(group.ended))
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
    for digest in [d for d, opened in self._open.items() if opened.group is group]:
      del self._open[digest]
      self._sessions.close_digest(digest)

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
      late = [d for d, opened in self._open.items() if opened.began_s < oldest_s]
    for digest in late:
      error = f'nobody ended the episode within {self._max_age_s:g} s'
      self._end(digest, End(0.0, 'infrastructure', error=error))

  def _index(self, lease: str) -> int:
    return self._groups[lease].claim.item.index
