"""Weights from the learner's role to the engine's, and their versions to the pool."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import shutil
import sys
import types

import httpx
import numpy as np
import pytest

from m2jax.checkpoint import published
from m2jax.forge import shared
from m2jax.forge.config import EngineServerConfig, RemoteConfig
from m2jax.forge.remote.engine_client import RemoteScheduler
from m2jax.forge.remote.engine_server import EngineServer
from m2jax.forge.roles import engine as engine_role
from m2jax.forge.roles import gateway as gateway_role
from m2jax.forge.roles.learner import PublishedWeights
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.pool.data_pool import DataPool
from m2jax.pool.work_queue import WorkQueue
from m2jax.records import policy_version
from m2jax.rollout.engine.config import EngineConfig
from tests.forge import forge_worker
from tests.forge.roles.test_agents import wait_until
from tests.gateway.conftest import response_text
from tests.gateway.scripted_engine import ScriptedEngine

LIKE = {'params': {'w': np.zeros(3, np.float32)}}


def weights(value):
  return {'params': {'w': np.full(3, value, np.float32)}}


class Scheduler:
  """Keeps what it is given."""

  def __init__(self):
    self.versions = []

  def update_weights(self, variables, version):
    assert not self.versions or version > self.versions[-1][0]
    self.versions.append((version, float(variables['params']['w'][0])))


@pytest.fixture
def learner(tmp_path):
  """learner(lineage, health=…): a PublishedWeights as after a start."""
  with contextlib.ExitStack() as stack:

    def start(lineage, health=lambda: (True, {})):
      publisher = stack.enter_context(published.Publisher(tmp_path / 'weights'))
      latest = published.Reader(tmp_path / 'weights').latest()
      gateway = types.SimpleNamespace(health=health)
      pool = types.SimpleNamespace(begun_lineage=lineage)
      return PublishedWeights(publisher, latest, gateway, pool)

    yield start


def test_an_engine_follows_restarts_of_the_learner(learner, tmp_path):
  """Weights that a restart passes through are not served; those that it restores are,
  in their new lineage, though their step is lower."""
  reader = published.Reader(tmp_path / 'weights', poll_s=0.01)
  first = learner(0)
  for step in (-1, 0, 1, 2):
    first.update_weights(weights(step), step)
  version, variables = engine_role.load_first(reader, LIKE)
  assert version[1:] == (0, 2) and variables['params']['w'][0] == 2
  scheduler = Scheduler()
  with engine_role.Follower(reader, version, scheduler, LIKE) as follower:
    second = learner(0)
    second.update_weights(weights(-1), -1)  # random ones, then those of SFT
    second.update_weights(weights(0), 0)
    second._pool.begun_lineage = 1
    second.update_weights(weights(1), 1)
    wait_until(lambda: len(scheduler.versions) == 1)
    second.update_weights(weights(2.5), 2)
    wait_until(lambda: len(scheduler.versions) == 2)
    assert follower.error is None
  numbers = [policy_version(1, 1), policy_version(1, 2)]
  assert scheduler.versions == list(zip(numbers, (1.0, 2.5), strict=True))


def test_storage_that_is_away_for_a_moment(learner, tmp_path, monkeypatch):
  """The engine serves on, and follows when it is back."""
  monkeypatch.setattr(engine_role, '_POLL_S', 0.01)
  reader = published.Reader(tmp_path / 'weights', poll_s=0.01)
  first, load, failures = learner(0), reader.load, [OSError('stale file handle')] * 3
  first.update_weights(weights(0), 0)
  version, _ = engine_role.load_first(reader, LIKE)

  def fails(*arguments):
    if failures:
      raise failures.pop()
    return load(*arguments)

  monkeypatch.setattr(reader, 'load', fails)
  scheduler = Scheduler()
  with engine_role.Follower(reader, version, scheduler, LIKE) as follower:
    first.update_weights(weights(1), 1)
    wait_until(lambda: scheduler.versions)
    assert follower.error is None
  assert scheduler.versions == [(policy_version(0, 1), 1.0)] and not failures


def test_storage_that_is_away_at_the_start(learner, tmp_path, monkeypatch):
  """A role waits for it as it does for the learner."""
  monkeypatch.setattr(engine_role, '_POLL_S', 0.01)
  reader = published.Reader(tmp_path / 'weights', poll_s=0.01)
  learner(0).update_weights(weights(3), 0)
  failures = {'latest': [OSError('stale file handle')] * 3, 'load': [OSError('gone')]}

  def failing(name, call):
    def method(*arguments):
      if failures[name]:
        raise failures[name].pop()
      return call(*arguments)

    return method

  for name in failures:
    monkeypatch.setattr(reader, name, failing(name, getattr(reader, name)))
  version, variables = engine_role.load_first(reader, LIKE)
  assert version.step == 0 and variables['params']['w'][0] == 3
  assert failures == {'latest': [], 'load': []}


def test_a_run_that_is_started_anew(learner, tmp_path):
  """The engine of the deleted run stops, with what to do."""
  reader = published.Reader(tmp_path / 'weights', poll_s=0.01)
  learner(0).update_weights(weights(0), 0)
  version = reader.latest()._replace(serial=9)
  with engine_role.Follower(reader, version, Scheduler(), LIKE) as follower:
    wait_until(lambda: follower.error is not None)
  assert 'start this role again' in str(follower.error)


def test_bytes_of_published_weights(learner, tmp_path):
  """What RL's records have: bytes of the files, of the last version only."""
  weights_ = learner(0)
  assert 'published_bytes' not in weights_.stats()
  weights_.update_weights(weights(0), 0)
  first = weights_.stats()
  assert first['published_bytes'] == 3 * 4 and not first['published_delta_bytes']
  weights_.update_weights(weights(1), 1)
  stats, directory = weights_.stats(), tmp_path / 'weights'
  files = [path for path in (directory / 'whole').rglob('*') if path.is_file()]
  assert first['published_whole_bytes'] == sum(f.stat().st_size for f in files) > 0
  assert stats['published_delta_bytes'] > 0 == stats['published_whole_bytes']
  assert stats['publish_s'] > 0
  weights_.update_weights(weights(1), 1)  # not new
  assert 'published_bytes' not in weights_.stats()


