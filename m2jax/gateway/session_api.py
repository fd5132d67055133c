"""Sessions opened by other processes, such as those that run agents.

- POST /v1/sessions {"key": KEY, "mode": "training", "name": NAME}: 201; 409 if it is
  open already. NAME is that of the session in records; without one it is the key.
- DELETE /v1/sessions/KEY, with the key quoted: 200, also if it is not open.

Both need the shared secret as `Authorization: Bearer SECRET`. Sessions are in memory: a
gateway that restarts has none, so that no session can go on with part of its history.
One whose process has ended without closing it is closed at an age.
"""

from __future__ import annotations

import collections
import dataclasses
import hmac
import json
import time
from typing import Any

import fastapi
from starlette.responses import JSONResponse

from m2jax.gateway.errors import ApiError, invalid, too_large
from m2jax.gateway.receiving import Bodies, Disconnected, bearer
from m2jax.gateway.sessions import MODES, Sessions, valid_key

_BODY_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class RemoteSessions:
  """Who may open sessions over HTTP.

  Attributes:
    secret: authorises the requests.
    max_open: sessions at once; more get a 503.
    max_age_s: of a session, after which it is closed.
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

  def authorise(request: fastapi.Request) -> None:
    given = bearer(request.scope)
    if not hmac.compare_digest(given.encode(), settings.secret.encode()):
      raise ApiError(401, 'not the secret of this gateway', code='invalid_api_key')

  def close_old() -> None:
    latest_s = time.monotonic() - settings.max_age_s
    while opened and next(iter(opened.values())) < latest_s:
      sessions.close_digest(opened.popitem(last=False)[0])

  @app.post('/v1/sessions')
  async def open_session(request: fastapi.Request):
    authorise(request)
    limit = too_large(f'the body is larger than {_BODY_BYTES} bytes')
    receive = bodies.receive(request.scope, request.receive, _BODY_BYTES, limit)
    try:
      async with receive as body:
        key, mode, name = _fields(body)
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

  @app.delete('/v1/sessions/{key:path}')  # a key may have slashes
  async def close_session(request: fastapi.Request, key: str):
    authorise(request)
    digest = sessions.digest(key)
    if opened.pop(digest, None) is not None:
      sessions.close_digest(digest)
    return JSONResponse({'key': key})


def _fields(body: bytearray) -> tuple[str, str, str | None]:
  try:
    fields: Any = json.loads(bytes(body))
  except (ValueError, RecursionError) as error:
    raise invalid(f'the body is not JSON: {error}', None) from error
  if not isinstance(fields, dict) or not isinstance(fields.get('key'), str):
    raise invalid('must be a string', 'key')
  mode = fields.get('mode', 'training')
  if mode not in MODES:
    raise invalid(f'must be one of {MODES}', 'mode')
  name = fields.get('name')
  if name is not None and not (isinstance(name, str) and valid_key(name)):
    raise invalid('must be 1 to 256 printable ASCII characters', 'name')
  return fields['key'], mode, name
