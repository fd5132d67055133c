"""Rules of a scaffold that are code: a pure function from an episode to an action.

rules.py defines `act(episode)`. It gets the record of one thread,

  {"turns": [{"content": "…", "calls": [["name", "{…}"]], "results": ["…"]}],
   "turns_left": 3}

and returns None or one of {"message": "…"}, {"temperature": 0.7}, {"end": true}
(`loops.Action`). It is never imported here: a process in a sandbox without network
or files runs it (`rules_inside`), a fork per call, over JSON lines on a socket, which
costs about a millisecond a turn. A rule that raises, returns something else or takes
longer than half a second ends the episode with the reason 'rules'.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from m2jax import sandbox
from m2jax.agents.loops import Action, Turn

_PORT = 8001
_REPLY_S = 10.0  # of a loaded machine; the process itself ends a call after 0.5 s
_LINE_BYTES = 1 << 20
_MESSAGE_CHARACTERS = 2000
_LIMITS = sandbox.Limits(
  cpu_s=3600,
  memory_bytes=128 << 20,
  processes=8,
  workspace_bytes=1 << 20,
  wall_s=86400.0,
)
_INSIDE = pathlib.Path(__file__).with_name('rules_inside.py')


class RulesFailed(Exception):
  """The code of the rules failed, which counts against the scaffold."""


class Rules:
  """The process that runs one rules.py. All methods are for one event loop."""

  def __init__(self, source: str):
    self._source = source
    self._lock = asyncio.Lock()
    self._stack: contextlib.AsyncExitStack | None = None

  async def start(self) -> None:
    """Starts the process, the first time.

    Raises:
      SandboxError: there is no sandbox, or its program did not start.
    """
    async with self._lock:
      if self._stack is not None:
        return
      async with contextlib.AsyncExitStack() as stack:
        contents = {'rules.py': self._source.encode('utf-8', 'replace')}
        contents['inside.py'] = _INSIDE.read_bytes()
        box = await sandbox.create(
          contents=contents, limits=_LIMITS, env={'PYTHONHASHSEED': '0'}
        )
        stack.push_async_callback(box.destroy)
        listener = stack.enter_context(await box.listen(_PORT))
        listener.setblocking(False)
        running = asyncio.ensure_future(box.exec(f'exec python3 -IS inside.py {_PORT}'))
        stack.callback(running.cancel)
        accepting = asyncio.ensure_future(
          asyncio.get_running_loop().sock_accept(listener)
        )
        await asyncio.wait(
          {running, accepting}, timeout=60, return_when=asyncio.FIRST_COMPLETED
        )
        if not accepting.done():
          accepting.cancel()
          said = running.result().stderr[-300:] if running.done() else 'no connection'
          raise sandbox.SandboxError(f'the rules did not start: {said}')
        connection, _ = accepting.result()
        self._reader, self._writer = await asyncio.open_connection(
          sock=connection, limit=_LINE_BYTES
        )
        stack.callback(self._writer.close)
        self._stack = stack.pop_all()

  async def act(self, turns: Sequence[Turn], turns_left: int) -> Action:
    """The action after the last of a thread's turns.

    Raises:
      RulesFailed: the code raised, was too slow, or returned no action.
    """
    shown = [dataclasses.asdict(turn) for turn in turns]
    line = json.dumps({'turns': shown, 'turns_left': turns_left}) + '\n'
    async with self._lock:
      try:
        async with asyncio.timeout(_REPLY_S):
          self._writer.write(line.encode())
          await self._writer.drain()
          reply = await self._reader.readline()
        found = json.loads(reply)
      except (OSError, ValueError, TimeoutError, RecursionError) as error:
        raise RulesFailed(f'rules.py: its process failed: {error!r}') from error
    if not isinstance(found, dict) or 'action' not in found:
      said = found.get('error') if isinstance(found, dict) else found
      raise RulesFailed(f'rules.py: {str(said)[:300]}')
    return action(found['action'])

  async def close(self) -> None:
    """Ends the process."""
    if self._stack is not None:
      await self._stack.aclose()


def action(value: Any) -> Action:
  """Checks what `act` returned. Raises RulesFailed."""
  match value:
    case None:
      return Action()
    case {'message': str(text), **rest} if not rest:
      if len(text) <= _MESSAGE_CHARACTERS:
        return Action(message=text)
    case {'temperature': int() | float() as t, **rest} if not rest:
      if not isinstance(t, bool) and 0 <= t <= 2:
        return Action(temperature=float(t))
    case {'end': True, **rest} if not rest:
      return Action(end='loop')
  raise RulesFailed(f'rules.py: act returned {str(value)[:200]}, which is no action')
