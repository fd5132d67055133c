"""A gateway on loopback answers to its own names only (DNS rebinding)."""

from __future__ import annotations

import http.client

import pytest

from m2jax.gateway import hosts
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.errors import ApiError


def status(gateway, *given, method='GET', path='/v1/models', version=11):
  """Of a request with these Host headers."""
  place = gateway.base_url.removeprefix('http://').removesuffix('/v1')
  connection = http.client.HTTPConnection(place)
  connection._http_vsn_str = f'HTTP/1.{version % 10}'
  connection.putrequest(method, path, skip_host=True)
  for value in given:
    connection.putheader('Host', value)
  connection.putheader('Authorization', 'Bearer k')
  connection.endheaders()
  try:
    return connection.getresponse().status
  finally:
    connection.close()


def test_who_is_answered(serve):
  """Every path, and keys that would be accepted, are behind the check."""
  gateway, _, _ = serve('hi', hosts=('Proxy.Example',))
  for given in ('127.0.0.1', '127.0.0.1:80', 'localhost:8000', '[::1]:1', 'LOCALHOST'):
    assert status(gateway, given) == 200, given
  assert status(gateway, 'proxy.example:443') == 200
  for given in (
    *('evil.example', 'evil.example:80', '127.0.0.1.evil.example', 'localhost@evil'),
    *('', ':80', '127.0.0.2', 'localhost:80:90', 'evil.example:localhost'),
  ):
    for path in ('/v1/models', '/metrics', '/health', '/openapi.json', '/'):
      assert status(gateway, given, path=path) == 403, given
    assert status(gateway, given, method='POST', path='/v1/messages') == 403
  assert gateway.counters()['requests_total{status="403"}'] > 0


def test_exactly_one_host(serve):
  """RFC 9112 §3.2; HTTP/1.0 has none."""
  gateway, _, _ = serve('hi')
  assert status(gateway) == 400
  assert status(gateway, 'localhost', 'localhost') == 400
  assert status(gateway, version=10) == 200
  assert status(gateway, 'evil.example', version=10) == 403


def test_beyond_loopback_only_with_keys():
  """The error says what to do; any job and role has the same config."""
  for host in ('0.0.0.0', '', '::', '10.1.2.3', 'gpu-box'):
    with pytest.raises(ValueError, match='accept_unknown_keys=False') as error:
      GatewayConfig(host=host, accept_unknown_keys=True)
    assert repr(host) in str(error.value) and 'docs/agents.md' in str(error.value)
    GatewayConfig(host=host)
  for host in ('127.0.0.1', '::1', 'localhost'):
    GatewayConfig(host=host, accept_unknown_keys=True)


def test_names_beyond_loopback(serve):
  """Any Host, unless names are given: then those, and addresses, and no other."""
  for more, other in (((), 200), (('gpu-box',), 403)):
    options = dict(host='0.0.0.0', hosts=more, accept_unknown_keys=False)
    gateway, _, _ = serve('hi', **options)
    gateway.sessions.open('k')
    assert status(gateway, 'gpu-box:80') == status(gateway, '127.0.0.1') == 200
    assert status(gateway, '10.1.2.3:80') == 200
    assert status(gateway, 'evil.example') == other


@pytest.mark.parametrize(
  'listening, own', [('0.0.0.0', False), ('127.0.0.3', True), ('::1', True)]
)
def test_only_loopback_knows_its_names(listening, own):
  assert hosts.is_loopback(listening) == own
  bracketed = f'[{listening}]' if ':' in listening else listening
  hosts.check(f'{bracketed}:8000', hosts.names(listening))
  with pytest.raises(ApiError, match='not this server'):
    hosts.check('10.0.0.1', hosts.names(listening))
