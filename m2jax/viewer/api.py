"""The page and its JSON API, as routes of an ASGI application.

  GET  /view                        the page; nothing of the run is in it
  GET  /view/api/run?run=           `Run.summary`
  GET  /view/api/list?CONDITION&before=      `pages.Page`
  GET  /view/api/histogram?CONDITION         `PageReader.histogram`
  GET  /view/api/curves                      `Run.curves`
  GET  /view/api/group/ITEM         `bundle`, of a rollout group
  GET  /view/api/session/SESSION    `bundle`, of one trajectory
  GET  /view/api/tasks?run=&CONDITION        `PageReader.tasks`
  GET  /view/api/task?run=&task=&CONDITION   `bundle`, of trajectories of one task
  GET  /view/api/annotations/SESSION
  POST /view/api/annotations/SESSION {"text", "completion", "token"} or {"flag", "on"}

CONDITION is phase=rl|eval, family, end_reason, outcome, flag, least_s, most_s,
least_reward, most_reward, step, rows=FIRST-LAST and text, each of which may be absent.
run=other is the run that is compared; it is only read.

`guard` says who may ask. A request with an unknown field or a body above a few kB is
rejected before it is processed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any

import fastapi
from starlette.responses import JSONResponse

from m2jax.gateway import fields
from m2jax.gateway.errors import ApiError, invalid, too_large
from m2jax.gateway.receiving import Bodies, Disconnected
from m2jax.pool.pages import Condition
from m2jax.viewer import page
from m2jax.viewer.annotations import FLAGS
from m2jax.viewer.guard import Guard, integer, known
from m2jax.viewer.run import Run

_BODY_BYTES = 64 << 10
_MAX_TEXT_CHARS = 200
_TASK_CHARS, _OF_TASK = 10_000, 4  # trajectories of a task that are shown
_OUTCOMES = {'': None, 'success': True, 'failure': False}
_BOUNDS = 'least_s', 'most_s', 'least_reward', 'most_reward'
_CONDITION = {
  'phase',
  'family',
  'end_reason',
  'outcome',
  'flag',
  'rows',
  'step',
  'text',
}
_CONDITION |= {*_BOUNDS}


def add_routes(
  app: fastapi.FastAPI,
  run: Run,
  key: str,
  host: str,
  more: Collection[str] = (),
  other: Run | None = None,
) -> None:
  """Adds the routes to an application.

  Args:
    app: the gateway's, or one that has nothing else.
    run: what is shown.
    key: the key that requests need.
    host: the address that the server listens at. Requests may have it as their Host,
      and beyond loopback any address.
    more: further names of the server.
    other: a run to compare it with.
  """
  guard = Guard(key, host, more)
  bodies = Bodies(16 * _BODY_BYTES)
  checked, answer = guard.check, guard.answer
  guard.add_page(app, page.live())

  def which(given) -> Run:
    if (name := given.get('run', '')) not in ('', 'other'):
      raise invalid("must be 'other' or absent", 'run')
    if name and other is None:
      raise ApiError(404, 'no run is compared: --compare', code='not_found')
    return other if name else run

  @app.get('/view/api/run')
  async def summary(request: fastapi.Request):
    checked(request)
    chosen = which(known(request.query_params, {'run'}))
    compared = other.title if other else ''
    return await answer(lambda: chosen.summary() | {'compared': compared})

  @app.get('/view/api/list')
  async def listed(request: fastapi.Request):
    checked(request)
    given = known(request.query_params, _CONDITION | {'before'})
    where, before = _condition(given, run), given.get('before')
    before = None if before is None else integer(before, 'before')
    return await answer(lambda: vars(run.reader.page(where, before)))

  @app.get('/view/api/histogram')
  async def histogram(request: fastapi.Request):
    checked(request)
    where = _condition(known(request.query_params, _CONDITION), run)
    return await answer(functools.partial(run.reader.histogram, where))

  @app.get('/view/api/curves')
  async def curves(request: fastapi.Request):
    checked(request)
    known(request.query_params, ())
    return await answer(run.curves)

  @app.get('/view/api/tasks')
  async def tasks(request: fastapi.Request):
    checked(request)
    given = known(request.query_params, _CONDITION | {'run'})
    chosen = which(given)
    where = _condition(given, chosen)
    return await answer(functools.partial(chosen.reader.tasks, where))

  @app.get('/view/api/task')
  async def of_task(request: fastapi.Request):
    checked(request)
    given = known(request.query_params, _CONDITION | {'run', 'task'})
    chosen, task = which(given), given.get('task', '')
    where = _condition(given, chosen)
    if len(task) > _TASK_CHARS:
      raise invalid(f'longer than {_TASK_CHARS} characters', 'task')

    def work():
      return chosen.bundles.sessions(chosen.reader.of_task(where, task, _OF_TASK))

    return await answer(work)

  @app.get('/view/api/group/{item}')
  async def group(request: fastapi.Request, item: str):
    checked(request)
    index = integer(item, 'item')
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
        write = run.annotations.flag if 'flag' in note else run.annotations.note
        return write(session, **note)
      except ValueError as error:
        raise invalid(str(error), None) from error

    return await answer(work)


def _condition(given, run: Run) -> Condition:
  if (outcome := given.get('outcome', '')) not in _OUTCOMES:
    raise invalid(f'must be one of {sorted(filter(None, _OUTCOMES))}', 'outcome')
  if (flag := given.get('flag', '')) not in ('', 'any', *FLAGS):
    raise invalid(f"must be 'any' or one of {FLAGS}", 'flag')
  if len(text := given.get('text', '')) > _MAX_TEXT_CHARS:
    raise invalid(f'longer than {_MAX_TEXT_CHARS} characters', 'text')
  first, _, last = (rows := given.get('rows', '')).partition('-')
  step, flagged = given.get('step'), None
  if flag:
    found = run.annotations.flagged().items()
    flagged = frozenset(s for s, flags in found if flag == 'any' or flag in flags)
  try:
    return Condition(
      phase=given.get('phase', 'rl'),
      family=given.get('family') or None,
      end_reason=given.get('end_reason') or None,
      success=_OUTCOMES[outcome],
      first_row=integer(first, 'rows') if rows else None,
      last_row=integer(last, 'rows') if rows else None,
      step=integer(step, 'step') if step else None,
      sessions=flagged,
      text=text,
      **{name: _number(given.get(name), name) for name in _BOUNDS},
    )
  except ValueError as error:
    raise invalid(str(error), 'phase') from error


def _number(text: str | None, name: str) -> float | None:
  if not text:
    return None
  try:
    value = float(text)
  except ValueError as error:
    raise invalid('must be a number', name) from error
  if math.isnan(value):
    raise invalid('must be a number', name)
  return value


def _note(body: bytearray) -> dict[str, Any]:
  found = fields.body(body)
  known = {'flag', 'on'} if 'flag' in found else {'text', 'completion', 'token'}
  if unknown := set(found) - known:
    raise invalid('unknown field', sorted(unknown)[0])
  for name in ('flag', 'on') if 'flag' in found else ('text',):
    if name not in found:
      raise invalid('must be there', name)
  return found
