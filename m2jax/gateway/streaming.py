"""Between the engine's threads and a server's loop: tokens, results, disconnects."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any


class Watch:
  """A context that cancels the engine's work when the client disconnects."""

  def __init__(self, receive: Callable, *handles):
    self._receive, self._handles = receive, handles

  async def __aenter__(self):
    self._task = asyncio.ensure_future(self._watch())

  async def __aexit__(self, error_type, error, traceback):
    self._task.cancel()
    if error_type is not None:
      self._cancel()

  async def _watch(self):
    while (await self._receive())['type'] != 'http.disconnect':
      pass
    self._cancel()

  def _cancel(self):
    for handle in self._handles:
      handle.cancel()


def forward(
  future: concurrent.futures.Future,
  queue: asyncio.Queue,
  label: Callable[[concurrent.futures.Future], Any] = lambda done: done,
):
  """Puts the future on the queue when it is done, after all of its tokens.

  Args:
    label: what is put on the queue of the future.
  """
  loop = asyncio.get_running_loop()
  future.add_done_callback(lambda done: call_soon(loop, queue.put_nowait, label(done)))


def call_soon(loop: asyncio.AbstractEventLoop, function: Callable, *args):
  """Calls from the engine's thread; no effect if the gateway has stopped since."""
  with contextlib.suppress(RuntimeError):
    loop.call_soon_threadsafe(function, *args)
