"""The RL loop under faults: real queue, pool, gateway, agents, sandbox and checkpoints.

The engine is scripted and the learner only counts: what is tested is what the loop does
when groups fail, hang, or have nothing to train.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import threading
import time

import numpy as np
import pytest

from m2jax import config as model_config
from m2jax import records, sandbox
from m2jax.agents import episodes, whitebox
from m2jax.checkpoint.manager import CheckpointManager
from m2jax.forge import groups, rl_loop
from m2jax.forge.config import RlConfig
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles import in_process
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.observe import metrics as metrics_lib
from m2jax.pool import data_pool
from m2jax.rl import agreement, rewards
from m2jax.train import stopping
from m2jax.train.step import NotFinite
from tests.forge import forge_worker
from tests.gateway.conftest import response_text
from tests.gateway.scripted_engine import ScriptedEngine
from tests.waiting import wait_until

AGENT = whitebox.WhiteboxConfig(max_tokens=60, retries=1, retry_delay_s=0.01)


class Engine(ScriptedEngine):
  """A scripted engine that takes weights, and fails while `broken`."""

  broken = False

  def submit(self, request, on_tokens=None):
    if self.broken:
      raise RuntimeError('no device')
    return super().submit(request, on_tokens)

  def update_weights(self, variables, version):
    assert version > self.version
    self.version = version

  def stats(self):
    zeros = dict.fromkeys(('tokens_per_s', 'queue_length', 'active_slots'), 0)
    return {**super().stats(), **zeros}


class Learner:
  """Counts updates: its weights are how often each item was trained.

  `credit` is the real one unless `useful` selects the items with an advantage. While
  `broken` its updates are skipped.
  """

  broken = False

  def __init__(self, useful=None, items=1000):
    self.state = {'step': np.int32(0), 'trained': np.zeros(items)}
    self.lineages = records.Lineages()
    self.updates = []  # of each: the items taken
    self.passes = set()
    self.lags = []
    self._useful = useful

  @property
  def version(self):
    return int(self.state['step'])

  def variables(self):
    return self.state['trained'].copy()

  def credit(self, group):
    credit = rewards.advantages(group, rewards.RewardConfig())
    if self._useful is not None:
      useful = self._useful(group[0][0].item)
      dropped = '' if useful else 'zero_advantage'
      credit = dataclasses.replace(credit, dropped=dropped)
    return credit

  def update(self, credits_, passes=1):
    self.passes.add(passes)
    for credit in credits_:
      for c in itertools.chain.from_iterable(x.completions for x in credit.credits):
        between = self.lineages.updates_between(c.lineage, c.versions, self.version)
        self.lags.append((c.lineage, c.versions, between.tolist()))
    items = [g.credits[0].trajectory.item for g in credits_]
    self.updates.append(items)
    trained = self.state['trained'].copy()
    np.add.at(trained, items, 1)
    self.state = {'step': np.int32(self.version + 1), 'trained': trained}
    return {'loss': 0.0, 'skipped': float(self.broken) * passes}


class Run:
  """One process lifetime of a loop; `config` are fields of RlConfig."""

  def __init__(self, directory, tok, learner=None, agent=AGENT, **config):
    base = forge_worker.config()
    fields = dict(steps=4, seconds=0.0, max_items=0, groups_per_step=2, group_size=2)
    fields |= dict(capacity=4, window=None, checkpoint_every=2, refill_factor=1.0)
    fields |= dict(dev_every=0)
    rl = dataclasses.replace(base.rl, **fields | config)
    assert isinstance(rl, RlConfig)
    self.config = dataclasses.replace(base, rl=rl, model=model_config.tiny())
    self.directory, self.tok, self.agent = directory, tok, agent
    self.learner = learner or Learner()
    self.answers = itertools.cycle([response_text('so', 'no'), 'never mind[e~['])

  def __enter__(self):
    self._stack = stack = contextlib.ExitStack()
    url = f'sqlite:///{self.directory}/pool.db'
    self.pool = stack.enter_context(data_pool.DataPool(url))
    self.metrics = stack.enter_context(
      metrics_lib.MetricsWriter(self.directory, use_tensorboard=False)
    )
    self.engine = Engine(lambda request: self.tok.encode(next(self.answers)))
    stack.callback(self.engine.close)
    record = self.pool.add_completion
    self.gateway = gateway = Gateway(GatewayConfig(), self.tok, self.engine, record)
    stack.enter_context(gateway)
    runner = episodes.Runner(
      episodes.EpisodeConfig(agent=self.agent, concurrency=8),
      gateway.base_url,
      gateway.sessions,
    )
    stack.enter_context(runner)
    self.manager = stack.enter_context(CheckpointManager(self.directory / 'rl', keep=2))
    loop = rl_loop.RlLoop(
      self.config,
      in_process.Rollouts(self.config, self.pool, self.engine, gateway, runner),
      self.learner,
      self.manager,
      self.metrics,
      files={},
    )
    self.loop = stack.enter_context(loop)
    self.loop.resume()
    return self

  def __exit__(self, *exc):
    self._stack.close()


class Sandboxes:
  """`sandbox.create`, failing until `until_s`; counts the calls."""

  def __init__(self, monkeypatch):
    self.until_s, self.hang, self.calls = 0.0, set(), 0
    self._create = sandbox.create
    monkeypatch.setattr(sandbox, 'create', self)

  async def __call__(self, **options):
    self.calls += 1
    if self.calls in self.hang:
      await asyncio.Event().wait()
    if time.monotonic() < self.until_s:
      raise sandbox.SandboxError('no space left on device')
    return await self._create(**options)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  """A tenth of the product's pauses: an outage of a second is one of ten."""
  for name in ('_POLL_S', '_SHORTEST_PAUSE_S', '_LONGEST_PAUSE_S'):
    monkeypatch.setattr(groups, name, getattr(groups, name) / 10)


