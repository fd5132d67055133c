"""An agents' process and the learner's view of it, with episodes that are made up."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import re
import threading
import time

import pytest

from m2jax import records, tasks
from m2jax.forge import groups as groups_lib
from m2jax.forge.errors import RolloutsFailed
from m2jax.forge.roles import agents, in_process
from m2jax.pool import leases
from m2jax.pool.data_pool import DataPool
from tests import waiting
from tests.forge import forge_worker


class Runner:
  """Groups end when the test says how: `end(index, …)`."""

  def __init__(self):
    self.running: dict[int, tuple] = {}
    self.attempts: list[tuple[int, str]] = []

  def group(self, spec, count, *, item, prefix, on_end):
    future = concurrent.futures.Future()
    self.running[item] = spec, count, prefix, on_end, future
    self.attempts.append((item, prefix))
    return future

  def end(self, index, end_reason='answer', error=None, ranks=None):
    spec, count, prefix, on_end, future = self.running.pop(index)
    out = []
    for rank in range(count if ranks is None else ranks):
      out.append(
        records.Trajectory(
          *(f'{prefix}-{rank}', index, rank, spec, 'family', end_reason, 1.0, 0.1, 1),
          error='no gateway' if end_reason == 'infrastructure' else '',
        )
      )
      on_end(out[-1])
    if error is None:
      future.set_result(out)
    else:
      future.set_exception(error)


@dataclasses.dataclass
class Side:
  """The agents' side: what a test of `Worker` needs."""

  pool: DataPool
  runner: Runner
  worker: agents.Worker


class Scheduler:
  alive, stopped_reason = True, None


class Clock:
  """The learner's, by which leases end; it can be moved forward."""

  def __init__(self):
    self.ahead_s = 0.0

  def monotonic(self):
    return time.monotonic() + self.ahead_s


@pytest.fixture(autouse=True)
def clock(monkeypatch):
  clock = Clock()
  monkeypatch.setattr(groups_lib, 'time', clock)
  return clock


@pytest.fixture
def config():
  base = forge_worker.config()
  rl = dataclasses.replace(base.rl, max_items=3, capacity=8, window=None)
  fast = dataclasses.replace(base.roles, lease_s=4.0, poll_s=0.02)
  return dataclasses.replace(base, rl=rl, roles=fast)


@pytest.fixture
def pool(tmp_path):
  with DataPool(f'sqlite:///{tmp_path}/pool.db', linger_s=0.01) as pool:
    yield pool


@pytest.fixture
def groups(pool, config):
  """The learner's side: three items, submitted."""
  running = in_process.Rollouts(config, pool, Scheduler(), None, None, leased=True)
  groups = groups_lib.Groups(config, running)
  with contextlib.closing(groups):
    groups.queue.resume(None)
    groups.fill()
    yield groups


@pytest.fixture
def start(pool, config, tmp_path):
  """start(**Worker options): another agents' process, with a pool of its own.

  A sign of life comes every `lease_s` / 4, by default that of the config."""
  with contextlib.ExitStack() as stack:

    def make(lease_s=config.roles.lease_s, **options):
      url = f'sqlite:///{tmp_path}/pool.db'
      mine = stack.enter_context(DataPool(url, linger_s=0.01))
      runner = Runner()
      options = dict(concurrency=100) | options
      settings = dataclasses.replace(config.roles, lease_s=lease_s)
      worker = agents.Worker(mine, runner, settings, **options)
      stack.callback(worker.close)
      return Side(mine, runner, worker)

    yield make


def wait_until(condition, side=None):
  """Meanwhile `side`, if there is one, works."""
  step = side.worker.step if side else lambda timeout_s: None
  waiting.wait_until(lambda: condition() or step(0.01))


def test_groups_from_claim_to_completion(groups, start, pool):
  side = start()
  side.worker.step(0.01)
  assert sorted(side.runner.running) == [0, 1, 2]
  assert side.runner.attempts[1] == (1, 'rl-1-0')
  for index in (2, 0, 1):
    side.runner.end(index)
  wait_until(lambda: groups.queue.state().completed == 3, side)
  assert side.worker.reported == 3 and groups.pop_ended() == 6
  assert [t.index for t in groups.queue.take(3, 1, 1.0)] == [0, 1, 2]
  family = next(iter(tasks.families(groups._tasks)))
  assert family in groups.curriculum.success()


def test_a_completed_group_has_been_counted(groups, start, monkeypatch):
  """Who takes the item finds the outcome of its episodes in the curriculum."""
  side = start()
  complete, ended = groups.queue.complete, []

  def counted(index):
    ended.append(groups.pop_ended())
    return complete(index)

  monkeypatch.setattr(groups.queue, 'complete', counted)
  side.worker.step(0.01)
  for index in (2, 0, 1):
    side.runner.end(index)
  wait_until(lambda: groups.queue.state().completed == 3, side)
  assert ended == [2, 2, 2]


def test_as_many_as_there_is_room_for_and_while_the_gateway_serves(groups, start):
  serves = []
  side = start(concurrency=3, ready=lambda: bool(serves))
  side.worker.step(0.01)
  assert not side.runner.running
  serves.append(True)
  side.worker.step(0.01)
  assert sorted(side.runner.running) == [0, 1]  # of two episodes each
  other = start()
  other.worker.step(0.01)
  assert sorted(other.runner.running) == [2]


