"""Reads small requests on the gateway's loop and large ones in reader processes.

`Readers.read` gives a Reading: the checked request, and a method that encodes the part
that a plan needs. Both kinds run the same code (`dialects.parse`,
`prompts.encode`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from typing import Any, Protocol

import numpy as np
from absl import logging

from m2jax.gateway import dialects, prompts, protocol
from m2jax.gateway.config import GatewayConfig
from m2jax.gateway.errors import TOO_LARGE, ApiError, busy, invalid, too_large
from m2jax.gateway.reader_process import Compile, Encode, Read, Setup, receive, send
from m2jax.text.tokenizer import Tokenizer

_START_TIMEOUT_S = 60.0
_COMPILED = 1024  # formats that are remembered
# The child imports this package from the same path as the parent.
_MAIN = (
  'import json, sys; sys.path[:] = json.loads(sys.argv[1]); '
  'from m2jax.gateway import reader_process; reader_process.main()'
)
# A thread per CPU would cost each reader start-up time and memory without benefit.
_ONE_THREAD = {
  'OMP_NUM_THREADS': '1',
  'OPENBLAS_NUM_THREADS': '1',
  'TOKENIZERS_PARALLELISM': 'false',
}


class Reading(Protocol):
  """A request that has been read.

  Attributes:
    request: the checked request.
  """

  request: protocol.ChatRequest

  async def encode(self, part: prompts.Part) -> np.ndarray:
    """Token ids of a part. Raises ApiError (400, 413)."""


class _Inline:
  """A request that was read on the loop."""

  def __init__(self, body: bytearray, dialect: str, tokenizer: Tokenizer, template):
    self.request, self._messages = dialects.parse(body, dialect)
    self._tokenizer, self._template = tokenizer, template

  async def encode(self, part: prompts.Part) -> np.ndarray:
    tools, tokenizer = self.request.tools, self._tokenizer
    return prompts.encode(self._messages, tools, part, tokenizer, self._template)


class _Remote:
  """A request that was read in a reader process."""

  def __init__(self, readers: Readers, process: _Process, request):
    self._readers, self._process = readers, process
    self.request = request

  async def encode(self, part: prompts.Part) -> np.ndarray:
    return await self._readers.ask(self._process, Encode(part))


class Readers:
  """Reads requests. All methods except `close` run on the gateway's loop."""

  def __init__(self, config: GatewayConfig, tokenizer: Tokenizer, context_tokens: int):
    self._config = config
    self._tokenizer = tokenizer
    # Created once: it is slow for a large vocabulary.
    self._setup = Setup(
      tokenizer.to_json(), context_tokens, config.read_memory_bytes, config.template
    )
    self._threads: concurrent.futures.Executor | None = None
    # Processes start with the first large request.
    self._processes = [_Process() for _ in range(config.readers)]
    self._idle = list(self._processes)
    self._waiting: list[asyncio.Future] = []
    self._compiled: set[int] = set()  # hashes of formats

  @contextlib.asynccontextmanager
  async def read(self, body: bytearray, dialect: str) -> AsyncIterator[Reading]:
    """Reads a body; the reading is valid inside the context.

    Raises:
      ApiError: 400 if the body is invalid; 413 if reading it takes more time or memory
        than the settings allow; 429 if too many bodies are waiting.
    """
    if len(body) <= self._config.inline_bytes:
      reading = _Inline(body, dialect, self._tokenizer, self._config.template)
      if self._is_new(reading.request):
        async with self._process() as process:
          await self._compile(process, reading.request)
      yield reading
      return
    async with self._process() as process:
      request = await self.ask(process, Read(body, dialect))
      if self._is_new(request):
        await self._compile(process, request)
      yield _Remote(self, process, request)

  def _is_new(self, request: protocol.ChatRequest) -> bool:
    """Whether it has a format that no process has compiled yet."""
    return request.format is not None and _format(request) not in self._compiled

  async def _compile(self, process: _Process, request: protocol.ChatRequest):
    """Compiles a format where that can be stopped. Raises ApiError: 400."""
    limit_s, field = self._config.format_timeout_s, request.format.field
    try:
      command = Compile(request.format, bool(request.tools))
      await self.ask(process, command, limit_s)
    except ApiError as error:
      if error.status != TOO_LARGE:
        raise
      raise invalid(
        f'compiling it takes more than format_timeout_s={limit_s:g}, or too much '
        'memory: send a simpler schema',
        field,
      ) from error
    if len(self._compiled) >= _COMPILED:
      self._compiled.clear()
    self._compiled.add(_format(request))

  async def ask(
    self,
    process: _Process,
    command: Read | Encode | Compile,
    timeout_s: float | None = None,
  ) -> Any:
    """Returns a process's reply. Cancellation kills the process.

    Args:
      timeout_s: timeout of the command; the default is read_timeout_s.
    """
    if self._threads is None:
      self._threads = concurrent.futures.ThreadPoolExecutor(
        self._config.readers, 'readers'
      )
    loop = asyncio.get_running_loop()
    work = loop.run_in_executor(
      self._threads,
      process.ask,
      self._setup,
      command,
      timeout_s or self._config.read_timeout_s,
    )
    try:
      return await work
    except asyncio.CancelledError:
      process.kill()
      raise

  def close(self):
    """Kills the processes; a later request starts them again."""
    for process in self._processes:
      process.kill()
    if self._threads is not None:
      self._threads.shutdown()
      self._threads = None

  @contextlib.asynccontextmanager
  async def _process(self) -> AsyncIterator[_Process]:
    process = await self._take()
    try:
      yield process
    finally:
      self._give_back(process)

  async def _take(self) -> _Process:
    if self._idle:
      return self._idle.pop()
    if len(self._waiting) >= self._config.max_waiting_reads:
      raise busy(
        f'max_waiting_reads={self._config.max_waiting_reads} large requests are '
        'waiting to be read; try again'
      )
    turn = asyncio.get_running_loop().create_future()
    self._waiting.append(turn)
    try:
      return await turn
    except asyncio.CancelledError:
      if turn.done() and not turn.cancelled():
        self._give_back(turn.result())
      else:
        self._waiting.remove(turn)
      raise

  def _give_back(self, process: _Process):
    while self._waiting:
      turn = self._waiting.pop(0)
      if not turn.done():
        turn.set_result(process)
        return
    self._idle.append(process)


