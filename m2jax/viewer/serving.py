"""Where the page is served: on a job's gateway, or on a port of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import fastapi
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.counters import Counters
from m2jax.gateway.errors import ApiError
from m2jax.gateway.listener import Listener
from m2jax.viewer import api
from m2jax.viewer.run import Run

KEY_FILE = 'admin.key'  # in the workdir


def link(base_url: str, key: str) -> str:
  """The address to open; the part behind # stays in the browser."""
  return f'{base_url.removesuffix("/v1")}/view#key={key}'


@contextlib.contextmanager
def serving(run: Run, key: str, port: int = 0) -> Iterator[str]:
  """Serves the page alone on loopback; yields its link.

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
  api.add_routes(app, run, key, settings.host)
  listener = Listener('viewer', app, settings, Counters())
  listener.start()
  try:
    yield link(listener.url, key)
  finally:
    listener.stop()
