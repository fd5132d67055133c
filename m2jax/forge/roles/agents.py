"""The agents' role: runs work items of the pool against the gateway, under leases.

Any number of processes may. Each claims items while it can run their episodes and
the gateway serves, shows that it is alive, and reports every group once, with all its
trajectories. A process that loses a lease, because it was too slow or its item was
reissued, cancels that group; what it still reports is not recorded.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import queue
import socket
import threading
import time
from pathlib import Path
from typing import Any

from absl import logging

from m2jax.agents import episodes
from m2jax.forge import shared
from m2jax.forge.config import ForgeConfig, RolesConfig
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.remote.gateway_client import GatewayClient, SessionClient
from m2jax.pool import data_pool, leases
from m2jax.records import Trajectory

_HEALTH_S = 1.0  # between questions whether the gateway serves
_BLOCKED_S = 60.0  # of the episodes' event loop, after which the role stops
_STOPPED = leases.STOPPED + "the agents' process"


@dataclasses.dataclass
class _Group:
  """A claimed group.

  Attributes:
    ended: trajectories that have ended.
  """

  claim: leases.Claim
  future: concurrent.futures.Future
  ended: list[Trajectory]


class Worker:
  """Claims, runs and reports groups; `step` in a loop, then `close`.

  Attributes:
    reported, lost: number of groups whose report counted, and of those whose lease was
      gone.
  """

  def __init__(
    self,
    pool: data_pool.DataPool,
    runner: Any,
    config: RolesConfig,
    *,
    concurrency: int,
    ready=lambda: True,
  ):
    """Claims nothing yet.

    Args:
      runner: an `episodes.Runner`.
      concurrency: episodes at once.
      ready: whether episodes can be run now, such as that the gateway serves.
    """
    self._pool, self._runner, self._config = pool, runner, config
    self._concurrency, self._ready = concurrency, ready
    self._owner = f'{socket.gethostname()}:{os.getpid()}'
    self._groups: dict[str, _Group] = {}  # by lease
    self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
    self.reported = self.lost = 0
    self._stopping = threading.Event()
    self._error: BaseException | None = None
    self._beats = threading.Thread(target=self._beat, name='heartbeat', daemon=True)
    self._beats.start()

  def step(self, timeout_s: float) -> None:
    """Claims what there is room for, and reports groups as they end, for a while.

    Raises:
      PoolBroken: the database cannot be written.
    """
    if self._error is not None:
      raise self._error
    self._claim()
    ends_s = time.monotonic() + timeout_s
    while True:
      try:
        lease = self._done.get(timeout=max(0.0, ends_s - time.monotonic()))
      except queue.Empty:
        return
      self._report(lease)

  def close(self) -> None:
    """Stops all groups and gives their items back."""
    self._stopping.set()
    self._beats.join()
    groups = list(self._groups.items())
    for _, group in groups:
      group.future.cancel()
    for lease, _ in groups:
      self._finish(lease, _STOPPED)

  def _claim(self) -> None:
    while self._ready():
      groups = list(self._groups.values())
      running = sum(g.claim.item.group_size for g in groups)
      if running >= self._concurrency:
        return
      claims = self._pool.claim(self._owner, 1)
      if not claims:
        return
      self._start(claims[0])

  def _start(self, claim: leases.Claim) -> None:
    item, ended = claim.item, []
    logging.info('item %d, attempt %d', item.index, item.attempt)
    future = self._runner.group(
      item.task,
      item.group_size,
      item=item.index,
      prefix=item.session_prefix,
      on_end=ended.append,
    )
    self._groups[claim.lease] = _Group(claim, future, ended)
    future.add_done_callback(lambda _: self._done.put(claim.lease))

  def _beat(self) -> None:
    """Keeps the leases; cancels groups whose lease is gone."""
    while not self._stopping.wait(self._config.lease_s / 4):
      held = list(self._groups)
      try:
        alive = self._pool.heartbeat(held)
      except Exception as error:
        self._error = error
        return
      for lease in set(held) - alive:
        group = self._groups.pop(lease, None)
        if group is not None and not group.future.done():
          logging.warning('item %d: the lease is gone', group.claim.item.index)
          group.future.cancel()
          self.lost += 1

  def _report(self, lease: str) -> None:
    """Reports an ended group: complete if any of its episodes can be judged."""
    group = self._groups.get(lease)
    if group is None or group.future.cancelled():
      return
    if error := group.future.exception():  # a bug: it would fail again
      logging.error('item %d', group.claim.item.index, exc_info=error)
      self._finish(lease, leases.FAILED + repr(error))
    else:
      self._finish(lease, leases.outcome(group.ended))

  def _finish(self, lease: str, end: str) -> None:
    group = self._groups.get(lease)
    if group is None:
      return
    # The lease is kept by heartbeats until the report is committed.
    if self._pool.report(group.claim, group.ended, end):
      self.reported += 1
    else:
      self.lost += 1
    self._groups.pop(lease, None)


def run(config: ForgeConfig, workdir: Path) -> None:
  """Runs agents until it is interrupted.

  Raises:
    PoolBroken: the database cannot be written.
    RolloutsFailed: code of an agent or a task blocks all episodes.
  """
  roles = config.roles
  shared.join(config, workdir)
  key = shared.read_key(config, workdir, shared.SESSION)
  gateway = GatewayClient(roles.gateway_url)
  sessions = SessionClient(roles.gateway_url, key)
  with (
    shared.open_pool(config, workdir) as pool,
    episodes.Runner(config.episodes, gateway.base_url, sessions) as runner,
  ):
    worker = Worker(
      *(pool, runner, roles),
      concurrency=config.episodes.concurrency,
      ready=_Cached(functools.partial(_serves, gateway), _HEALTH_S),
    )
    print(f'agents: {roles.gateway_url}', flush=True)
    try:
      while True:
        worker.step(roles.poll_s)
        check_not_blocked(runner)
    finally:
      worker.close()
      gateway.close()


def check_not_blocked(runner: episodes.Runner) -> None:
  """Raises RolloutsFailed if no episode could run for `_BLOCKED_S`."""
  if not runner.responds(_BLOCKED_S):
    raise RolloutsFailed(
      f'no episode could run for {_BLOCKED_S:g} s: code of an agent or a task blocks '
      'the event loop; await it, or run it in a thread'
    )


def _serves(gateway: GatewayClient) -> bool:
  return gateway.health()[0]


class _Cached:
  """A condition that is asked for at most every `period_s` seconds."""

  def __init__(self, condition, period_s: float):
    self._condition, self._period_s = condition, period_s
    self._value, self._until_s = False, 0.0

  def __call__(self) -> bool:
    if time.monotonic() >= self._until_s:
      self._value = self._condition()
      self._until_s = time.monotonic() + self._period_s
    return self._value
