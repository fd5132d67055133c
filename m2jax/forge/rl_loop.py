"""RL: windowed FIFO between agents and learner, and the checkpoints of law 5."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import numpy as np
from absl import logging

from m2jax.checkpoint import policy
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forge.config import ForgeConfig
from m2jax.forge.curriculum import Curriculum
from m2jax.forge.roles import Rollouts
from m2jax.observe import metrics as metrics_lib
from m2jax.pool import data_pool, windowed_fifo
from m2jax.records import Trajectory, WorkItem
from m2jax.rl import learner
from m2jax.tasks import terminal


class RlLoop:
  """`resume` once, then `run`, which trains until the budget is used up."""

  def __init__(
    self,
    config: ForgeConfig,
    roles: Rollouts,
    the_learner: learner.Learner,
    pool: data_pool.DataPool,
    manager: CheckpointManager,
    metrics: metrics_lib.MetricsWriter,
    files: dict[str, bytes],
    view=None,
  ):
    self._config, self._rl = config, config.rl
    self._roles, self._learner, self._pool = roles, the_learner, pool
    self._manager, self._metrics, self._files = manager, metrics, files
    self._view = view
    self._fifo = windowed_fifo.WindowedFifo(self._rl.capacity, self._rl.window)
    weights = config.terminal.weights or dict.fromkeys(terminal.FAMILIES, 1.0)
    self._curriculum = Curriculum(self._rl.curriculum, weights)
    self._lock = threading.Lock()
    self._finished = 0  # rollouts that ended since the last record
    self._failure: BaseException | None = None
    self._used_s = 0.0
    self._saved = 0  # step of the latest checkpoint
    self._groups: set = set()  # futures of the groups that roll out
    # ends of groups wait for commits, which must not hold up the agents' loop
    self._settling = concurrent.futures.ThreadPoolExecutor(1, 'settling')
    self._taken = 0  # items taken by this process
    self._taken_before: dict[int, int] = {}  # item → items taken before its submission

  def resume(self) -> None:
    """Restores the latest checkpoint and rolls the pool back to its ledger (law 5)."""
    ledger = None
    if self._manager.latest_step() is not None:
      restored = self._manager.restore(like=self._learner.state)
      self._learner.state = restored.state
      ledger = data_pool.Ledger.from_dict(restored.host['ledger'])
      self._used_s = restored.host['used_s']
      self._saved = restored.step
      variables = self._learner.variables()
      self._roles.scheduler.update_weights(variables, self._learner.version)
    self._metrics.supersede('rl', self._learner.version)
    reissue = self._pool.rollback(ledger)
    self._pool.refill(self._fifo)
    if not self._over():
      for item in reissue:
        self._start(item)

  def run(self) -> None:
    """Trains until the budget is used up; the last update has a checkpoint."""
    rl, started = self._rl, time.monotonic() - self._used_s
    while not self._over():
      self._fill()
      step_started = time.monotonic()
      taken = []
      while not taken and not self._fifo.drained:
        taken = self._fifo.wait_for_take(rl.groups_per_step, timeout_s=1.0)
        if self._failure is not None:
          raise RuntimeError('a rollout could not be recorded') from self._failure
        if not self._roles.scheduler.alive:
          raise RuntimeError('the rollout engine has stopped; see the log')
      if not taken:
        break
      waited_s = time.monotonic() - step_started
      indices = [index for index, _ in taken]
      step = self._learner.version + 1
      self._pool.take(indices, step)
      scalars = self._order(indices)
      self._fill()
      scalars |= self._learner.update(indices)
      self._roles.scheduler.update_weights(self._learner.variables(), step)
      self._used_s = time.monotonic() - started
      self._record(step, indices, scalars, waited_s, time.monotonic() - step_started)
      if self._over() or step % rl.checkpoint_every == 0:
        self._save(step)
    if self._saved != self._learner.version:
      self._save(self._learner.version)
    self._manager.wait()

  def _over(self) -> bool:
    rl = self._rl
    late = bool(rl.seconds) and self._used_s >= rl.seconds
    return late or self._learner.version >= rl.steps or self._fifo.drained

  def _fill(self) -> None:
    """Submits work until the queue is full, or closes it after the last item."""
    rl = self._rl
    while True:
      state = self._fifo.state()
      index = state.next_index
      if rl.items and index >= rl.items:
        self._fifo.close()
        return
      if state.pending + state.completed >= rl.capacity:
        return
      spec = terminal.spec(
        'train',
        index,
        seed=self._config.seed,
        config=self._config.terminal,
        family=self._curriculum.draw(f'{self._config.seed}/{index}'),
      )
      item = WorkItem(index=index, task=spec, group_size=rl.group_size)
      self._pool.submit(item)
      self._fifo.submit(item)
      self._taken_before[index] = self._taken
      self._start(item)

  def _start(self, item: WorkItem) -> None:
    future = self._roles.runner.group(
      item.task,
      item.group_size,
      item=item.index,
      prefix=f'rl-{item.index}-{item.attempt}',
      on_end=self._on_end,
    )
    self._groups.add(future)
    future.add_done_callback(
      lambda f: f.cancelled() or self._settling.submit(self._on_group, item, f)
    )

  def abandon(self) -> None:
    """Cancels the groups that still roll out; a restart would reissue them."""
    for future in list(self._groups):
      future.cancel()

  def _on_end(self, trajectory: Trajectory) -> None:
    self._pool.add_trajectory(trajectory)
    if trajectory.ended != 'infrastructure':
      self._curriculum.observe(trajectory.family, trajectory.success)
    with self._lock:
      self._finished += 1
    if self._view is not None and trajectory.rank == 0:
      self._view.set_snippet(trajectory.messages)

  def _on_group(self, item: WorkItem, future) -> None:
    """The group is whole in the pool, so the item completes."""
    self._groups.discard(future)
    try:
      trajectories = future.result()
      if all(t.ended == 'infrastructure' for t in trajectories):
        reason = trajectories[0].reason or 'infrastructure'
        self._pool.fail(item.index, reason)
        self._fifo.fail(item.index, reason)
      else:
        self._pool.complete(item.index)
        self._fifo.complete(item.index)
    except Exception as error:  # the learner's thread raises it
      logging.exception('item %d', item.index)
      self._failure = error

  def _order(self, indices: list[int]) -> dict[str, float]:
    """How windowed FIFO treated items just taken; draws the window."""
    ages = []
    for index in indices:
      ages.append(self._taken - self._taken_before.pop(index, self._taken))
      self._taken += 1
    # taken in order, so an item's head was itself or the oldest item still left
    head, states = self._fifo.states()
    distances = [max(0, index - head) for index in indices]
    if self._view is not None:
      shown = ['taken' if s == 'ended' else s for s in states]
      self._view.set_window(shown, head=head, window=self._fifo.window)
    return {
      'window/age_items_mean': float(np.mean(ages)),
      'window/age_items_max': max(ages),
      'window/order_distance_mean': float(np.mean(distances)),
      'window/order_distance_max': max(distances),
    }

  def _save(self, step: int) -> None:
    ledger = self._pool.ledger(step)
    host = {'ledger': ledger.to_dict(), 'used_s': self._used_s}
    host |= policy.host(self._config.model)
    self._manager.save(step, self._learner.state, host, self._files)
    self._saved = step

  def _record(self, step, indices, scalars, waited_s, step_s) -> None:
    state = self._fifo.state()
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
    if rl.items:
      progress = max(progress, state.head / rl.items)
    self._metrics.write(
      'rl',
      step,
      scalars,
      **{
        'rollouts_per_s': finished / step_s,
        'wait_s': waited_s,
        'step_s': step_s,
        'window/occupancy': state.in_window / (state.window or state.capacity),
        'worst_family_success': min(self._curriculum.success().values()),
        'pool/pending': state.pending,
        'pool/completed': state.completed,
        'pool/taken': state.taken,
        'pool/failed': state.failed,
        'engine/tokens_per_s': engine['tokens_per_s'],
        'engine/queue_length': engine['queue_length'],
        'engine/active_slots': engine['active_slots'],
        'gateway/forks': forks,
        'gateway/overrides': overrides,
        'memory/rss_bytes': metrics_lib.rss_bytes(),
        'progress': min(progress, 1.0),
      },
    )