def test_evaluations_wait_for_the_weights(learner):
  """Until the engine serves what was published last; also while it is down."""
  answers = [
    (False, {'error': 'refused'}),
    (True, {}),
    (True, {'policy_version': -1}),
    (True, {'policy_version': 0}),
    (True, {'policy_version': 5}),
  ]
  published_weights = learner(0, lambda: answers.pop(0))
  published_weights.update_weights(weights(0), 0)
  published_weights.wait_until_served()
  assert answers == [(True, {'policy_version': 5})]
  published_weights._gateway.health = lambda: (False, {'error': 'refused'})
  assert published_weights.stats()['tokens_per_s'] == 0
  assert published_weights.alive


def test_completions_through_both_servers(tok, tmp_path):
  """Agent → gateway → engine over HTTP: in the pool before the answer, with lineage and
  step; a completion of two lineages is an error that a retry cures."""
  engine = ScriptedEngine(lambda r: tok.encode(response_text('so', 'yes')))
  size = EngineConfig(context_tokens=engine.context_tokens, max_top_logprobs=0)
  config = RemoteConfig(poll_s=0.02)
  url = f'sqlite:///{tmp_path}/pool.db'
  with (
    contextlib.closing(engine),
    DataPool(url) as pool,
    EngineServer(EngineServerConfig(), engine, 'secret') as server,
    RemoteScheduler(server.url, tok.vocab_size, size, 'secret', config) as remote,
    Gateway(GatewayConfig(), tok, remote, gateway_role.recorder(pool)) as gateway,
  ):
    gateway.sessions.open('mine')
    body = {'model': 'm2jax', 'messages': [{'role': 'user', 'content': 'hi'}]}

    def chat(**options):
      headers = {'authorization': 'Bearer mine'}
      path = gateway.base_url + '/chat/completions'
      return httpx.post(path, headers=headers, json=body | options, timeout=30)

    engine.version = policy_version(2, 5)
    answer = chat().json()
    assert answer['choices'][0]['message']['content'] == 'yes'
    (stored,) = pool.completions('mine')
    assert stored.id == answer['id'] and stored.lineage == 2
    assert set(stored.versions.tolist()) == {5}
    sample = engine._sample

    def mixed(*args):
      result = sample(*args)
      result.versions[-1] = policy_version(3, 4)
      return result

    engine._sample = mixed
    assert chat().status_code == 500
    engine._sample = sample
    text = [json.loads(x[6:]) for x in chat(stream=True).text.split('\n\n')[:-2] if x]
    deltas = [c['choices'][0]['delta'] for c in text if c['choices']]
    assert ''.join(d.get('content') or '' for d in deltas) == 'yes'
    assert len(pool.completions('mine')) == 2
    wait_until(lambda: remote.alive)
    assert httpx.get(gateway.base_url[:-3] + '/health').status_code == 200
    engine.alive = False
    wait_until(lambda: not remote.alive)
    assert chat().status_code == 503
    assert len(pool.completions('mine')) == 2


