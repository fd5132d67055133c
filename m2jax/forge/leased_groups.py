"""Rollout groups of RL that other processes run, under leases (`pool.leases`).

Submitted items wait in the pool's database until somebody claims them. A thread here
looks at the leases: a complete group completes its item; one whose agents failed for a
reason of the infrastructure, or gave no sign of life for `lease_s`, goes to the next
who claims it, until the item's deadline. The former are failures as of a group that
runs here: they are repeated one at a time, and too many in a row end the run.
"""

from __future__ import annotations

import threading
import time

from absl import logging

from m2jax.forge.config import ForgeConfig
from m2jax.forge.roles import Rollouts
from m2jax.forge.rollout_groups import RolloutGroups
from m2jax.pool import leases
from m2jax.records import WorkItem

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0  # before an item is run again


class LeasedGroups(RolloutGroups):
  """`RolloutGroups` whose episodes run elsewhere; see there."""

  def __init__(self, config: ForgeConfig, roles: Rollouts, view=None):
    super().__init__(config, roles, view)
    self._lease_s, self._look_s = config.roles.lease_s, config.roles.poll_s
    self._seen: dict[int, tuple[leases.Lease, float]] = {}  # and since when, by index
    self._failures: dict[int, int] = {}  # reports of AGAIN, by index
    self._stopping = threading.Event()
    self._thread: threading.Thread | None = None

  def close(self) -> None:
    """Leaves the groups to their agents, whose reports a restart finds."""
    self._stopping.set()
    if self._thread is not None:
      self._thread.join()
    super().close()

  def fill(self) -> None:
    super().fill()
    if self._thread is None:  # the queue has resumed
      self._thread = threading.Thread(target=self._watch, name='leases', daemon=True)
      self._thread.start()

  def start(self, item: WorkItem) -> None:
    """Does nothing: the item is pending in the pool, where agents claim it."""

  def _cancel(self, index: int) -> None:
    """Does nothing: the lease of an item that has failed no longer holds."""

  def _watch(self) -> None:
    try:
      while not self._stopping.wait(self._look_s):
        self._look()
    except Exception as error:
      logging.exception('the leases cannot be watched')
      self._broken = error

  def _look(self) -> None:
    found, now_s = self._roles.pool.open_leases(), time.monotonic()
    seen = {}
    for lease in found:
      before, since_s = self._seen.get(lease.index, (None, now_s))
      if lease != before:
        since_s = now_s
      seen[lease.index] = lease, since_s
      if lease.report is not None:
        self._on_report(lease, now_s - since_s, new=lease != before)
      elif now_s - since_s > self._lease_s:
        self._reissue(lease, f'no sign of life for {self._lease_s:g} s')
    self._seen = seen

  def _on_report(self, lease: leases.Lease, age_s: float, new: bool) -> None:
    index, report = lease.index, lease.report
    if report == leases.COMPLETE:
      # As in a group run here: who takes the item finds its episodes counted.
      for trajectory, _ in self._roles.pool.group(index):
        self._observe(trajectory)
      try:
        self.queue.complete(index)
      except ValueError as error:  # it lacks trajectories
        self._reissue(lease, str(error))
        return
      self._failures.pop(index, None)
    elif report.startswith(leases.FAILED):
      self.queue.fail(index, report.removeprefix(leases.FAILED))
      self._failures.pop(index, None)
    elif report.startswith(leases.STOPPED):
      self._reissue(lease, report.removeprefix(leases.AGAIN))
    else:
      reason = report.removeprefix(leases.AGAIN)
      if new:
        self.queue.count_failure(reason)
      failures = self._failures.get(index, 0)
      pause_s = min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2.0 ** min(failures, 10))
      if age_s >= pause_s and self._may_start():
        self._failures[index] = failures + 1
        self._reissue(lease, reason)

  def _reissue(self, lease: leases.Lease, reason: str) -> None:
    if self.queue.reissue(lease.index):
      holder = lease.lease.partition('/')[0]
      logging.warning('item %d, of %s, again: %s', lease.index, holder, reason)
      self.reissued += 1
