"""The database away or frozen: clients wait, and every wait has an end."""

from __future__ import annotations

import threading
import time
import types

import pytest

from m2jax import records
from m2jax.forge import shared
from m2jax.forge.config import RolesConfig
from m2jax.pool import data_pool, database, watch
from tests.gateway.test_errors import OK, post

ANSWER = 'yes[e~['


@pytest.fixture
def frozen(postgresql, monkeypatch):
  """Freezes the server, once its URL and a pool are there."""
  monkeypatch.setattr(watch, '_SILENCE_S', 0.3)
  monkeypatch.setitem(database._LIBPQ, 'connect_timeout', 2)
  url = postgresql.new_url()

  def freeze(**options):
    pool = data_pool.DataPool(url, linger_s=0.01, **options)
    pool.submit(records.WorkItem(0, 't', 1))
    postgresql.pause()
    return pool

  yield freeze
  postgresql.resume()


def test_a_frozen_server_is_like_one_that_is_away(frozen):
  """It has the connections and answers nothing: no call may wait for it for ever."""
  pool = frozen(outage_s=0.5)
  began_s = time.monotonic()
  with pytest.raises(data_pool.PoolBroken, match='no connection for 0.5 s'):
    pool.next_index()
  with pytest.raises(data_pool.PoolBroken):
    pool.claim('a', 1)
  assert time.monotonic() - began_s < 15


def test_a_server_that_thaws(frozen, postgresql):
  """What was asked meanwhile takes effect once."""
  with frozen(outage_s=60.0) as pool:
    claims = []
    thread = threading.Thread(target=lambda: claims.extend(pool.claim('a', 9)))
    thread.start()
    time.sleep(2.0)
    assert not claims
    postgresql.resume()
    thread.join(30)
    assert [c.item.index for c in claims] == [0]
    assert pool.submit(records.WorkItem(1, 't', 1)) is None


def test_a_long_transaction_is_not_cut(postgresql, monkeypatch, caplog):
  """As long as the server answers others."""
  monkeypatch.setattr(watch, '_SILENCE_S', 0.2)
  with data_pool.DataPool(postgresql.new_url()) as pool:
    pool._database.read(lambda c: c.exec_driver_sql('SELECT pg_sleep(0.7)').scalar())
  assert 'takes long' in caplog.text


def test_a_learner_killed_while_it_claimed_its_pool(postgresql, tmp_path):
  """Its file without contents does not make the pool another run's for ever."""
  roles = RolesConfig(pool_url=postgresql.new_url())
  config = types.SimpleNamespace(roles=roles)
  (tmp_path / 'pool.id').touch()
  for index in range(2):
    with shared.claim_pool(config, tmp_path) as pool:
      pool.submit(records.WorkItem(index, 't', 1))
  (tmp_path / 'pool.id').write_text('another')
  with pytest.raises(ValueError, match='pool of another run'):
    shared.claim_pool(config, tmp_path)


@pytest.mark.parametrize(
  'away_s, outage_s, status', [(0.7, 60.0, 200), (1.5, 0.2, 500)]
)
def test_a_completion_while_the_database_is_away(
  postgresql, serve, away_s, outage_s, status
):
  """The client waits, and has its answer once it is recorded; after `outage_s` an
  error, which clients try again, and no answer that is not recorded."""
  url = postgresql.new_url()
  with data_pool.DataPool(url, linger_s=0.01, outage_s=outage_s) as pool:
    gateway, _, _ = serve(
      ANSWER, record=pool.record_completion, accept_unknown_keys=False
    )
    gateway.sessions.open('k', name='mine')
    postgresql.stop()
    back = threading.Timer(away_s, postgresql.start)
    back.start()
    reply = post(gateway, OK)
    assert reply.status_code == status
    if status == 500:
      assert 'internal error' in reply.text
      with pytest.raises(data_pool.PoolBroken, match='no connection'):
        pool.flush()  # as the role does, every second
  back.join()
  with data_pool.DataPool(url) as pool:
    assert len(pool.completions('mine')) == (status == 200)