def in_thread(run):
  """`run.loop.run` in a thread: (thread, list that gets what it raised)."""
  raised = []

  def target():
    try:
      run.loop.run()
    except Exception as error:
      raised.append(error)

  thread = threading.Thread(target=target)
  thread.start()
  return thread, raised


def test_a_sandbox_that_fails_for_a_while(tmp_path, tok, monkeypatch):
  """The groups of the time fail, are counted, and are replaced at a rate that does
  not exhaust the limit; then the run continues to its end."""
  boxes = Sandboxes(monkeypatch)
  boxes.until_s = float('inf')
  with Run(tmp_path, tok, max_failed_groups=24) as run:
    thread, raised = in_thread(run)
    wait_until(lambda: len(run.pool.failures()) >= 4 or raised)
    boxes.until_s = time.monotonic() + 1
    thread.join(60)
    assert not raised and run.learner.version == 4
    failures = run.pool.failures()
    assert 4 <= len(failures) < 24
    assert all('no space left on device' in reason for reason in failures.values())
    trained = [i for items in run.learner.updates for i in items]
    assert len(trained) == len(set(trained)) == 8 and not set(trained) & set(failures)
  last = metrics_lib.read(tmp_path, 'rl')[-1]
  assert last['pool/failed'] == len(failures)


def test_a_sandbox_that_never_works(tmp_path, tok, monkeypatch):
  """The run stops with the sandbox's own reason, what to do, and nothing trained."""
  boxes = Sandboxes(monkeypatch)
  boxes.until_s = float('inf')
  with Run(tmp_path, tok, max_failed_groups=6) as run:
    with pytest.raises(RolloutsFailed) as error:
      run.loop.run()
    for part in (
      ' rollout groups',
      'max_failed_groups is 6',
      'no space left on device',
    ):
      assert part in str(error.value)
    assert run.learner.updates == [] and len(run.pool.failures()) >= 6


def test_the_budget_is_checked_while_waiting(tmp_path, tok, monkeypatch):
  """A run of half a second ends then, though no group ever completes."""
  boxes = Sandboxes(monkeypatch)
  boxes.until_s = float('inf')
  started_s = time.monotonic()
  with Run(tmp_path, tok, max_failed_groups=1000, seconds=0.5) as run:
    run.loop.run()
    assert run.learner.version == 0
  assert 0.5 <= time.monotonic() - started_s < 30.0


@pytest.mark.parametrize('dev_every', [0, 1])
def test_an_engine_outage(tmp_path, tok, dev_every):
  """Requests that the engine rejects for a while fail only their groups and the
  development evaluations meanwhile; an engine that has stopped permanently ends the run
  with its error."""
  options = dict(max_failed_groups=24, dev_every=dev_every, dev_tasks=2)
  with Run(tmp_path, tok, steps=1000, **options) as run:
    thread, raised = in_thread(run)
    wait_until(lambda: run.learner.version >= 2)
    run.engine.broken = True
    wait_until(lambda: len(run.pool.failures()) >= 6)
    run.engine.broken = False
    before = run.learner.version
    wait_until(lambda: run.learner.version >= before + 3 or raised)
    assert not raised
    run.engine.alive = False
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert 'engine has stopped' in str(raised[0])
    assert run.manager.latest_step() == run.learner.version  # what was learned stays
    assert any('HTTP 503' in reason for reason in run.pool.failures().values())


