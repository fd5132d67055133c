"""Sessions opened by other processes, such as those that run agents.

- POST /v1/sessions {"key": KEY, "mode": "training", "name": NAME}: 201; 409 if it is
  open already. NAME is that of the session in records; without one it is random.
- DELETE /v1/sessions {"key": KEY}: 200, also if it is not open.

Both need `Authorization: Bearer SECRET`, which allows nothing else. KEY is in no URL,
since these are logged. Sessions are in memory: a restarted gateway has none, so no
session can continue with part of its history. A session whose process ended without
closing it is closed at `max_age_s`.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import uuid

import fastapi
from starlette.responses import JSONResponse

from m2jax.gateway import fields
from m2jax.gateway.errors import ApiError, invalid, too_large
from m2jax.gateway.receiving import Bodies, Disconnected, authorise
from m2jax.gateway.sessions import MODES, Sessions, valid_key

_BODY_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class RemoteSessions:
  """Who may open sessions over HTTP.

  Attributes:
    secret: authorises the requests.
    max_open: sessions at once; more get a 503.
    max_age_s: age of a session after which it is closed.
  """

  secret: str
  max_open: int = 65_536
  max_age_s: float = 86_400.0

  def __post_init__(self):
    if not self.secret:
      raise ValueError('RemoteSessions.secret: must not be empty')


def add_routes(
  app: fastapi.FastAPI, sessions: Sessions, settings: RemoteSessions
) -> None:
  """Adds the routes to a gateway's application."""
  opened: collections.OrderedDict[bytes, float] = collections.OrderedDict()
  bodies = Bodies(64 * _BODY_BYTES)

  async def read(request: fastapi.Request) -> tuple[str, str, str]:
    """The body of an authorised request; raises Disconnected or ApiError."""
    authorise(request.scope, settings.secret)
    limit = too_large(f'the body is larger than {_BODY_BYTES} bytes')
    receive = bodies.receive(request.scope, request.receive, _BODY_BYTES, limit)
    async with receive as body:
      return _fields(body)

  def close_old() -> None:
    latest_s = time.monotonic() - settings.max_age_s
    while opened and next(iter(opened.values())) < latest_s:
      sessions.close_digest(opened.popitem(last=False)[0])

  @app.post('/v1/sessions')
  async def open_session(request: fastapi.Request):
    try:
      key, mode, name = await read(request)
    except Disconnected:
      return JSONResponse({}, 400)
    close_old()
    if len(opened) >= settings.max_open:
      raise ApiError(503, f'{settings.max_open} sessions are open; close some')
    digest = sessions.digest(key)
    try:
      sessions.open(key, mode, name)
    except ValueError as error:
      status = 409 if digest in opened else 400
      raise ApiError(status, str(error), param='key') from error
    opened[digest] = time.monotonic()
    return JSONResponse({'key': key, 'mode': mode}, 201)

  @app.delete('/v1/sessions')
  async def close_session(request: fastapi.Request):
    try:
      key, _, _ = await read(request)
    except Disconnected:
      return JSONResponse({}, 400)
    digest = sessions.digest(key)
    if opened.pop(digest, None) is not None:
      sessions.close_digest(digest)
    return JSONResponse({'key': key})


def _fields(body: bytearray) -> tuple[str, str, str]:
  found = fields.body(body)
  key = fields.text(found.get('key'), 'key')
  mode = found.get('mode', 'training')
  if mode not in MODES:
    raise invalid(f'must be one of {MODES}', 'mode')
  name = found.get('name') or f'session-{uuid.uuid4().hex}'
  if not (isinstance(name, str) and valid_key(name)):
    raise invalid('must be 1 to 256 printable ASCII characters', 'name')
  return key, mode, name