def test_the_keys_of_a_run(tmp_path):
  """Independent, made once, for their owner only; an error names a bad file."""
  config = forge_worker.config()
  read = functools.partial(shared.read_key, config, tmp_path)
  shared.make_keys(config, tmp_path)
  keys = [read(name) for name in shared.KEYS]
  assert len({*keys}) == 4 and min(map(len, keys)) >= 32
  shared.make_keys(config, tmp_path)
  assert keys == [read(name) for name in shared.KEYS]
  for path in (tmp_path / 'keys', *(tmp_path / 'keys').iterdir()):
    assert path.stat().st_mode & 0o077 == 0
  (tmp_path / 'keys' / 'view').write_text('')
  with pytest.raises(ValueError, match=r'config.roles.keys_dir: .*keys/view'):
    read('view')


def test_the_pool_of_another_run(tmp_path):
  base = forge_worker.config()

  def with_url(url):
    return dataclasses.replace(
      base, roles=dataclasses.replace(base.roles, pool_url=url, pool_outage_s=0)
    )

  config = with_url(f'sqlite:///{tmp_path}/shared.db')
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  with shared.claim_pool(config, tmp_path / 'a') as pool:
    queue = WorkQueue(pool, 2)
    queue.resume(None)
    queue.submit('t', 1)
  shared.claim_pool(config, tmp_path / 'a').close()
  shutil.copytree(tmp_path / 'a', tmp_path / 'copy')
  shutil.copytree(tmp_path / 'a', tmp_path / 'killed')
  with pytest.MonkeyPatch.context() as patch:  # SIGKILL between file and database
    patch.setattr(DataPool, 'change_owner', lambda *_: sys.exit())
    with pytest.raises(SystemExit):
      shared.claim_pool(config, tmp_path / 'killed')
  for _ in range(2):  # whichever of them starts first goes on
    shared.claim_pool(config, tmp_path / 'killed').close()
  for other in ('a', 'copy'):
    with pytest.raises(ValueError, match='pool_url.*a copy of .* has used the pool'):
      shared.claim_pool(config, tmp_path / other)
  (tmp_path / 'a' / 'pool.id').write_text((tmp_path / 'killed/pool.id').read_text())
  shared.claim_pool(config, tmp_path / 'a').close()
  with pytest.raises(ValueError, match='pool_url.*another run'):
    shared.claim_pool(config, tmp_path / 'b')
  for url, part in (
    ('sqlite:////no/such/directory/pool.db', 'unable to open'),
    ('postgresql://me:secret@127.0.0.1:1/pool', r'me:\*\*\*@127.*no connection'),
    ('no url', 'not a database URL'),
  ):
    with pytest.raises(ValueError, match=f'config.roles.pool_url: .*{part}') as raised:
      shared.open_pool(with_url(url), tmp_path)
    assert 'secret' not in str(raised.value)