def test_an_engine_that_disagrees(tmp_path, tok, caplog):
  """With the learner, about the same weights: an error in the log, or of the run. Not
  where the engine reuses keys of older weights, on purpose."""
  learner = Learner()
  update = learner.update
  learner.update = lambda *args: update(*args) | {'mismatch/mean': 2e-3}
  with Run(tmp_path, tok, learner, fail_on_mismatch=True) as run:
    with pytest.raises(agreement.Disagreement, match='step 1: mismatch/mean is 0.002'):
      run.loop.run()
    run.loop._rl = dataclasses.replace(run.loop._rl, fail_on_mismatch=False, steps=2)
    run.loop.run()
    assert 'step 2: mismatch/mean is 0.002 nats' in caplog.text
    stale = dataclasses.replace(run.config.scheduler, reuse_stale_prefix=True)
    run.loop._config = dataclasses.replace(run.config, scheduler=stale)
    run.loop._rl = dataclasses.replace(run.loop._rl, fail_on_mismatch=True, steps=3)
    run.loop.run()
    assert learner.version == 3


def test_hanging_groups_meet_their_deadline(tmp_path, tok, monkeypatch):
  """Sandboxes that never open block neither a strict window nor the machine: their
  items fail in pool and queue with the deadline as reason and their episodes are
  cancelled, while later ones are trained."""
  boxes = Sandboxes(monkeypatch)
  boxes.hang = {1, 2, 5}
  with Run(tmp_path, tok, window=1, item_deadline_s=2.0) as run:
    run.loop.run()
    assert run.learner.version == 4
    failures = run.pool.failures()
    assert 1 <= len(failures) <= 3 and 0 in failures
    assert set(failures.values()) == {'not complete after 2 s'}
    wait_until(lambda: not set(failures) & run.loop._groups._attempts.futures.keys())
    trained = [i for items in run.learner.updates for i in items]
    assert trained == sorted(set(range(len(trained) + len(failures))) - set(failures))


def test_groups_without_advantage_are_replaced(tmp_path, tok):
  """Dynamic sampling: an update takes items until two groups are useful, at most six.
  Dropped items count as taken: the finite queue is drained with no item twice."""
  learner = Learner(useful=lambda item: item % 3 == 0 and item < 12)
  config = dict(max_items=20, refill_factor=3.0, window=1, updates_per_batch=2)
  with Run(tmp_path, tok, learner, steps=100, **config) as run:
    run.loop.run()
    assert learner.passes == {2}
    assert learner.updates == [
      [0, 1, 2, 3],
      [4, 5, 6, 7, 8, 9],
      [10, 11, 12, 13, 14, 15],
      [16, 17, 18, 19],
    ]
    assert run.pool.counts()['taken'] == 20
    assert run.manager.restore().host['ledger']['head'] == 20
  refilled = [r['groups_refilled'] for r in metrics_lib.read(tmp_path, 'rl')]
  assert refilled == [2, 4, 4, 2]


def test_time_is_up_in_the_middle_of_a_step(tmp_path, tok, monkeypatch):
  """Items taken for a step that is never trained are not in the ledger: with more time
  the run takes them again, and every item of the queue is trained once. The queue is
  strict, so that no faster group is taken before the two useful ones."""
  boxes = Sandboxes(monkeypatch)
  boxes.hang = set(range(13, 1000))  # after six groups
  config = dict(steps=100, max_items=12, refill_factor=3.0, capacity=8, window=1)
  first = Learner(useful=lambda item: item < 2)
  with Run(tmp_path, tok, first, seconds=600.0, **config) as run:
    thread, raised = in_thread(run)
    wait_until(lambda: run.pool.counts()['taken'] > 2 or raised)
    run.loop._started_s -= 600.0
    thread.join(60)
    assert not raised and first.updates == [[0, 1]]
    assert 2 < run.pool.counts()['taken'] <= 6
  boxes.hang = set()
  second = Learner()
  with Run(tmp_path, tok, second, seconds=6000.0, **config) as run:
    assert second.version == 1 and run.pool.counts()['taken'] == 2
    run.loop.run()
    trained = [i for items in first.updates + second.updates for i in items]
    assert sorted(trained) == list(range(12)) and not run.pool.failures()


def test_a_run_is_pruned_to_its_oldest_checkpoint(tmp_path, tok):
  """Token ids that no checkpoint on disk can need are deleted, also after a restart;
  those that the older of two checkpoints would train again, and the report's turns, are
  retained."""
  for steps in (7, 15):
    with Run(tmp_path, tok, steps=steps) as run:
      run.loop.run()
      oldest = min(run.manager.steps())
      assert len(run.manager.steps()) == 2 and oldest < steps
      ledger = data_pool.Ledger.from_dict(run.manager.read_host(oldest)[0]['ledger'])
      run.loop._prune()  # the saves were still being written when the last began
      by_need = collections.Counter()
      for item in run.pool.items('taken'):
        (trajectory, completions), *_ = run.pool.group(item.index)
        needed = not ledger.trained(item.index)
        assert bool(completions) == needed, (item, ledger)
        turns = run.pool.turns(trajectory.session)
        assert turns and all(t.advantage is not None for t in turns)
        by_need[needed] += 1
      assert min(by_need.values()) >= 2
      assert run.pool.sample_trajectories(99)
  assert metrics_lib.read(tmp_path, 'rl')[-1]['pool/pruned_completions'] > 0


