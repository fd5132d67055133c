"""Serves the page on a job's gateway or on a separate port."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import urllib.parse
from collections.abc import Callable, Collection, Iterator

import fastapi
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from m2jax.gateway import hosts
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.counters import Counters
from m2jax.gateway.errors import ApiError
from m2jax.gateway.listener import Listener
from m2jax.viewer import api
from m2jax.viewer.run import Run


def link(base_url: str, key: str, names: Collection[str] = ()) -> str:
  """The address to open; the part behind # stays in the browser.

  Args:
    base_url: a server's URL, with the address that it listens at.
    key: the key that the page's API needs.
    names: the server's names. Beyond loopback the first that other machines may know
      takes the place of its address; without one, it is this machine's address if the
      server listens at all of them.
  """
  listening = urllib.parse.urlsplit(base_url)
  host = listening.hostname
  if not hosts.is_loopback(host):
    bare = (name.strip('[]') for name in names)
    host = next((name for name in bare if not hosts.is_loopback(name)), host)
    with contextlib.suppress(ValueError):  # a name
      if ipaddress.ip_address(host).is_unspecified:
        host = _own_address(host)
  place = f'[{host}]' if ':' in host else host
  return f'http://{place}:{listening.port}/view#key={key}'


def _own_address(unspecified: str) -> str:
  """The address of this machine that leads to others; loopback if none does."""
  family, elsewhere, own = socket.AF_INET, '192.0.2.1', '127.0.0.1'  # RFC 5737
  if ':' in unspecified:
    family, elsewhere, own = socket.AF_INET6, '2001:db8::1', '::1'  # RFC 3849
  try:
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
      asked.connect((elsewhere, 9))  # finds the route; sends nothing
      return asked.getsockname()[0]
  except OSError:
    return own


def serving(
  run: Run, key: str, port: int = 0, other: Run | None = None
) -> contextlib.AbstractContextManager[str]:
  """Serves the page of a run; see `listening`. `other`: see `api.add_routes`."""
  add = lambda app, host: api.add_routes(app, run, key, host, other=other)
  return listening(add, key, port)


@contextlib.contextmanager
def listening(
  add_routes: Callable[[fastapi.FastAPI, str], None], key: str, port: int = 0
) -> Iterator[str]:
  """Serves a page alone on loopback; yields its link.

  Args:
    add_routes: adds them to an application that listens at an address.
    key: the key of the link.
    port: where to listen; 0: a free port.

  Raises:
    OSError: the port is in use.
  """
  app = fastapi.FastAPI(title='m2jax viewer', openapi_url=None)

  @app.exception_handler(ApiError)
  async def api_error(request: fastapi.Request, error: ApiError):
    return JSONResponse(error.body(), error.status)

  @app.exception_handler(HTTPException)
  async def http_error(request: fastapi.Request, error: HTTPException):
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), 404)

  settings = GatewayConfig(port=port, max_connections=64)
  add_routes(app, settings.host)
  listener = Listener('viewer', app, settings, Counters())
  listener.start()
  try:
    yield link(listener.url, key)
  finally:
    listener.stop()
