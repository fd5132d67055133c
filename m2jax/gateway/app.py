"""The HTTP surface: routes, and the errors of those that do not exist.

- POST, in their dialects: /v1/chat/completions, /v1/messages, /v1/responses;
  /v1/messages/count_tokens, /tokenize.
- GET /v1/models, /health, /metrics, /openapi.json; HEAD /.
- `Authorization: Bearer KEY` or `x-api-key: KEY`; the key is the session. Beyond
  loopback /metrics, /openapi.json and the statistics in /health need the viewers' key.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from typing import Any

import fastapi
from starlette import routing
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from m2jax.gateway import hosts, openapi
from m2jax.gateway.counters import CONTENT_TYPE
from m2jax.gateway.dialects import DIALECTS, Completing
from m2jax.gateway.endpoints import Completions, Counts
from m2jax.gateway.errors import ApiError
from m2jax.gateway.receiving import Bodies, api_key, authorise
from m2jax.gateway.service import ChatService

_RETRY = {'retry-after': '1'}


def build(service: ChatService) -> fastapi.FastAPI:
  """The gateway's ASGI application around a service."""
  config, counters = service.config, service.counters
  started_s, document = int(time.time()), openapi.document(config.model_name)
  # A redirect to a path with a slash would go to the host that the client names.
  app = fastapi.FastAPI(title='m2jax gateway', openapi_url=None, redirect_slashes=False)
  paths = {'/v1/models', *(dialect.path for dialect in DIALECTS.values())}
  answered = dict(host=config.host, more=config.hosts, counters=counters)
  app.add_middleware(hosts.Hosts, **answered)
  bodies = Bodies(config.max_unfinished_bytes)
  for dialect in DIALECTS.values():
    kind = Completions if isinstance(dialect, Completing) else Counts
    endpoint = kind(service, dialect, bodies)
    app.router.routes.append(routing.Route(dialect.path, endpoint, methods=['POST']))

  @app.exception_handler(HTTPException)
  async def http_error(request: fastapi.Request, error: HTTPException):
    counters.add('requests_total', status=str(error.status_code))
    path = request.url.path
    message = f'{request.method} {path}: {error.detail}'
    if error.status_code == 404:  # of a client with another base URL
      for meant in paths & {f'/v1{path}', path.removeprefix('/v1')}:
        message += f'; it is at {meant}: check the base URL of the client'
    body = ApiError(error.status_code, message).any_body()
    return JSONResponse(body, error.status_code, headers=error.headers)

  @app.exception_handler(ApiError)
  async def api_error(request: fastapi.Request, error: ApiError):
    counters.add('requests_total', status=str(error.status))
    wait_s = error.retry_after_s
    headers = {'retry-after': str(wait_s)} if wait_s else None
    return JSONResponse(error.body(), error.status, headers)

  def may_view(request: fastapi.Request) -> None:
    """Raises ApiError (401) where other machines may connect, without the key."""
    if not hosts.is_loopback(config.host):
      authorise(request.scope, service.view_key)

  @app.get('/v1/models')
  async def models(request: fastapi.Request):
    service.sessions.find(api_key(request.scope))
    return JSONResponse(_models(config.model_name, started_s))

  @app.get('/openapi.json')
  async def schema(request: fastapi.Request):
    may_view(request)
    return JSONResponse(document)

  @app.get('/health')
  async def health(request: fastapi.Request):
    alive, stats = service.health()
    body = {'status': 'ok' if alive else 'engine down'}
    with contextlib.suppress(ApiError):
      may_view(request)
      body |= {'engine': stats, 'policy_version': stats.get('policy_version')}
      body['sessions'] = len(service.sessions)
    return JSONResponse(body) if alive else JSONResponse(body, 503, _RETRY)

  @app.get('/metrics')
  async def metrics(request: fastapi.Request):
    may_view(request)
    return PlainTextResponse(counters.exposition(), media_type=CONTENT_TYPE)

  @app.head('/')
  async def root():
    return Response()

  return app


def _models(name: str, created_s: int) -> dict[str, Any]:
  """The list of models, with the fields of both OpenAI's and Anthropic's."""
  created = datetime.datetime.fromtimestamp(created_s, datetime.UTC)
  model = {
    'id': name,
    'object': 'model',
    'created': created_s,
    'owned_by': 'm2jax',
    'type': 'model',
    'display_name': name,
    'created_at': created.isoformat().replace('+00:00', 'Z'),
  }
  ends = {'has_more': False, 'first_id': name, 'last_id': name}
  return {'object': 'list', 'data': [model], **ends}
