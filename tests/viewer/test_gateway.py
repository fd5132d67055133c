"""The page on a job's gateway, beside its own routes."""

from __future__ import annotations

import httpx

from m2jax.forge import watch
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from m2jax.viewer import serving
from tests.gateway.conftest import tok  # noqa: F401
from tests.gateway.scripted_engine import ScriptedEngine


def test_a_job_prints_a_link_that_works(workdir, tok, caplog):  # noqa: F811
  """The logged link opens the page, and its key the API; the gateway's routes stay."""
  engine = ScriptedEngine(lambda request: [1])
  gateway = Gateway(GatewayConfig(), tok, engine, lambda completion: None)
  with watch.Page(workdir) as page:
    page.attach(gateway)
    with gateway:
      with caplog.at_level('INFO', logger='absl'):
        page.announce(gateway.base_url)
      link = caplog.messages[-1].split()[-1]
      address, _, key = link.partition('#key=')
      assert key == (workdir / serving.KEY_FILE).read_text()
      assert '<div id="app">' in httpx.get(address).text
      headers = {'Authorization': f'Bearer {key}'}
      found = httpx.get(f'{address}/api/group/0', headers=headers).json()
      assert len(found['completions']) == 4
      refused = httpx.get(f'{address}/api/group/0')
      assert refused.status_code == 401 and refused.json()['error']['code']
      assert httpx.get(gateway.base_url.replace('/v1', '/health')).status_code == 200
  engine.close()
