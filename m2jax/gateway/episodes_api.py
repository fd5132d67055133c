"""Episodes of agents that run anywhere: begun and ended over HTTP.

- POST /v1/episodes {"task": NAME}: 201 {"key", "task", "instruction"}; `task` may be
  left out where the server hands the tasks out. 503 while there is none.
- POST /v1/episodes/KEY/end {"success": S, "end_reason": R, "answer": A, "error": E}:
  200; all but `success` may be left out. 404 if it is not open.

The agent works in between, with KEY as its API key. Opening needs the gateway's
secret; ending needs it or the key itself: the client judges the outcome, so give the
key only to code that may set the reward. The relay of black-box agents passes neither.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import json
from typing import Any, Protocol

import fastapi
from starlette.responses import JSONResponse

from m2jax.gateway.errors import ApiError, invalid, too_large
from m2jax.gateway.receiving import Bodies, Disconnected, bearer

_BODY_BYTES = 64 << 10
_REASONS = (
  'answer', 'max_turns', 'length', 'context', 'timeout', 'exit', 'limit',
  'infrastructure',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Begun:
  """An open episode: the key of its session, and what to do."""

  key: str
  task: str
  instruction: str = ''


@dataclasses.dataclass(frozen=True)
class End:
  """How an episode ended; see `records.Trajectory`."""

  success: float
  end_reason: str = 'answer'
  answer: str = ''
  error: str = ''


class Episodes(Protocol):
  """Where episodes come from and what becomes of them. Methods may block."""

  def begin(self, task: str | None) -> Begun | None:
    """Opens an episode with its session; None: there is no task now.

    Raises:
      ValueError: the task cannot be chosen, or has to be.
    """

  def end(self, key: str, end: End) -> bool:
    """Records the end and closes the session; False if it is not open."""


def add_routes(app: fastapi.FastAPI, episodes: Episodes, secret: str) -> None:
  """Adds the routes to a gateway's application."""
  bodies = Bodies(64 * _BODY_BYTES)

  def has_secret(request: fastapi.Request) -> bool:
    return hmac.compare_digest(bearer(request.scope).encode(), secret.encode())

  async def fields(request: fastapi.Request) -> dict[str, Any]:
    limit = too_large(f'the body is larger than {_BODY_BYTES} bytes')
    receive = bodies.receive(request.scope, request.receive, _BODY_BYTES, limit)
    async with receive as body:
      try:
        found = json.loads(bytes(body) or b'{}')
      except (ValueError, RecursionError) as error:
        raise invalid(f'the body is not JSON: {error}', None) from error
    if not isinstance(found, dict):
      raise invalid('the body must be a JSON object', None)
    return found

  @app.post('/v1/episodes')
  async def begin(request: fastapi.Request):
    if not has_secret(request):
      raise ApiError(401, 'not the secret of this gateway', code='invalid_api_key')
    try:
      task = (await fields(request)).get('task')
    except Disconnected:
      return JSONResponse({}, 400)
    if task is not None and not isinstance(task, str):
      raise invalid('must be a string', 'task')
    try:
      begun = await asyncio.to_thread(episodes.begin, task)
    except ValueError as error:
      raise invalid(str(error), 'task') from error
    if begun is None:
      raise ApiError(503, 'no task is waiting for an agent; try again', code='no_task')
    return JSONResponse(dataclasses.asdict(begun), 201)

  @app.post('/v1/episodes/{key}/end')
  async def end(request: fastapi.Request, key: str):
    own = hmac.compare_digest(bearer(request.scope).encode(), key.encode())
    if not own and not has_secret(request):
      raise ApiError(401, 'neither its key nor the secret', code='invalid_api_key')
    try:
      ended = _end(await fields(request))
    except Disconnected:
      return JSONResponse({}, 400)
    if not await asyncio.to_thread(episodes.end, key, ended):
      raise ApiError(404, 'this episode is not open')
    return JSONResponse({'key': key})


def _end(found: dict[str, Any]) -> End:
  success = found.get('success')
  if isinstance(success, bool) or not isinstance(success, int | float):
    raise invalid('must be a number', 'success')
  if not 0 <= success <= 1:  # nan is not
    raise invalid('must be in [0, 1]', 'success')
  reason = found.get('end_reason', 'answer')
  if reason not in _REASONS:
    raise invalid(f'must be one of {", ".join(_REASONS)}', 'end_reason')
  texts = {name: found.get(name, '') for name in ('answer', 'error')}
  for name, text in texts.items():
    if not isinstance(text, str):
      raise invalid('must be a string', name)
  return End(float(success), reason, **texts)