def test_sigterm_saves_at_the_step_boundary(tmp_path, tok, monkeypatch):
  """In an update or while it waits for rollouts, a request to stop ends the run with
  its last update saved; the next process trains every item once."""
  monkeypatch.setattr(stopping, '_requested', False)
  learner = Learner()
  update = learner.update

  def asked(*args):
    stopping.on_signal(15, None)
    return update(*args)

  config = dict(steps=3, checkpoint_every=100)
  with Run(tmp_path, tok, learner, **config) as run:
    learner.update = asked
    with pytest.raises(KeyboardInterrupt):
      run.loop.run()
    assert run.manager.latest_step() == learner.version == 1
  with Run(tmp_path, tok, Learner(), **config) as run:
    assert run.learner.version == 1
    with pytest.raises(KeyboardInterrupt):  # asked before anything is taken
      run.loop.run()
    assert run.learner.version == 1
  stopping.forget()
  with Run(tmp_path, tok, Learner(), **config) as run:
    run.loop.run()
    trained = run.learner.state['trained']
    assert trained.max() == 1 and trained.sum() == run.pool.counts()['taken'] == 6


def test_updates_that_are_not_finite(tmp_path, tok):
  """Up to a number in a row they are skipped; one more ends the run with a checkpoint
  of all of them, and the next process goes on behind them."""
  learner = Learner()
  learner.broken = True
  config = dict(steps=5, checkpoint_every=100, max_skipped=1)
  with (
    Run(tmp_path, tok, learner, **config) as run,
    pytest.raises(NotFinite, match='rl step 2: .* max_skipped=1'),
  ):
    run.loop.run()
  with Run(tmp_path, tok, Learner(), **config) as run:
    assert run.learner.version == 2
    run.loop.run()
    assert run.learner.version == 5 and run.learner.state['trained'].max() == 1


def test_permanent_checkpoints_do_not_hold_the_pool(tmp_path, tok):
  """Those of `keep_every_steps` are never deleted, and no restart begins from them."""
  with Run(tmp_path, tok, steps=9) as run:
    steps, run.manager.steps = run.manager.steps, lambda: sorted({2, *steps()})
    run.loop.run()
    run.loop._prune()
    assert min(run.loop._ledgers) == steps()[-2] > 2


def test_lag_and_age_over_a_restart(tmp_path, tok):
  """A process trains to step 4, and its successor restarts from step 2: groups sampled
  by the lost weights are trained with the correct lag, ages count items taken before
  the restart, and the final weights were trained on each item once."""

  class Lost(Exception):
    pass

  learner = Learner()
  with Run(tmp_path, tok, learner, steps=9, capacity=8, checkpoint_every=2) as run:
    save = run.loop._save

    def save_once(step):
      if step > 2:
        raise Lost  # as if killed before it could save
      save(step)

    run.loop._save = save_once
    update = learner.update

    def slow_update(*args):
      # groups of every version are complete before the next one begins
      wait_until(lambda: run.loop._queue.state().pending == 0)
      return update(*args)

    learner.update = slow_update
    with pytest.raises(Lost):
      run.loop.run()
    assert learner.version == 4
    run.manager.wait()
  learner = Learner()
  with Run(tmp_path, tok, learner, steps=12, capacity=8) as run:
    assert learner.version == 2 and learner.lineages.branches == ((-1, 0), (0, 2))
    run.loop.run()
    trained = learner.state['trained']
    assert trained.max() == 1 and trained.sum() == run.pool.counts()['taken'] == 24
  seen, lags = set(), iter(learner.lags)
  for present, items in enumerate(learner.updates, start=2):
    for lineage, versions, got in itertools.islice(lags, 2 * len(items)):
      for version, lag in zip(versions, got, strict=True):
        common = min(version, 2) if lineage == 0 else version
        assert lag == present - common + version - common
        seen.add((lineage, version > common))
  # sampled by weights of both, of the present ones' past, and by lost ones
  assert seen == {(0, False), (0, True), (1, False)}
  (third,) = (r for r in metrics_lib.read(tmp_path, 'rl') if r['step'] == 3)
  # submitted before the first step, and taken when the first two had taken four
  assert third['window/age_items_max'] >= 4
