"""Episodes of agents that run anywhere: begun and ended over HTTP.

- POST /v1/episodes {"task": NAME}: 201 {"key", "task", "instruction"}; `task` may be
  left out where the server hands the tasks out. 503 while there is none.
- POST /v1/episodes/end {"key": KEY, "success": S, "rewards": {ID: R}, "end_reason": E,
  "answer": A, "error": M}: 200; all but `key` and `success` may be left out. `rewards`
  pays single turns, by the `id` of their responses, in whatever dialect. 404 if it is
  not open.

The agent works in between, with KEY as its API key. Both need `Authorization: Bearer
SECRET`, the key of whoever judges the outcome: KEY itself pays nothing. KEY is in no
URL, since these are logged.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Protocol

import fastapi
from starlette.responses import JSONResponse

from m2jax.gateway import fields
from m2jax.gateway.errors import ApiError, invalid, too_large
from m2jax.gateway.receiving import Bodies, Disconnected, authorise
from m2jax.records import COMPLETION_PREFIX

_BODY_BYTES = 64 << 10
_ID = re.compile('(?:chatcmpl-|msg_|resp_)([0-9a-f]{32})')  # of the three dialects
_SUCCESS, _REWARD = fields.number(0, 1), fields.number(-math.inf, math.inf)
_REASONS = (
  'answer', 'max_turns', 'length', 'context', 'loop', 'rules', 'timeout', 'exit',
  'limit', 'infrastructure',
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
  rewards: Mapping[str, float] = dataclasses.field(default_factory=dict)


class Episodes(Protocol):
  """Where episodes come from and what becomes of them. Methods may block."""

  def begin(self, task: str | None) -> Begun | None:
    """Opens an episode with its session; None: there is no task now.

    Raises:
      ValueError: the task cannot be chosen, or has to be.
    """

  def end(self, key: str, end: End) -> bool:
    """Records the end and closes the session; False if it is not open.

    Raises:
      ValueError: a reward is for a completion that the session does not have; the
        episode stays open.
    """


def add_routes(app: fastapi.FastAPI, episodes: Episodes, secret: str) -> None:
  """Adds the routes to a gateway's application."""
  bodies = Bodies(64 * _BODY_BYTES)

  async def body(request: fastapi.Request) -> dict[str, Any]:
    authorise(request.scope, secret)
    limit = too_large(f'the body is larger than {_BODY_BYTES} bytes')
    receive = bodies.receive(request.scope, request.receive, _BODY_BYTES, limit)
    async with receive as data:
      return fields.body(data or b'{}')

  @app.post('/v1/episodes')
  async def begin(request: fastapi.Request):
    try:
      task = (await body(request)).get('task')
    except Disconnected:
      return JSONResponse({}, 400)
    if task is not None:
      fields.text(task, 'task')
    try:
      begun = await asyncio.to_thread(episodes.begin, task)
    except ValueError as error:
      raise invalid(str(error), 'task') from error
    if begun is None:
      raise ApiError(503, 'no task is waiting for an agent; try again', code='no_task')
    return JSONResponse(dataclasses.asdict(begun), 201)

  @app.post('/v1/episodes/end')
  async def end(request: fastapi.Request):
    try:
      found = await body(request)
    except Disconnected:
      return JSONResponse({}, 400)
    key, ended = fields.text(found.get('key'), 'key'), _end(found)
    try:
      found = await asyncio.to_thread(episodes.end, key, ended)
    except ValueError as error:
      raise invalid(str(error), 'rewards') from error
    if not found:
      raise ApiError(404, 'this episode is not open')
    return JSONResponse({'key': key})


def _end(found: dict[str, Any]) -> End:
  success = _SUCCESS.read(found.get('success'), 'success')
  reason = found.get('end_reason', 'answer')
  if reason not in _REASONS:
    raise invalid(f'must be one of {", ".join(_REASONS)}', 'end_reason')
  texts = {n: fields.text(found.get(n, ''), n) for n in ('answer', 'error')}
  return End(float(success), reason, rewards=_rewards(found), **texts)


def _rewards(found: dict[str, Any]) -> dict[str, float]:
  """`rewards` by completion id."""
  given = found.get('rewards', {})
  if not isinstance(given, dict):
    raise invalid('must be an object: the id of a response and its reward', 'rewards')
  rewards: dict[str, float] = {}
  for id_, reward in given.items():
    reward = _REWARD.read(reward, f'rewards.{id_[:100]}')  # finite, as all JSON here
    match = _ID.fullmatch(id_)
    rewards[COMPLETION_PREFIX + match[1] if match else id_] = float(reward)
  return rewards
