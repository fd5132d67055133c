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


class Pings:
  """A context that sends a ping whenever nothing was sent for some time.

  What counts is what the client gets: tokens may arrive for minutes without an event,
  as those of a long tool call do. The context's value replaces `send`.
  """

  def __init__(self, send: Callable, ping: Callable[[], str], every_s: float):
    self._send, self._ping, self._every_s = send, ping, every_s

  async def __aenter__(self) -> Callable:
    self._sent_s = asyncio.get_running_loop().time()
    self._task = asyncio.ensure_future(self._run())
    return self._forward

  async def __aexit__(self, *exc):
    self._task.cancel()

  async def _forward(self, message: dict):
    if message['type'] == 'http.response.body' and not message.get('more_body'):
      self._task.cancel()  # nothing follows the last event
    await self._send(message)
    self._sent_s = asyncio.get_running_loop().time()

  async def _run(self):
    loop = asyncio.get_running_loop()
    while True:
      left_s = self._sent_s + self._every_s - loop.time()
      if left_s > 0:
        await asyncio.sleep(left_s)
      else:
        body = self._ping().encode()
        await self._forward(
          {'type': 'http.response.body', 'body': body, 'more_body': True}
        )


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
