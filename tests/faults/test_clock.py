"""The wall clock jumps by an hour: leases, deadlines, sessions and records do not mind.

What is measured is measured by the monotonic clock of one process; the wall clock is
only shown.
"""

from __future__ import annotations

import time
import types

import httpx
import pytest

from m2jax.gateway import session_api
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.gateway.session_api import RemoteSessions
from m2jax.observe import metrics
from m2jax.pool.data_pool import DataPool
from m2jax.records import WorkItem
from tests.forge.roles.test_agents import config, groups, pool, start, wait_until
from tests.gateway.scripted_engine import ScriptedEngine
from tests.pool.test_data_pool import completion, trajectory

__all__ = ['config', 'groups', 'pool', 'start']
HOUR_S = 3600.0


@pytest.fixture(params=[HOUR_S, -HOUR_S], ids=['forward', 'back'])
def jump(request, monkeypatch):
  """jump(): the wall clock of everything jumps."""
  real = time.time

  def jump():
    monkeypatch.setattr(time, 'time', lambda: real() + request.param)

  return jump


def test_leases_and_deadlines(groups, start, jump):
  """No group is lost, none is reissued, no item's deadline comes."""
  side = start(lease_s=0.2)
  side.worker.step(0.01)
  jump()
  attempts = groups._attempts
  for index in range(3):
    before = attempts._seen
    wait_until(lambda b=before: {*attempts._seen.items()} - {*b.items()})  # heartbeats
    side.runner.end(index)
    wait_until(lambda n=index + 1: groups.queue.state().completed == n, side)
  assert (groups.reissued, side.worker.lost, side.worker.reported) == (0, 0, 3)


def test_pruning_spares_what_still_runs(tmp_path, jump):
  """Not the tokens of an episode that seems to have begun an hour ago: its group may
  complete, and is trained."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    pool.submit(WorkItem(0, 'task', 1))
    key = f'{WorkItem(0, "task", 1).session_prefix}-x'
    pool.add_completion(completion(key, started_s=time.time()))
    pool.add_completion(completion('lost', started_s=time.time() - 2 * HOUR_S))
    jump()
    pool.prune(pool.ledger(), abandoned_s=HOUR_S / 2)
    pool.add_trajectory(trajectory(key, 0))
    pool.complete(0)
    ((_, (kept,)),) = pool.group(0)
    assert kept.response_ids.tolist() == [4, 5]


def test_sessions(tok, jump, monkeypatch):
  """Neither closed early nor kept for ever."""
  passed_s = 0.0
  clock = types.SimpleNamespace(
    monotonic=lambda: time.monotonic() + passed_s, time=lambda: time.time()
  )
  monkeypatch.setattr(session_api, 'time', clock)
  engine = ScriptedEngine(lambda request: tok.encode('yes[e~['))
  remote = RemoteSessions('secret', max_age_s=600.0)
  with Gateway(GatewayConfig(), tok, engine, lambda c: None, remote) as gateway:
    url = f'{gateway.base_url}/sessions'

    def open_session(key):
      headers = {'authorization': 'Bearer secret'}
      assert httpx.post(url, json={'key': key}, headers=headers).status_code == 201

    open_session('first')
    jump()
    open_session('second')
    assert len(gateway.sessions) == 2
    passed_s = 600.0
    open_session('third')
    assert len(gateway.sessions) == 1
  engine.close()


def test_metrics(tmp_path, jump):
  """Records stay in the order in which they were written."""
  with metrics.MetricsWriter(tmp_path, use_tensorboard=False) as writer:
    writer.write('eval', 0, n=0)
    jump()
    writer.write('eval', 1, n=1)
  with metrics.MetricsWriter(tmp_path, use_tensorboard=False) as writer:
    writer.supersede('eval', 0)
    writer.write('eval', 1, n=2)
  assert [r['n'] for r in metrics.read(tmp_path)] == [0, 2]
