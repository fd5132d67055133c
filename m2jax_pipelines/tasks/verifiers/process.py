"""The process in which a `verifiers` environment plays its episodes.

One per interpreter and settings, for as long as this process lives; `server.py` says
what goes over its pipes. If it ends, its episodes fail as infrastructure, and the next
one starts another.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from m2jax import sandbox

SERVER = Path(__file__).with_name('server.py')
MAX_BYTES = 1 << 26  # of an answer
INSTALL = (
  "make one with `PYTHON -m venv DIR && DIR/bin/pip install 'verifiers>=0.4,<0.5'`, "
  'install the environment into it, and set tasks.python=DIR/bin/python'
)
_STDERR = 2000  # characters of it that an error shows
_lock = threading.Lock()
_running: dict[tuple[str, str], Process] = {}


class Process:
  """A running environment; make it with `running`."""

  def __init__(self, python: str, text: str):
    self._name = f'verifiers environment {json.loads(text)["env"]!r}'
    try:
      self._process = subprocess.Popen(
        [python, '-P', str(SERVER), text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # an interrupt of the job lets its episodes end first
      )
    except OSError as error:
      raise sandbox.SandboxError(f'{python}: {error}; {INSTALL}') from error
    self._numbers = itertools.count()
    self._writing = threading.Lock()
    self._waiting: dict[int | None, concurrent.futures.Future] = {}
    self._said = ''
    self._ended = False
    self._ready = self._waiting[None] = concurrent.futures.Future()
    for target in (self._read, self._listen):
      threading.Thread(target=target, name='verifiers', daemon=True).start()

  @property
  def ended(self) -> bool:
    return self._ended

  async def request(self, op: str, timeout_s: float, **arguments: Any) -> Any:
    """The answer to a request.

    Raises:
      SandboxError: the environment failed, or gave no answer in time.
    """
    try:
      async with asyncio.timeout(timeout_s):
        await asyncio.shield(asyncio.wrap_future(self._ready))
        future = self._send(op, arguments)
        return await asyncio.wrap_future(future)
    except TimeoutError as error:
      raise sandbox.SandboxError(
        f'{self._name}: no answer to {op!r} within {timeout_s:g} s (tasks.timeout_s)'
      ) from error

  def stop(self) -> None:
    """Ends the process and those that it started."""
    with contextlib.suppress(OSError):
      os.killpg(self._process.pid, 9)
    self._process.wait()

  def _send(self, op: str, arguments: dict) -> concurrent.futures.Future:
    number, future = next(self._numbers), concurrent.futures.Future()
    self._waiting[number] = future
    line = json.dumps({'id': number, 'op': op, **arguments}) + '\n'
    try:
      with self._writing:
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
    except OSError:
      self._end()
    if self._ended:
      self._end()
    return future

  def _read(self) -> None:
    """Hands answers to those that wait, until the process ends."""
    broken = (OSError, ValueError, KeyError, TypeError, RecursionError)
    with contextlib.suppress(*broken):  # that of a process that breaks the protocol
      while line := self._process.stdout.readline(MAX_BYTES):
        answer = json.loads(line)
        future = self._waiting.pop(answer['id'], None)
        if future is None or not future.set_running_or_notify_cancel():
          continue  # nobody waits any more
        if 'error' in answer:
          error = f'{self._name}: {answer["error"]}'
          if answer['id'] is None:
            error = f'{error}; if verifiers is missing, {INSTALL}'
          future.set_exception(sandbox.SandboxError(error))
        else:
          future.set_result(answer['ok'])
    self.stop()
    self._end()

  def _listen(self) -> None:
    for line in self._process.stderr:
      self._said = (self._said + line.decode(errors='replace'))[-_STDERR:]

  def _end(self) -> None:
    self._ended = True
    last = self._said.strip().rpartition('\n')[2]
    while self._waiting:
      with contextlib.suppress(KeyError, concurrent.futures.InvalidStateError):
        _, future = self._waiting.popitem()
        error = f'{self._name}: its process ended: {last}; {INSTALL}'
        future.set_exception(sandbox.SandboxError(error))


def running(python: str, env: dict[str, Any]) -> Process:
  """The process of an environment, started at most once while it lives.

  Args:
    python: the interpreter in which the environment is installed.
    env: the argument of `server.py`.
  """
  text = json.dumps(env, sort_keys=True)
  with _lock:
    found = _running.get((python, text))
    if found is None or found.ended:
      found = _running[python, text] = Process(python, text)
  return found


@atexit.register
def stop() -> None:
  """Ends all of them."""
  with _lock:
    while _running:
      _running.popitem()[1].stop()
