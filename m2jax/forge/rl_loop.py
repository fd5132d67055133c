"""The RL loop: takes rollout groups, trains on them, writes the checkpoints of law 5.

A step takes groups until enough of them have a non-zero advantage (dynamic sampling),
updates the policy and publishes its weights to the engine. While it waits, the queue is
refilled (`groups`) and the budget checked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
from absl import logging

from m2jax.checkpoint import policy
from m2jax.checkpoint.errors import CheckpointError
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forge import evaluation
from m2jax.forge.config import ForgeConfig
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.groups import Groups
from m2jax.forge.prepare import KEEP
from m2jax.forge.roles.in_process import Rollouts
from m2jax.forge.sample_counts import SampleCounts
from m2jax.observe import metrics as metrics_lib
from m2jax.observe import progress
from m2jax.pool import data_pool, work_queue
from m2jax.records import Completion
from m2jax.rl import agreement, rewards
from m2jax.rl import learner as learner_lib
from m2jax.rollout.serving import drafting
from m2jax.train import stopping
from m2jax.train.step import Skips

# Statistics of weights that are published (`roles.learner`), not given to an engine.
_PUBLISHED = 'published_bytes', 'published_whole_bytes', 'published_delta_bytes'
_PUBLISHED += ('publish_s',)


class RlLoop:
  """Call `resume` once, then `run`, which trains until the budget is used up.

  A context manager: leaving it cancels the groups that still run.
  """

  def __init__(
    self,
    config: ForgeConfig,
    roles: Rollouts,
    learner: learner_lib.Learner,
    manager: CheckpointManager,
    metrics: metrics_lib.MetricsWriter,
    files: dict[str, bytes],
    view=None,
  ):
    self._config, self._rl = config, config.rl
    self._roles, self._learner, self._pool = roles, learner, roles.pool
    self._manager, self._metrics, self._files = manager, metrics, files
    self._view = view
    self._groups = Groups(config, roles, view)
    self._queue = self._groups.queue
    self._samples = SampleCounts(self._pool)
    self._dev = evaluation.Plateau()
    # The time used is now minus this; a restart shifts it.
    self._started_s = time.monotonic()
    self._saved = 0  # step of the latest checkpoint
    self._compiled = False  # the train step, by this process's first update
    self._skips = Skips(config.rl.max_skipped)
    self._ledgers: dict[int, data_pool.Ledger] = {}  # of the checkpoints, by step
    self._pruned = 0  # completions whose token ids were dropped
    self._engine: Mapping[str, float] = {}  # statistics at the last record
    self._save_s: float | None = None  # waited for the save since the last record

  def __enter__(self) -> RlLoop:
    return self

  def __exit__(self, *exc) -> None:
    self._groups.close()

  def resume(self) -> None:
    """Restores the latest checkpoint and rolls the pool back to its ledger (law 5)."""
    ledger = None
    if self._manager.latest_step() is not None:
      restored = self._manager.restore(like=self._learner.state)
      self._learner.state = restored.state
      ledger = data_pool.Ledger.from_dict(restored.host['ledger'])
      self._started_s -= restored.host['used_s']
      self._dev = evaluation.Plateau(restored.host['dev'])
      self._samples.restore(restored.host.get('samples', {}))
      self._saved = restored.step
    self._read_ledgers()
    self._metrics.supersede('rl', self._learner.version)
    reissue = self._queue.resume(ledger)
    self._learner.lineages = self._pool.lineages()
    if ledger is not None:  # served in the lineage that has begun
      variables = self._learner.variables()
      self._roles.scheduler.update_weights(variables, self._learner.version)
    if not self._over():
      for item in reissue:
        self._groups.start(item)

  @stopping.deferred()
  def run(self) -> None:
    """Trains until the budget is used up, and saves the last update.

    Raises:
      RolloutsFailed: `max_failed_groups` items failed in a row, or the engine stopped;
        the last update is saved first.
      NotFinite: loss or gradient was not finite in more than `max_skipped` updates in a
        row, which changed nothing; the last one is saved first.
      KeyboardInterrupt: the job was asked to stop (`train.stopping`), in any of its
        processes; the last update is saved first.
      PoolBroken: the database cannot be written.
      Disagreement: see `fail_on_mismatch`.
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
    self._skips.check(f'rl step {self._learner.version}')
    if stopping.requested():  # maybe in another process
      stopping.request()

  def _step(self) -> bool:
    """Makes one update of the policy; False if no items can be taken any more."""
    step, started_s = self._learner.version + 1, time.monotonic()
    progress.report(f'step {step:,} waits for rollouts')
    taken, credits_ = self._collect(step)
    if not taken:
      return False
    waited_s = time.monotonic() - started_s
    scalars = self._window_metrics(taken)
    self._groups.fill()
    compiling = '' if self._compiled else '; compiling the train step'
    progress.report(f'step {step:,} trains{compiling}')
    scalars |= self._learner.update(credits_, self._rl.updates_per_batch)
    self._compiled = True
    self._check_agreement(step, scalars)
    self._skips.add(scalars['skipped'] == self._rl.updates_per_batch)
    self._roles.scheduler.update_weights(self._learner.variables(), step)
    progress.report('')
    self._record(step, scalars, waited_s, time.monotonic() - started_s)
    if self._rl.dev_every and step % self._rl.dev_every == 0:
      self._develop(step)
    if self._over() or step % self._rl.checkpoint_every == 0:
      self._save(step)
    return True

  def _check_agreement(self, step: int, scalars: Mapping[str, float]) -> None:
    """Learner and engine agree in float32, unless the engine rounds or reuses keys; to
    the bit with invariant numerics."""
    config, engine = self._config, self._config.engine
    exact = config.model.dtype == 'float32' and config.model.matmuls.kind == 'plain'
    exact = exact and engine.cache_dtype in (None, 'float32')
    exact = exact and engine.weights_dtype is None
    exact = exact or config.model.invariant
    if not exact or config.scheduler.reuse_stale_prefix:
      return
    found = agreement.excess(scalars, config.model.invariant)
    if found and self._rl.fail_on_mismatch:
      raise agreement.Disagreement(f'rl step {step}: {found}')
    if found:
      logging.error('rl step %d: %s', step, found)

  # --- Budget ---

  @property
  def _used_s(self) -> float:
    return time.monotonic() - self._started_s

  def _out_of_time(self) -> bool:
    full = bool(self._rl.seconds) and self._used_s >= self._rl.seconds
    return full or stopping.requested()

  def _over(self) -> bool:
    done = self._learner.version >= self._rl.steps or self._queue.drained
    done = done or self._skips.too_many or self._dev.flat(self._rl.patience)
    return done or self._out_of_time()

  def _develop(self, step: int) -> None:
    """Evaluates the weights on the development split while rollouts continue.

    An outage costs the evaluation, not the run, which only failures of its own groups
    end.
    """
    try:
      success = evaluation.evaluate(
        self._roles,
        self._metrics,
        stage='during RL',
        step=step,
        split='dev',
        tasks=self._rl.dev_tasks,
        stop=stopping.requested,
      )
    except evaluation.Cancelled:
      return
    except RolloutsFailed as error:
      logging.warning('step %d: development split not evaluated: %s', step, error)
      return
    self._dev.add(success)
    logging.info('step %d: development split %.3f', step, success)

  # --- Taking ---

  def _collect(
    self, step: int
  ) -> tuple[list[work_queue.Taken], list[rewards.GroupCredit]]:
    """Takes items for a step until `groups_per_step` of them have an advantage.

    Takes fewer at the end of a finite queue or at the limit of `refill_factor`. Returns
    nothing once the time is up: the items taken for the step are then in no ledger, and
    a restart takes them again.
    """
    rl, taken, credits_ = self._rl, [], []
    limit = int(rl.refill_factor * rl.groups_per_step)
    useful = 0
    while useful < rl.groups_per_step and len(taken) < limit:
      n = min(rl.groups_per_step - useful, limit - len(taken))
      found = self._groups.take(n, step, self._out_of_time)
      if not found and self._queue.drained:
        break
      if not found:
        return [], []
      groups = [self._pool.group(t.index) for t in found]
      new = [self._learner.credit(group) for group in groups]
      self._samples.take(groups, new, self._age)
      self._pool.set_rewards(rewards.by_session(new), rewards.by_completion(new))
      useful += sum(not c.dropped for c in new)
      taken += found
      credits_ += new
    return taken, credits_

  def _age(self, completion: Completion) -> np.ndarray:
    """Updates between the weights of its tokens and the present ones."""
    return self._learner.lineages.updates_between(
      completion.lineage, completion.versions, self._learner.version
    )

  def _window_metrics(self, taken: list[work_queue.Taken]) -> dict[str, float]:
    """Metrics of the items just taken; shows the window in the view."""
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

  # --- Recording ---

  def _save(self, step: int) -> None:
    ledger = self._pool.ledger(step)
    host = {'ledger': ledger.to_dict(), 'used_s': self._used_s}
    host['dev'] = self._dev.values
    host['samples'] = self._samples.state
    host |= policy.host(self._config.model)
    started_s = time.monotonic()
    self._manager.save(step, self._learner.state, host, self._files)
    self._saved, self._save_s = step, time.monotonic() - started_s
    self._ledgers[step] = ledger
    self._prune()

  def _read_ledgers(self) -> None:
    """Reads the ledgers of the checkpoints that an earlier process wrote."""
    for step in self._manager.steps():
      try:
        host, _, _ = self._manager.read_host(step)
        self._ledgers[step] = data_pool.Ledger.from_dict(host['ledger'])
      except (CheckpointError, KeyError, TypeError) as error:
        logging.warning(
          'the checkpoint of step %d has no readable ledger; the pool is not pruned '
          'while it exists: %s',
          step,
          error,
        )

  def _prune(self) -> None:
    """Prunes the pool to the oldest checkpoint that a restart may begin from."""
    oldest = min(self._manager.steps()[-KEEP:], default=None)
    if oldest in self._ledgers:
      # Longer than any episode that may still be reported.
      abandoned_s = 3 * self._rl.item_deadline_s
      ledger = self._ledgers[oldest]
      self._pruned += self._pool.prune(
        ledger, abandoned_s=abandoned_s, keep_items=self._rl.keep_items
      )
      self._ledgers = {s: x for s, x in self._ledgers.items() if s >= oldest}

  def _record(
    self, step: int, scalars: Mapping[str, float], waited_s: float, step_s: float
  ) -> None:
    """Writes the metrics record of a step."""
    state, counts = self._queue.state(), self._pool.counts()
    engine = self._roles.scheduler.stats()
    accepted = drafting.acceptance(engine, self._engine)
    self._engine = engine
    counters = self._roles.gateway.counters()
    forks = sum(n for name, n in counters.items() if name.startswith('forks_total'))
    # A session's first request is counted as a fork too.
    forks -= counters.get('forks_total{reason="first"}', 0)
    overrides = sum(n for name, n in counters.items() if name.startswith('overrides'))
    rl = self._rl
    share = step / rl.steps
    if rl.seconds:
      share = max(share, self._used_s / rl.seconds)
    if rl.max_items:
      share = max(share, state.head / rl.max_items)
    self._metrics.write(
      'rl',
      step,
      scalars,
      **{
        'rollouts_per_s': self._groups.pop_ended() / step_s,
        'wait_s': waited_s,
        'step_s': step_s,
        'used_s': self._used_s,
        'window/occupancy': state.in_window / (state.window or state.capacity),
        'worst_family_success': min(self._groups.curriculum.success().values()),
        'pool/pending': state.pending,
        'pool/completed': state.completed,
        'pool/taken': counts['taken'],
        'pool/failed': counts['failed'],
        'pool/pruned_completions': self._pruned,
        'pool/missed_syncs': counts['missed_syncs'],
        'pool/late_completions': counts['late_completions'],
        'pool/late_trajectories': counts['late_trajectories'],
        'pool/reissued': self._groups.reissued,
        'engine/tokens_per_s': engine['tokens_per_s'],
        'engine/queue_length': engine['queue_length'],
        'engine/active_slots': engine['active_slots'],
        'engine/version': engine.get('policy_version'),
        'engine/update_pause_s': engine.get('update_pause_s', 0.0),
        **{f'weights/{name}': engine[name] for name in _PUBLISHED if name in engine},
        **{f'engine/acceptance/{i}': share for i, share in accepted.items()},
        'gateway/forks': forks,
        'gateway/overrides': overrides,
        **self._samples.pop(state.head),
        'memory/rss_bytes': metrics_lib.rss_bytes(),
        'disk/free_bytes': self._metrics.free_bytes(),
        'checkpoint/save_s': self._save_s,
        'progress': min(share, 1.0),
      },
    )
    self._save_s = None
