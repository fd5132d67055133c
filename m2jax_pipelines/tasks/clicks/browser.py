"""The Chromium that all episodes of a process share, in a thread of its own.

Playwright's objects belong to one event loop, and episodes come from several; so the
browser has a loop, and `run` waits for what runs there. Each page has a new context:
nothing is left of one episode in another. A browser that crashed or hangs is replaced
for the next page; the pages that it had raise `BrowserError`, which is an
infrastructure failure, never a reward.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import re
import shutil
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from absl import logging

from m2jax import sandbox

_CALL_S, _CLOSE_S = 60.0, 10.0
_ARGUMENTS = (
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-dev-shm-usage',
  '--disable-gpu',
  '--disable-quic',
  '--disable-sync',
  '--host-resolver-rules=MAP * ~NOTFOUND',  # no name and no address is reached
  '--no-first-run',
)


class BrowserError(sandbox.SandboxError):
  """The browser failed, not the agent."""


def executable() -> str:
  """Path of Chromium: CHROMIUM of the environment, or from PATH.

  The headless shell is preferred: its pages open in about half the time.

  Raises:
    SandboxUnavailable: Chromium or playwright is missing.
  """
  try:
    import playwright  # noqa: F401
  except ModuleNotFoundError as error:
    raise sandbox.SandboxUnavailable(
      'playwright is not installed', 'pip install -e ./m2jax_pipelines'
    ) from error
  names = ('chromium-headless-shell', 'chromium')
  found = os.environ.get('CHROMIUM') or next(filter(None, map(shutil.which, names)), '')
  if not found:
    raise sandbox.SandboxUnavailable(
      'no chromium on PATH', 'apt-get install -y chromium, or set CHROMIUM'
    )
  return found


class Browser:
  """A browser, and the thread and loop that it runs in."""

  def __init__(self):
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(target=self._run, name='browser', daemon=True)
    self._thread.start()
    self._starting = asyncio.Lock()
    self._playwright: Any = None
    self._chromium: Any = None

  def _run(self):
    asyncio.set_event_loop(self._loop)
    self._loop.run_forever()

  def start(self, coroutine: Coroutine) -> concurrent.futures.Future:
    """Runs a coroutine on the browser's loop, within `_CALL_S`.

    The future raises BrowserError if the browser failed.
    """
    return asyncio.run_coroutine_threadsafe(self._guarded(coroutine), self._loop)

  async def _guarded(self, coroutine: Coroutine) -> Any:
    try:
      async with asyncio.timeout(_CALL_S):
        return await coroutine
    except Exception as error:
      if not _is_playwrights(error):
        raise
      if isinstance(error, TimeoutError):  # it hangs: the next page has another
        self._abandon()
      raise BrowserError(f'browser: {str(error).partition(chr(10))[0]!r}') from error

  async def open(self, root: Path, name: str) -> tuple[Any, Any]:
    """A new context and its page, to be closed with `closed`; on the browser's loop.

    Args:
      root: directory whose files may be loaded, and nothing else.
      name: the HTML file, relative to `root`.
    """
    chromium = await self._running()
    context = await chromium.new_context(
      locale='en-US',
      offline=True,
      reduced_motion='reduce',
      timezone_id='UTC',
      viewport={'width': 500, 'height': 500},
    )
    try:
      page = await context.new_page()
      await _confine(context, page, root)
      await page.goto((root / name).as_uri())
    except BaseException:
      await closed(context)
      raise
    return context, page

  def _abandon(self) -> None:
    ended, self._chromium = self._chromium, None
    if ended is not None:
      self._closing = asyncio.ensure_future(closed(ended))

  async def _running(self) -> Any:
    """Chromium, started or replaced if need be."""
    from playwright.async_api import async_playwright

    async with self._starting:
      if self._chromium is not None and self._chromium.is_connected():
        return self._chromium
      path = executable()
      if self._chromium is not None:
        logging.warning('the browser has ended; a new one is started')
      if self._playwright is None:
        self._playwright = await async_playwright().start()
      self._chromium = await self._playwright.chromium.launch(
        executable_path=path, args=list(_ARGUMENTS), handle_sigint=False
      )
      return self._chromium

  def close(self) -> None:
    """Ends the browser and its thread; from another thread than its own."""

    async def end():
      if self._chromium is not None:
        await closed(self._chromium)
      if self._playwright is not None:
        await self._playwright.stop()

    with contextlib.suppress(Exception):
      self.start(end()).result(2 * _CLOSE_S)
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_CLOSE_S)


def _is_playwrights(error: Exception) -> bool:
  from playwright.async_api import Error

  return isinstance(error, (Error, TimeoutError))


async def _confine(context: Any, page: Any, root: Path) -> None:
  """Only files of `root` are loaded, and no second page stays open."""
  # Decided by a pattern: a function here would be asked for each file.
  others = re.compile(rf'^(?!{re.escape(root.as_uri())}/(?!.*/\.\.))')
  await context.route(others, lambda route: route.abort())
  context.on('page', lambda other: asyncio.ensure_future(closed(other)))
  page.on('dialog', lambda dialog: asyncio.ensure_future(dialog.dismiss()))


async def closed(thing: Any) -> None:
  """Closes a page, context or browser that may have ended already."""
  with contextlib.suppress(Exception):
    async with asyncio.timeout(_CLOSE_S):
      await thing.close()


_shared: Browser | None = None
_lock = threading.Lock()


def shared() -> Browser:
  """The process's browser, closed at its end."""
  global _shared
  with _lock:
    if _shared is None:
      _shared = Browser()
      atexit.register(close)
    return _shared


def close() -> None:
  """Ends the process's browser, if it has one; a later use starts another."""
  global _shared
  with _lock:
    ended, _shared = _shared, None
  if ended is not None:
    ended.close()


async def run(coroutine: Coroutine) -> Any:
  """The result of a coroutine that runs on the browser's loop."""
  return await asyncio.wrap_future(shared().start(coroutine))