def test_an_infrastructure_failure_is_run_again(groups, start, pool):
  """By the next claimant; a bug in the agent fails the item, with its reason."""
  side = start()
  side.worker.step(0.01)
  side.runner.end(0, 'infrastructure')
  side.runner.end(1, error=RuntimeError('a bug'), ranks=1)
  wait_until(lambda: (0, 'rl-0-1') in side.runner.attempts, side)
  wait_until(lambda: pool.failures(), side)
  wait_until(lambda: groups.reissued == 1)
  assert 'a bug' in pool.failures()[1]
  side.runner.end(0)
  wait_until(lambda: groups.queue.state().completed == 1, side)
  assert [t.session for t, _ in pool.group(0)] == ['rl-0-1-0', 'rl-0-1-1']


def test_agents_that_only_fail_end_the_run(groups, start, pool, monkeypatch):
  """As in one process: repeated after pauses, and the run ends with the reason after
  `max_failed_groups` in a row, long before the items' deadline. Agents that are stopped
  count for nothing."""
  for name in ('_SHORTEST_PAUSE_S', '_LONGEST_PAUSE_S'):
    monkeypatch.setattr(groups_lib, name, 0.05)
  for name in ('_AGAIN_PAUSE_S', '_POLL_S'):
    monkeypatch.setattr(groups_lib, name, 0.01)
  groups._rl = dataclasses.replace(groups._rl, max_failed_groups=6)
  stopped = start()
  stopped.worker.step(0.01)
  stopped.worker.close()
  side, raised = start(), []

  def learn():
    try:
      groups.take(1, 1, lambda: False)
    except RolloutsFailed as error:
      raised.append(str(error))

  learner = threading.Thread(target=learn)
  learner.start()
  wait_until(lambda: len(side.runner.running) == 3, side)
  assert groups.queue.failed_in_a_row == 0

  def fail_all():
    for index in list(side.runner.running):
      side.runner.end(index, 'infrastructure')
    return raised

  wait_until(fail_all, side)
  learner.join()
  # Or more, which failed before the learner looked.
  assert re.search('[6-9] rollout groups failed in a row.* no gateway', raised[0])
  assert not pool.failures()


def test_a_group_in_which_one_episode_was_masked_is_complete(groups, start, pool):
  side = start()
  side.worker.step(0.01)
  spec, count, prefix, on_end, future = side.runner.running.pop(0)
  ends = ('answer', 'infrastructure')
  out = [
    records.Trajectory(f'{prefix}-{rank}', 0, rank, spec, 'f', end, 0.0, 0.1, 1)
    for rank, end in enumerate(ends)
  ]
  for trajectory in out:
    on_end(trajectory)
  future.set_result(out)
  wait_until(lambda: groups.queue.state().completed == 1, side)


def test_agents_that_are_killed(groups, start, config, clock):
  """Their items go to others when the lease has passed, not before; what they still
  report, since only their network was down, is not recorded."""
  lost, other = start(), start()
  lost.worker.step(0.01)  # a claim is the last sign of life
  lost.worker._stopping.set()  # no heartbeats from now on
  wait_until(lambda: len(groups._attempts._seen) == 3)
  clock.ahead_s = 0.9 * config.roles.lease_s
  seen = groups._attempts._seen
  wait_until(lambda: groups._attempts._seen is not seen)
  assert not groups.reissued
  clock.ahead_s = config.roles.lease_s
  wait_until(lambda: len(other.runner.running) == 3, other)
  wait_until(lambda: groups.reissued == 3)
  for index in range(3):
    lost.runner.end(index)
    other.runner.end(index)
  wait_until(lambda: lost.worker.lost == 3, lost)
  wait_until(lambda: groups.queue.state().completed == 3, other)
  assert other.worker.reported == 3 and lost.worker.reported == 0
  sessions = [t.session for t, _ in groups._roles.pool.group(1)]
  assert sessions == ['rl-1-1-0', 'rl-1-1-1']


def test_agents_that_live_keep_their_leases(groups, start, clock):
  side = start(lease_s=0.1)
  side.worker.step(0.01)
  wait_until(lambda: len(groups._attempts._seen) == 3)
  for _ in range(3):
    before = {index: lease for index, (lease, _) in groups._attempts._seen.items()}
    clock.ahead_s += 2.0  # half a lease
    wait_until(lambda b=before: all(groups._attempts._seen[i][0] != b[i] for i in b))
  assert groups.reissued == 0 and len(side.runner.running) == 3


def test_a_lease_that_is_lost_cancels_its_group(groups, start):
  side = start()
  side.worker.step(0.01)
  groups.queue.fail(0, 'its deadline')
  future = side.runner.running[0][-1]
  wait_until(lambda: side.worker.lost == 1, side)
  assert future.cancelled()


def test_agents_that_are_stopped_give_their_items_back(groups, start, pool):
  """At once, not when the lease has passed."""
  side, other = start(), start()
  side.worker.step(0.01)
  side.worker.close()
  assert all(x.report.startswith(leases.AGAIN) for x in pool.open_leases())
  wait_until(lambda: len(other.runner.running) == 3, other)


def test_a_learner_that_restarts(groups, start, pool, config):
  """Groups that ended meanwhile are complete; those that still run are lost."""
  side = start()
  side.worker.step(0.01)
  groups.close()
  side.runner.end(2)
  wait_until(lambda: side.worker.reported == 1, side)
  running = in_process.Rollouts(config, pool, Scheduler(), None, None, leased=True)
  again = groups_lib.Groups(config, running)
  with contextlib.closing(again):
    items = again.queue.resume(None)
    assert [item.index for item in items] == [0, 1]
    again.fill()
    for item in items:
      again.start(item)
    assert again.queue.state().completed == 1
    wait_until(lambda: side.worker.lost == 2, side)
    wait_until(lambda: (1, 'rl-1-1') in side.runner.attempts, side)