class _Process:
  """A reader process, started on demand and restarted after its exit."""

  def __init__(self):
    self._child: subprocess.Popen | None = None

  def ask(
    self, setup: Setup, command: Read | Encode | Compile, timeout_s: float
  ) -> Any:
    """Blocks until the reply. Raises ApiError, or RuntimeError for internal errors."""
    if self._child is None or self._child.poll() is not None:
      if isinstance(command, Encode):
        raise RuntimeError('the reader process exited between two steps of a request')
      self._child = self._start(setup)
    child = self._child
    late = threading.Event()

    def kill():
      late.set()
      child.kill()

    timer = threading.Timer(timeout_s, kill)
    timer.start()
    try:
      send(child.stdin, command)
      kind, value = receive(child.stdout)
    except (EOFError, OSError, ValueError):  # ValueError: closed by `kill`
      _end(child)
      if late.is_set():
        raise too_large(
          f'reading the request takes more than read_timeout_s={timeout_s:g}: send less'
        ) from None
      logging.warning('gateway: a reader process exited with code %s', child.returncode)
      raise too_large(
        'reading the request takes more than read_memory_bytes, or crashed the reader: '
        'send less'
      ) from None
    finally:
      timer.cancel()
    if kind == 'rejected':
      raise value
    if kind == 'failed':
      raise RuntimeError(f'a reader process failed: {value}')
    return value

  def kill(self):
    """Kills the process, from any thread. A later `ask` starts a new one."""
    child, self._child = self._child, None
    if child is not None:
      _end(child)

  def _start(self, setup: Setup) -> subprocess.Popen:
    child = subprocess.Popen(
      [sys.executable, '-c', _MAIN, json.dumps(sys.path)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,  # Ctrl-C is for the parent
      env={**os.environ, **_ONE_THREAD},
    )
    timer = threading.Timer(_START_TIMEOUT_S, child.kill)
    timer.start()
    try:
      send(child.stdin, setup)
      receive(child.stdout)
    except (EOFError, OSError) as error:
      _end(child)
      raise RuntimeError('a reader process did not start; see stderr') from error
    finally:
      timer.cancel()
    return child


def _format(request: protocol.ChatRequest) -> int:
  format_ = request.format
  return hash((json.dumps(format_.schema), format_.tools, bool(request.tools)))


def _end(child: subprocess.Popen):
  child.kill()
  child.wait()
  for stream in (child.stdin, child.stdout):
    with contextlib.suppress(OSError):  # unwritten data are lost
      stream.close()
