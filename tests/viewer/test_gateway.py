"""The page on a job's gateway, beside its own routes."""

from __future__ import annotations

import contextlib
import http.client
import urllib.parse

import httpx
import pytest

from m2jax.forge.roles import watch
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.server import Gateway
from tests.gateway.conftest import tok  # noqa: F401
from tests.gateway.scripted_engine import ScriptedEngine


def test_a_job_shows_where_its_page_is(workdir, tok, caplog, capsys, monkeypatch):  # noqa: F811
  """A terminal gets the link, whose key opens the API, and a log the address without
  it; the gateway's routes stay."""
  engine = ScriptedEngine(lambda request: [1])
  gateway = Gateway(GatewayConfig(), tok, engine, lambda completion: None)
  with watch.Page(workdir) as page:
    page.attach(gateway)
    with gateway:
      key = (workdir / 'keys' / 'view').read_text()
      with caplog.at_level('INFO', logger='absl'):
        page.announce(gateway)
        logged = caplog.messages
        monkeypatch.setattr('sys.stdout.isatty', lambda: True)
        page.announce(gateway)
      address, _, shown = capsys.readouterr().out.split()[-1].partition('#key=')
      assert shown == key and caplog.messages == logged
      assert address in logged[0] and key not in logged[0]
      assert '<div id="app">' in httpx.get(address).text
      headers = {'Authorization': f'Bearer {key}'}
      found = httpx.get(f'{address}/api/group/0', headers=headers).json()
      assert len(found['completions']) == 4
      refused = httpx.get(f'{address}/api/group/0')
      assert refused.status_code == 401 and refused.json()['error']['code']
      assert httpx.get(gateway.base_url.replace('/v1', '/health')).status_code == 200
  engine.close()


@contextlib.contextmanager
def job(workdir, tok, names=(), **config):  # noqa: F811
  """A gateway with the page; yields its port, the page, and the link that it logs."""
  engine = ScriptedEngine(lambda request: [1])
  gateway = Gateway(GatewayConfig(**config), tok, engine, lambda completion: None)
  with watch.Page(workdir, names=names) as page:
    page.attach(gateway)
    with gateway:
      yield urllib.parse.urlsplit(gateway.base_url).port, page.link(gateway)
  engine.close()


def statuses(port, key, host):
  """Of the page and of its API, asked for under a Host."""
  found = []
  for path in ('/view', '/view/api/run', '/view/api/group/0'):
    connection = http.client.HTTPConnection('127.0.0.1', port)
    connection.putrequest('GET', path, skip_host=True)
    connection.putheader('Host', host)
    connection.putheader('Authorization', f'Bearer {key}')
    connection.endheaders()
    found.append(connection.getresponse().status)
    connection.close()
  return set(found)


FOREIGN = ('evil.example', 'evil.example:80', '127.0.0.1.evil.example', '10.evil', '')
OWN = ('127.0.0.1', 'localhost:8000', '[::1]:1')
EVERYWHERE = dict(host='0.0.0.0')


@pytest.mark.parametrize(
  'config, names, allowed, refused',
  [
    ({}, (), OWN, ('10.1.2.3', 'a.example', *FOREIGN)),
    ({'hosts': ('A.example',)}, (), ('a.example:443', *OWN), ('10.1.2.3', *FOREIGN)),
    (EVERYWHERE, (), ('10.1.2.3:80', '[fd00::1]', *OWN), ('a.example', *FOREIGN)),
    (EVERYWHERE | {'hosts': ('a.example',)}, (), ('a.example', '10.1.2.3'), FOREIGN),
    (EVERYWHERE, ('b.example',), ('B.example:8102', '10.1.2.3'), FOREIGN),
  ],
  ids=['loopback', 'proxy', 'everywhere', 'named', 'role'],
)
def test_by_which_names_it_is_reached(workdir, tok, config, names, allowed, refused):  # noqa: F811
  """Those of the job's gateway; an address is nobody's name, so that it cannot be
  rebound, and is answered where other machines may connect."""
  with job(workdir, tok, names, **config) as (port, link):
    key = link.partition('#key=')[2]
    assert {host: statuses(port, key, host) for host in allowed} == {
      host: {200} for host in allowed
    }
    assert {host: statuses(port, key, host) for host in refused} == {
      host: {403} for host in refused
    }


@pytest.mark.parametrize('host', ['127.0.0.1', '0.0.0.0', '::'])
def test_the_link_can_be_opened(workdir, tok, host):  # noqa: F811
  """It names the machine, also when the server listens at all addresses."""
  with job(workdir, tok, host=host) as (port, link):
    address, _, key = link.partition('#key=')
    where = urllib.parse.urlsplit(address)
    assert where.port == port and where.hostname not in ('0.0.0.0', '::')
    assert '<div id="app">' in httpx.get(address).text
    headers = {'Authorization': f'Bearer {key}'}
    assert httpx.get(f'{address}/api/run', headers=headers).status_code == 200


def test_the_link_has_the_name_that_is_configured(workdir, tok):  # noqa: F811
  """Another machine may not reach the address; a loopback name is of no use to it."""
  for names in (('a.example', 'b.example'), ('127.0.0.1', 'a.example')):
    with job(workdir, tok, names[1:], host='0.0.0.0', hosts=names[:1]) as (port, link):
      assert link.startswith(f'http://a.example:{port}/view#key=')
