"""What each key of a run allows, at the gateway's role; none is ever logged."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types

import httpx

from m2jax.checkpoint import policy
from m2jax.forge import shared
from m2jax.forge.roles import gateway as gateway_role
from m2jax.pool.data_pool import DataPool
from m2jax.train.workdir import open_workdir
from tests import processes
from tests.forge import forge_worker
from tests.forge.roles.test_agents import wait_until


@contextlib.contextmanager
def role(tmp_path, tok, monkeypatch):
  """The gateway's role at all addresses: its URL, and the keys by name."""
  config = forge_worker.config()
  url = f'http://127.0.0.1:{processes.free_port()}'
  config = dataclasses.replace(
    config,
    gateway=dataclasses.replace(config.gateway, host='0.0.0.0', port=0),
    roles=dataclasses.replace(config.roles, gateway_url=url),
  )
  open_workdir(config.anywhere(), tmp_path)
  tok.save(tmp_path / policy.TOKENIZER_FILE)
  shared.make_keys(config, tmp_path)
  DataPool(f'sqlite:///{tmp_path}/pool.db').close()
  ended = threading.Event()

  def sleep(seconds):
    if ended.wait(seconds):
      raise KeyboardInterrupt

  def run():
    with contextlib.suppress(KeyboardInterrupt):
      gateway_role.run(config, tmp_path)

  monkeypatch.setattr(gateway_role, 'time', types.SimpleNamespace(sleep=sleep))
  thread = threading.Thread(target=run)
  thread.start()
  try:
    wait_until(lambda: serves(url))
    yield url, {name: shared.read_key(config, tmp_path, name) for name in shared.KEYS}
  finally:
    ended.set()
    thread.join()


def serves(url):
  try:
    return bool(httpx.get(url + '/health'))
  except httpx.TransportError:
    return False


ROUTES = {
  ('POST', '/v1/sessions'): ('session', 201, {'key': 'mine'}),
  ('POST', '/v1/episodes'): ('reward', 503, {}),  # no task waits
  ('POST', '/v1/episodes/end'): ('reward', 404, {'key': 'x', 'success': 1}),
  ('DELETE', '/v1/sessions'): ('session', 200, {'key': 'mine'}),
  ('GET', '/view/api/run'): ('view', 200, None),
  ('GET', '/metrics'): ('view', 200, None),
  ('GET', '/openapi.json'): ('view', 200, None),
}


def test_each_key_allows_one_thing(tmp_path, tok, monkeypatch, caplog, capfd):
  def ask(method, path, key, body=None):
    headers = {'authorization': f'Bearer {key}'} if key else {}
    return httpx.request(method, url + path, headers=headers, json=body)

  caplog.set_level('INFO', logger='absl')
  with role(tmp_path, tok, monkeypatch) as (url, keys):
    for (method, path), (right, status, body) in ROUTES.items():
      for name, key in {'': '', 'session of its own': 'mine', **keys}.items():
        found = ask(method, path, key, body).status_code
        assert found == (status if name == right else 401), (path, name)
    assert ask('GET', '/health', '').json() == {'status': 'engine down'}
    assert 'sessions' in ask('GET', '/health', keys['view']).json()
  written = ''.join([caplog.text, *capfd.readouterr()])
  assert '/view; the key is keys/view' in written
  assert not [name for name, key in keys.items() if key in written]
