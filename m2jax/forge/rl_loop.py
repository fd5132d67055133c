"""RL: windowed FIFO between agents and learner, and the checkpoints of law 5.

A step takes rollout groups until enough of them have something to train (dynamic
sampling), updates the policy and hands its weights to the engine. While it waits, the
queue is refilled and the budget checked. Groups that fail are replaced, but one at a
time and after a pause, until one completes: an outage of some seconds costs the groups
that were running, and one that does not end stops the run with its reason.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
import time

import numpy as np
from absl import logging

from m2jax import tasks
from m2jax.checkpoint import policy
from m2jax.checkpoint.errors import CheckpointError
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forge import evaluation
from m2jax.forge.config import ForgeConfig
from m2jax.forge.curriculum import Curriculum
from m2jax.forge.plateau import Plateau
from m2jax.forge.roles import Rollouts, RolloutsFailed
from m2jax.observe import metrics as metrics_lib
from m2jax.pool import data_pool, work_queue
from m2jax.records import Trajectory, WorkItem
from m2jax.rl import learner, rewards

_POLL_S = 1.0  # between looks at queue, budget and engine while the learner waits
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between submissions after failures
_PROBES = 32  # failures in a row beyond the capacity, by default


class RlLoop:
  """`resume` once, then `run`, which trains until the budget is used up.

  A context manager: its end cancels the groups that still roll out, which belong to no
  update. A restart would reissue them.
  """

  def __init__(
    self,
    config: ForgeConfig,
    roles: Rollouts,
    the_learner: learner.Learner,
    manager: CheckpointManager,
    metrics: metrics_lib.MetricsWriter,
    files: dict[str, bytes],
    view=None,
  ):
    self._config, self._rl = config, config.rl
    self._roles, self._learner, self._pool = roles, the_learner, roles.pool
    self._manager, self._metrics, self._files = manager, metrics, files
    self._view = view
    self._queue = work_queue.WorkQueue(
      roles.pool,
      self._rl.capacity,
      self._rl.window,
      deadline_s=self._rl.item_deadline_s,
      on_expired=self._cancel,
    )
    self._tasks = dataclasses.replace(
      config.tasks, partial_credit=self._rl.partial_credit
    )
    self._curriculum = Curriculum(self._rl.curriculum, tasks.families(config.tasks))
    self._dev = Plateau()
    self._lock = threading.Lock()
    self._finished = 0  # rollouts that ended since the last record
    self._broken: Exception | None = None  # no group can be recorded any more
    self._started_s = time.monotonic()  # so that now - it is the RL time used
    self._saved = 0  # step of the latest checkpoint
    self._ledgers: dict[int, data_pool.Ledger] = {}  # of checkpoints, by step
    self._pruned = 0  # completions that lost their token ids
    self._next_submit_s = 0.0  # not before, after a failure
    self._groups: dict[int, concurrent.futures.Future] = {}  # by item: they roll out
    # ends of groups wait for commits, which must not hold up the agents' loop
    self._settling = concurrent.futures.ThreadPoolExecutor(1, 'settling')

  def __enter__(self) -> RlLoop:
    return self

  def __exit__(self, *exc) -> None:
    self._queue.stop()
    for index in list(self._groups):
      self._cancel(index)
    self._settling.shutdown(cancel_futures=True)

  def resume(self) -> None:
    """Restores the latest checkpoint and rolls the pool back to its ledger (law 5)."""
    ledger = None
    if self._manager.latest_step() is not None:
      restored = self._manager.restore(like=self._learner.state)
      self._learner.state = restored.state
      ledger = data_pool.Ledger.from_dict(restored.host['ledger'])
      self._started_s -= restored.host['used_s']
      self._dev = Plateau(restored.host['dev'])
      self._saved = restored.step
      variables = self._learner.variables()
      self._roles.scheduler.update_weights(variables, self._learner.version)
    self._read_ledgers()
    self._metrics.supersede('rl', self._learner.version)
    reissue = self._queue.resume(ledger)
    self._learner.lineages = self._pool.lineages()
    if not self._over():
      for item in reissue:
        self._start(item)

  def run(self) -> None:
    """Trains until the budget is used up; the last update has a checkpoint.

    Raises:
      RolloutsFailed: `max_failed_groups` items failed in a row, or the engine stopped;
        the last update has a checkpoint all the same.
      PoolBroken: the database cannot be written.
    """
    failed = None
    try:
      while not self._over() and self._step():
        pass
    except RolloutsFailed as error:
      failed = error
    if self._saved != self._learner.version:
      self._save(self._learner.version)
    self._manager.wait()
    if failed is not None:
      raise failed

  def _step(self) -> bool:
    """One update of the policy; False when nothing can be taken any more."""
    step, started_s = self._learner.version + 1, time.monotonic()
    taken, credits_ = self._collect(step)
    if not taken:
      return False
    waited_s = time.monotonic() - started_s
    scalars = self._order(taken)
    self._fill()
    scalars |= self._learner.update(credits_, self._rl.updates_per_batch)
    self._roles.scheduler.update_weights(self._learner.variables(), step)
    self._record(step, scalars, waited_s, time.monotonic() - started_s)
    if self._rl.dev_every and step % self._rl.dev_every == 0:
      self._develop(step)
    if self._over() or step % self._rl.checkpoint_every == 0:
      self._save(step)
    return True

  # --- Budget ---

  @property
  def _used_s(self) -> float:
    return time.monotonic() - self._started_s

  def _out_of_time(self) -> bool:
    return bool(self._rl.seconds) and self._used_s >= self._rl.seconds

  def _over(self) -> bool:
    done = self._learner.version >= self._rl.steps or self._queue.drained
    return done or self._out_of_time() or self._dev.flat(self._rl.patience)

  def _develop(self, step: int) -> None:
    """Measures the weights on the development split while rollouts go on.

    An outage costs the measurement, not the run: whether that goes on, the failures of
    its groups decide.
    """
    try:
      success = evaluation.evaluate(
        self._roles,
        self._metrics,
        stage='during RL',
        step=step,
        split='dev',
        tasks=self._rl.dev_tasks,
      )
    except RolloutsFailed as error:
      logging.warning('step %d: not measured: %s', step, error)
      return
    self._dev.add(success)
    logging.info('step %d: development split %.3f', step, success)

  # --- Taking ---

  def _collect(
    self, step: int
  ) -> tuple[list[work_queue.Taken], list[rewards.GroupCredit]]:
    """Takes items for a step until `groups_per_step` of them have an advantage.

    Fewer at the end of a finite queue, or where `refill_factor` says stop. Nothing when
    the time is up: what was taken for the step is no part of a ledger then, and a
    restart would take it again.
    """
    rl, taken, credits_ = self._rl, [], []
    limit = int(rl.refill_factor * rl.groups_per_step)
    useful = 0
    while useful < rl.groups_per_step and len(taken) < limit:
      n = min(rl.groups_per_step - useful, limit - len(taken))
      found = self._wait(n, step)
      if not found and self._queue.drained:
        break
      if not found:
        return [], []
      new = [self._learner.credit(self._pool.group(t.index)) for t in found]
      self._pool.set_rewards(rewards.by_session(new), rewards.by_completion(new))
      useful += sum(not c.dropped for c in new)
      taken += found
      credits_ += new
    return taken, credits_

  def _wait(self, n: int, step: int) -> list[work_queue.Taken]:
    """Waits for n items while keeping the queue full; none when the time is up."""
    while not self._out_of_time():
      self._fill()
      if found := self._queue.take(n, step, timeout_s=self._poll_s()):
        return found
      if self._queue.drained:
        break
      self._check()
    return []

  def _poll_s(self) -> float:
    """Until the queue is to be looked at again."""
    pause_s = self._next_submit_s - time.monotonic()
    return min(_POLL_S, pause_s) if pause_s > 0 else _POLL_S

  def _check(self) -> None:
    """Raises where waiting is in vain."""
    if self._broken is not None:
      raise self._broken
    failed, reason = self._queue.failed_in_a_row, self._queue.last_failure
    if not self._roles.scheduler.alive:
      raise RolloutsFailed(
        f'the rollout engine has stopped; see the log. The last failure of a rollout '
        f'group: {reason or "none"}'
      )
    limit = self._rl.max_failed_groups or self._rl.capacity + _PROBES
    if failed >= limit:
      raise RolloutsFailed(
        f'{failed} rollout groups failed in a row (rl.max_failed_groups is {limit}), '
        f'the last: {reason}. Mend the cause and start the run again: it goes on from '
        f'step {self._learner.version}'
      )

  def _order(self, taken: list[work_queue.Taken]) -> dict[str, float]:
    """How windowed FIFO treated items just taken; draws the window."""
    head, states = self._queue.states()
    if self._view is not None:
      shown = ['taken' if s == 'retired' else s for s in states]
      self._view.set_window(shown, head=head, window=self._queue.window)
    ages = [t.age_items for t in taken]
    distances = [t.order_distance for t in taken]
    return {
      'window/age_items_mean': float(np.mean(ages)),
      'window/age_items_max': max(ages),
      'window/order_distance_mean': float(np.mean(distances)),
      'window/order_distance_max': max(distances),
      'groups_refilled': max(0, len(taken) - self._rl.groups_per_step),
    }

  # --- Rolling out ---

  def _fill(self) -> None:
    """Submits work until the queue is full, or closes it after the last item."""
    rl = self._rl
    while True:
      state = self._queue.state()
      index = state.next_index
      if rl.max_items and index >= rl.max_items:
        self._queue.close()
        return
      if state.pending + state.completed >= rl.capacity:
        return
      failed = self._queue.failed_in_a_row
      if failed and time.monotonic() < self._next_submit_s:
        return
      pause_s = min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2.0 ** min(failed - 1, 10))
      self._next_submit_s = time.monotonic() + pause_s
      seed = self._config.seed
      family = self._curriculum.draw(f'{seed}/{index}')
      spec = tasks.spec(self._tasks, 'train', index, seed=seed, family=family)
      self._start(self._queue.submit(spec, rl.group_size))

  def _start(self, item: WorkItem) -> None:
    future = self._roles.runner.group(
      item.task,
      item.group_size,
      item=item.index,
      prefix=f'rl-{item.index}-{item.attempt}',
      on_end=self._on_end,
    )
    self._groups[item.index] = future
    future.add_done_callback(functools.partial(self._settle, item))

  def _cancel(self, index: int) -> None:
    if (future := self._groups.get(index)) is not None:
      future.cancel()

  def _on_end(self, trajectory: Trajectory) -> None:
    self._pool.add_trajectory(trajectory)
    if trajectory.end_reason != 'infrastructure':
      self._curriculum.observe(trajectory.family, trajectory.success)
    with self._lock:
      self._finished += 1
    if self._view is not None and trajectory.rank == 0:
      self._view.set_snippet(trajectory.messages)

  def _settle(self, item: WorkItem, future: concurrent.futures.Future) -> None:
    self._groups.pop(item.index, None)
    if not future.cancelled():
      self._settling.submit(self._on_group, item, future)

  def _on_group(self, item: WorkItem, future: concurrent.futures.Future) -> None:
    """The group is whole in the pool and its item completes, or it fails.

    Whatever goes wrong with one group costs this group; a pool that cannot be written
    ends the run, from the learner's thread.
    """
    try:
      try:
        trajectories = future.result()
        if any(t.end_reason != 'infrastructure' for t in trajectories):
          self._queue.complete(item.index)
          return
        reason = trajectories[0].error or 'infrastructure'
      except data_pool.PoolBroken:
        raise
      except Exception as error:
        logging.exception('item %d', item.index)
        reason = repr(error)
      self._queue.fail(item.index, reason)
    except Exception as error:
      logging.exception('item %d could not be retired', item.index)
      self._broken = error

  # --- Recording ---

  def _save(self, step: int) -> None:
    ledger = self._pool.ledger(step)
    host = {'ledger': ledger.to_dict(), 'used_s': self._used_s}
    host['dev'] = self._dev.values
    host |= policy.host(self._config.model)
    self._manager.save(step, self._learner.state, host, self._files)
    self._saved = step
    self._ledgers[step] = ledger
    self._prune()

  def _read_ledgers(self) -> None:
    """Of the checkpoints that an earlier process left."""
    for step in self._manager.steps():
      try:
        host, _, _ = self._manager.read_host(step)
        self._ledgers[step] = data_pool.Ledger.from_dict(host['ledger'])
      except (CheckpointError, KeyError, TypeError) as error:
        logging.warning('nothing is pruned while step %d is kept: %s', step, error)

  def _prune(self) -> None:
    """Drops what no kept checkpoint can need from the pool."""
    oldest = min(self._manager.steps(), default=None)
    if oldest in self._ledgers:
      self._pruned += self._pool.prune(self._ledgers[oldest])
      kept = (s for s in self._ledgers if s >= oldest)
      self._ledgers = {step: self._ledgers[step] for step in kept}

  def _record(self, step, scalars, waited_s, step_s) -> None:
    state, counts = self._queue.state(), self._pool.counts()
    with self._lock:
      finished, self._finished = self._finished, 0
    engine = self._roles.scheduler.stats()
    counters = self._roles.gateway.counters()
    forks = sum(n for name, n in counters.items() if name.startswith('forks_total'))
    forks -= counters.get('forks_total{reason="first"}', 0)  # a session's beginning
    overrides = sum(n for name, n in counters.items() if name.startswith('overrides'))
    rl = self._rl
    progress = step / rl.steps
    if rl.seconds:
      progress = max(progress, self._used_s / rl.seconds)
    if rl.max_items:
      progress = max(progress, state.head / rl.max_items)
    self._metrics.write(
      'rl',
      step,
      scalars,
      **{
        'rollouts_per_s': finished / step_s,
        'wait_s': waited_s,
        'step_s': step_s,
        'used_s': self._used_s,
        'window/occupancy': state.in_window / (state.window or state.capacity),
        'worst_family_success': min(self._curriculum.success().values()),
        'pool/pending': state.pending,
        'pool/completed': state.completed,
        'pool/taken': counts['taken'],
        'pool/failed': counts['failed'],
        'pool/pruned_completions': self._pruned,
        'pool/missed_syncs': counts['missed_syncs'],
        'pool/late_completions': counts['late_completions'],
        'pool/late_trajectories': counts['late_trajectories'],
        'engine/tokens_per_s': engine['tokens_per_s'],
        'engine/queue_length': engine['queue_length'],
        'engine/active_slots': engine['active_slots'],
        'gateway/forks': forks,
        'gateway/overrides': overrides,
        'memory/rss_bytes': metrics_lib.rss_bytes(),
        'progress': min(progress, 1.0),
      },
    )
