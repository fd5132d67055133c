"""The Host of requests: a server on loopback answers to its own names only.

A page of another site can make a browser send requests here under the site's name,
which its DNS lets point to 127.0.0.1 (DNS rebinding). A server that listens beyond
loopback cannot know its names: it relies on keys, and on the names that it is given.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from starlette.responses import JSONResponse

from m2jax.gateway.counters import Counters
from m2jax.gateway.errors import ApiError

LOOPBACK = '127.0.0.1', 'localhost', '[::1]'


def check(given: str, names: Collection[str], addresses: bool = False) -> None:
  """Raises ApiError unless a Host header is one of `names`, at any port.

  `addresses`: whether any IP address is accepted. A page of another site cannot have an
  address that leads here as its name.
  """
  name, colon, port = given.rpartition(':')
  if not colon or not port.isdigit():
    name = given
  if name.lower() not in names and not (addresses and _is_address(name)):
    raise ApiError(403, f'Host {given[:100]!r} is not this server', code='host')


def names(host: str, more: Collection[str] = ()) -> frozenset[str]:
  """The names of a server that listens at an address, in lower case."""
  bracketed = f'[{host}]' if ':' in host else host
  return frozenset(name.lower() for name in (*LOOPBACK, bracketed, *more))


def _is_address(name: str) -> bool:
  try:
    ipaddress.ip_address(name.removeprefix('[').removesuffix(']'))
  except ValueError:
    return False
  return True


def is_loopback(host: str) -> bool:
  """Whether only this machine can connect to an address."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == 'localhost'


class Hosts:
  """ASGI middleware: HTTP requests without a Host get a 400, foreign ones a 403."""

  def __init__(self, app, host: str, more: Collection[str], counters: Counters):
    self._app, self._counters = app, counters
    self._beyond = not is_loopback(host)
    self._names = names(host, more) if more or not self._beyond else None

  async def __call__(self, scope, receive, send):
    if scope['type'] == 'http':
      try:
        self._check(scope)
      except ApiError as error:
        self._counters.add('requests_total', status=str(error.status))
        response = JSONResponse(error.any_body(), error.status)
        await response(scope, receive, send)
        return
    await self._app(scope, receive, send)

  def _check(self, scope) -> None:
    given = [v.decode('latin-1') for name, v in scope['headers'] if name == b'host']
    if len(given) != 1 and scope['http_version'] != '1.0':  # RFC 9112 §3.2
      raise ApiError(400, f'{len(given)} Host headers instead of one', code='host')
    if self._names is not None and given:
      check(given[0], self._names, self._beyond)
