"""The page and its JSON API, as routes of an ASGI application.

  GET  /view                        the page; nothing of the run is in it
  GET  /view/api/run                `Run.summary`
  GET  /view/api/list?phase=rl|eval&before=&family=&end_reason=&outcome=&least_s=
         &most_s=&rows=FIRST-LAST&text=   `pages.Page`
  GET  /view/api/group/ITEM         `bundle`, of a rollout group
  GET  /view/api/session/SESSION    `bundle`, of one trajectory
  GET  /view/api/annotations/SESSION
  POST /view/api/annotations/SESSION {"text", "completion", "token"}

All but the page need the run's key `view` as `Authorization: Bearer KEY`, which allows
nothing else; links have it behind a `#`, which browsers do not send. Requests with a
foreign Host (DNS rebinding), an unknown field or a body above a few kB are rejected
before they are processed. Database queries run one at a time in a separate thread, so
that viewers do not slow the run's gateway down.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import json
from collections.abc import Callable, Collection
from typing import Any

import fastapi
from starlette.responses import HTMLResponse, JSONResponse, Response

from m2jax.gateway import fields, hosts
from m2jax.gateway.errors import ApiError, invalid, too_large
from m2jax.gateway.receiving import Bodies, Disconnected, authorise
from m2jax.pool.pages import Condition
from m2jax.viewer import page
from m2jax.viewer.run import Run

_BODY_BYTES = 64 << 10
_MAX_TEXT_CHARS = 200
_OUTCOMES = {'': None, 'success': True, 'failure': False}
_NOT_CACHED = {
  'cache-control': 'no-store',
  'x-content-type-options': 'nosniff',
  'referrer-policy': 'no-referrer',
  'cross-origin-resource-policy': 'same-origin',
}


def add_routes(
  app: fastapi.FastAPI, run: Run, key: str, host: str, more: Collection[str] = ()
) -> None:
  """Adds the routes to an application.

  Args:
    app: the gateway's, or one that has nothing else.
    run: what is shown.
    key: the key that requests need.
    host: the address that the server listens at. Requests may have it as their Host,
      and beyond loopback any address.
    more: further names of the server.
  """
  threads = concurrent.futures.ThreadPoolExecutor(1, 'viewer')
  names, addresses = hosts.names(host, more), not hosts.is_loopback(host)
  bodies = Bodies(16 * _BODY_BYTES)
  html = page.live()

  def check_host(request: fastapi.Request) -> None:
    hosts.check(request.headers.get('host', ''), names, addresses)

  def checked(request: fastapi.Request) -> None:
    check_host(request)
    authorise(request.scope, key)

  async def answer(function: Callable[[], Any]) -> Response:
    def work() -> bytes | None:
      found = function()
      return None if found is None else _json(found)

    loop = asyncio.get_running_loop()
    if (found := await loop.run_in_executor(threads, work)) is None:
      raise ApiError(404, 'the run has none of that name', code='not_found')
    return Response(found, media_type='application/json', headers=_NOT_CACHED)

  @app.get('/view')
  async def show(request: fastapi.Request):
    check_host(request)
    headers = {'content-security-policy': html.policy, 'x-frame-options': 'DENY'}
    return HTMLResponse(html.text, headers=_NOT_CACHED | headers)

  @app.get('/view/api/run')
  async def summary(request: fastapi.Request):
    checked(request)
    return await answer(run.summary)

  @app.get('/view/api/list')
  async def listed(request: fastapi.Request):
    checked(request)
    where, before = _condition(request.query_params)
    return await answer(lambda: vars(run.reader.page(where, before)))

  @app.get('/view/api/group/{item}')
  async def group(request: fastapi.Request, item: str):
    checked(request)
    index = _integer(item, 'item')
    return await answer(functools.partial(run.bundles.group, index))

  @app.get('/view/api/session/{session:path}')
  async def session(request: fastapi.Request, session: str):
    checked(request)
    return await answer(functools.partial(run.bundles.session, session))

  @app.get('/view/api/annotations/{session:path}')
  async def annotations(request: fastapi.Request, session: str):
    checked(request)
    return await answer(functools.partial(run.annotations.of, session))

  @app.post('/view/api/annotations/{session:path}')
  async def annotate(request: fastapi.Request, session: str):
    checked(request)
    limit = too_large(f'the body is larger than {_BODY_BYTES} bytes')
    receive = bodies.receive(request.scope, request.receive, _BODY_BYTES, limit)
    try:
      async with receive as body:
        note = _note(body)
    except Disconnected:
      return JSONResponse({}, 400)

    def work():
      if run.reader.trajectory(session) is None:
        return None
      try:
        return run.annotations.note(session, **note)
      except ValueError as error:
        raise invalid(str(error), None) from error

    return await answer(work)


def _condition(given) -> tuple[Condition, int | None]:
  known = {'phase', 'before', 'family', 'end_reason', 'outcome', 'least_s', 'most_s'}
  if unknown := set(given) - known - {'rows', 'text'}:
    raise invalid('unknown parameter', sorted(unknown)[0])
  if (outcome := given.get('outcome', '')) not in _OUTCOMES:
    raise invalid(f'must be one of {sorted(filter(None, _OUTCOMES))}', 'outcome')
  if len(text := given.get('text', '')) > _MAX_TEXT_CHARS:
    raise invalid(f'longer than {_MAX_TEXT_CHARS} characters', 'text')
  before = given.get('before')
  first, _, last = (rows := given.get('rows', '')).partition('-')
  try:
    where = Condition(
      given.get('phase', 'rl'),
      given.get('family') or None,
      given.get('end_reason') or None,
      _OUTCOMES[outcome],
      _number(given.get('least_s'), 'least_s'),
      _number(given.get('most_s'), 'most_s'),
      _integer(first, 'rows') if rows else None,
      _integer(last, 'rows') if rows else None,
      text,
    )
  except ValueError as error:
    raise invalid(str(error), 'phase') from error
  return where, None if before is None else _integer(before, 'before')


def _integer(text: str, name: str) -> int:
  try:
    value = int(text)
  except ValueError as error:
    raise invalid('must be an integer', name) from error
  if not 0 <= value < 2**63:
    raise invalid('out of range', name)
  return value


def _number(text: str | None, name: str) -> float | None:
  if not text:
    return None
  try:
    return float(text)
  except ValueError as error:
    raise invalid('must be a number', name) from error


def _note(body: bytearray) -> dict[str, Any]:
  found = fields.body(body)
  if 'text' not in found:
    raise invalid('must be there', 'text')
  if unknown := set(found) - {'text', 'completion', 'token'}:
    raise invalid('unknown field', sorted(unknown)[0])
  return found


def _json(value: Any) -> bytes:
  return json.dumps(value, separators=(',', ':')).encode()
