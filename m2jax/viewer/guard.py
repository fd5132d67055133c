"""Who may ask a page's API, and how it answers.

All but the page need the run's key `view` as `Authorization: Bearer KEY`, which allows
nothing else; links have it behind a `#`, which browsers do not send. Requests with a
foreign Host (DNS rebinding) are rejected before they are processed. Answers are made
one at a time in a separate thread, so that viewers do not slow the run's gateway down.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable, Collection
from typing import Any

import fastapi
from starlette.responses import HTMLResponse, Response

from m2jax.gateway import hosts
from m2jax.gateway.errors import ApiError, invalid
from m2jax.gateway.receiving import authorise
from m2jax.viewer.page import Html

_NOT_CACHED = {
  'cache-control': 'no-store',
  'x-content-type-options': 'nosniff',
  'referrer-policy': 'no-referrer',
  'cross-origin-resource-policy': 'same-origin',
}


class Guard:
  """Checks the requests of one page, and answers them."""

  def __init__(self, key: str, host: str, more: Collection[str] = ()):
    """Makes one.

    Args:
      key: the key that requests need.
      host: the address that the server listens at. Requests may have it as their Host,
        and beyond loopback any address.
      more: further names of the server.
    """
    self._key = key
    self._names, self._addresses = hosts.names(host, more), not hosts.is_loopback(host)
    self._threads = concurrent.futures.ThreadPoolExecutor(1, 'viewer')

  def check(self, request: fastapi.Request) -> None:
    """Raises ApiError for a foreign Host or without the key."""
    self._check_host(request)
    authorise(request.scope, self._key)

  async def answer(self, function: Callable[[], Any]) -> Response:
    """Its value as JSON. Raises ApiError, 404, for None."""

    def work() -> bytes | None:
      found = function()
      return None if found is None else _json(found)

    loop = asyncio.get_running_loop()
    if (found := await loop.run_in_executor(self._threads, work)) is None:
      raise ApiError(404, 'the run has none of that name', code='not_found')
    return Response(found, media_type='application/json', headers=_NOT_CACHED)

  def add_page(self, app: fastapi.FastAPI, html: Html) -> None:
    """Adds GET /view, the page, which has nothing of the run."""

    @app.get('/view')
    async def show(request: fastapi.Request):
      self._check_host(request)
      headers = {'content-security-policy': html.policy, 'x-frame-options': 'DENY'}
      return HTMLResponse(html.text, headers=_NOT_CACHED | headers)

  def _check_host(self, request: fastapi.Request) -> None:
    hosts.check(request.headers.get('host', ''), self._names, self._addresses)


def known(given, names: Collection[str]):
  """The parameters; raises ApiError if one is not among the names."""
  if unknown := set(given) - set(names):
    raise invalid('unknown parameter', sorted(unknown)[0])
  return given


def integer(text: str, name: str) -> int:
  """A parameter in [0, 2^63); raises ApiError if it is none."""
  try:
    value = int(text)
  except ValueError as error:
    raise invalid('must be an integer', name) from error
  if not 0 <= value < 2**63:
    raise invalid('out of range', name)
  return value


def _json(value: Any) -> bytes:
  return json.dumps(value, separators=(',', ':')).encode()
