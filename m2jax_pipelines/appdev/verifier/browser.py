"""Chromium for the verifier: an app is served over loopback and opened by playwright.

The app is served from memory, so no part of it is a file that could be run, and nothing
else is served. Each page has its own browser context: pages share no storage, cache or
worker. What an app must not do is logged by kind: errors, requests to other origins,
dialogs, windows, navigation. Playwright finds and reads elements in an isolated world,
and so does `Meter`: a page's changes of prototypes do not reach it.
"""

import asyncio
import contextlib
import dataclasses
import http.server
import os
import threading
import time
import urllib.parse

CHROMIUM = (
  '/usr/lib/chromium/chromium',
  '/usr/lib/chromium-browser/chromium-browser',
  '/opt/google/chrome/chrome',
)
# No setuid sandbox of its own: the verifier's sandbox has no privileges to give away.
ARGUMENTS = (
  *('--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage'),
  *('--disable-quic', '--no-first-run', '--disable-background-networking'),
  *('--disable-component-update', '--disable-sync', '--disable-breakpad'),
)
LAUNCH_S, CONTROL_S, LOAD_S, CLOSE_S = 60.0, 20.0, 15.0, 5.0
MAX_DIALOGS, MAX_LOGGED = 20, 20
WIDTH, HEIGHT = 1280, 900
_TYPES = {
  '.html': 'text/html; charset=utf-8',
  '.css': 'text/css; charset=utf-8',
  '.js': 'text/javascript; charset=utf-8',
  '.json': 'application/json',
  '.svg': 'image/svg+xml',
  '.png': 'image/png',
}
# Runs before the page's scripts. An app cannot hide its errors: `console` is fixed, and
# an error whose default action is prevented is still reported.
_GUARD = """(() => {
  const report = console.error, target = console;
  for (const name of Object.keys(target))
    Object.defineProperty(target, name, {writable: false, configurable: false});
  Object.defineProperty(window, 'console',
    {value: target, writable: false, configurable: false});
  addEventListener('error', () => report('an error event'), true);
  addEventListener('unhandledrejection', () => report('a rejection'), true);
})()"""


class Broken(Exception):
  """Chromium failed or is missing: there is no verdict."""


class Crashed(Broken):
  """A page crashed by itself, while Chromium lives and nothing killed the process."""


class Unreadable(Exception):
  """A page cannot be measured, and is itself to blame."""


@dataclasses.dataclass
class Log:
  """Actions of pages that count against the app: the first of each kind."""

  errors: list = dataclasses.field(default_factory=list)
  failed: list = dataclasses.field(default_factory=list)
  external: list = dataclasses.field(default_factory=list)
  left: list = dataclasses.field(default_factory=list)
  restless: list = dataclasses.field(default_factory=list)
  crash: list = dataclasses.field(default_factory=list)
  memory: list = dataclasses.field(default_factory=list)

  def add(self, kind, text):
    found = getattr(self, kind)
    if len(found) < MAX_LOGGED:
      found.append(' '.join(str(text).split())[:200])


class Site:
  """Serves a dict of files at `origin`; `files` may be replaced between pages."""

  def __init__(self):
    self.files = {}
    site = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        name = path.lstrip('/') or 'index.html'
        data, kind = site.files.get(name), _TYPES.get(os.path.splitext(name)[1])
        status = 200 if data is not None else 404
        if name == 'favicon.ico' and data is None:
          status = 204  # browsers ask for it; an app need not have one
        self.send_response(status)
        self.send_header('Content-Type', kind or 'application/octet-stream')
        self.send_header('Content-Length', str(len(data or b'')))
        self.send_header('Cache-Control', 'no-store')
        self.send_header('X-Content-Type-Options', 'nosniff')
        self.end_headers()
        with contextlib.suppress(OSError):
          self.wfile.write(data or b'')

      def log_message(self, *unused):
        pass

    class Server(http.server.ThreadingHTTPServer):
      daemon_threads = True

      def handle_error(self, *unused):  # the browser hung up
        pass

    self._server = Server(('127.0.0.1', 0), Handler)
    self.origin = f'http://127.0.0.1:{self._server.server_port}'
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def close(self):
    self._server.shutdown()
    self._server.server_close()


class Browser:
  """A Chromium that is started again when one of its pages has stopped it.

  Raises:
    Broken: it cannot be started, or does not show the verifier's own page.
  """

  def __init__(self):
    self._playwright = self._chromium = None
    self.crashed, self._ends = '', []

  async def __aenter__(self):
    from playwright.async_api import async_playwright

    try:
      starting = async_playwright().start()
      self._playwright = await asyncio.wait_for(starting, LAUNCH_S)
    except Exception as error:
      raise Broken(f'playwright does not start: {short(error)}') from error
    await self._launch()
    return self

  async def __aexit__(self, *unused):
    await self._close()
    with contextlib.suppress(Exception):
      await asyncio.wait_for(self._playwright.stop(), CLOSE_S)

  async def _launch(self):
    path = next((p for p in CHROMIUM if os.path.exists(p)), None)
    try:
      launching = self._playwright.chromium.launch(
        executable_path=path, args=list(ARGUMENTS)
      )
      self._chromium = await asyncio.wait_for(launching, LAUNCH_S)
      session = await self._chromium.new_browser_cdp_session()
      session.on('Target.targetCrashed', self._ended)
      await session.send('Target.setDiscoverTargets', {'discover': True})
    except Exception as error:
      raise Broken(f'Chromium does not start: {short(error)}') from error

  def _ended(self, event):
    # Of Chromium's words, 'crashed' is a signal of the process itself, or an abort.
    self._ends.append(event['status'])

  async def _close(self):
    with contextlib.suppress(Exception):
      await asyncio.wait_for(self._chromium.close(), CLOSE_S)

  async def restart(self):
    """A new Chromium."""
    await self._close()
    self.crashed, self._ends = '', []
    await self._launch()

  async def control(self):
    """Shows the verifier's own page; raises Broken if that fails."""
    try:
      await asyncio.wait_for(self._control(), CONTROL_S)
    except Exception as error:
      raise Broken(f'Chromium shows no page: {short(error)}') from error

  async def _control(self):
    context = await self._chromium.new_context()
    page = await context.new_page()
    await page.set_content('<button onclick="this.textContent=`B`">A</button>')
    await page.get_by_role('button', name='A').click()
    if await page.get_by_role('button').inner_text() != 'B':
      raise Broken('a click has no effect')
    await context.close()

  @contextlib.asynccontextmanager
  async def page(self, origin, log, *, width=WIDTH, clock=False):
    """A page in a new context, not yet at the app; its actions are logged.

    Raises:
      Broken: a page crashed while it was in use, or no page can be made.
    """
    try:
      context = await asyncio.wait_for(self._context(width), CONTROL_S)
      page = await asyncio.wait_for(context.new_page(), CONTROL_S)
      if clock:
        await page.clock.install(time=1_700_000_000)
        await page.clock.pause_at(1_700_000_001)
    except Exception as error:
      raise Broken(f'no new page: {short(error)}') from error
    self._watch(context, page, origin, log)
    page.set_default_timeout(LOAD_S * 1000)
    try:
      yield page
    finally:
      if not self._chromium.is_connected():
        self.crashed = 'Chromium ended'
      crash, closed = self.crashed and await self._crash(), page.is_closed()
      try:
        await asyncio.wait_for(context.close(), CLOSE_S)
      except Exception:
        await self.restart()  # it hangs with the page's script
      if closed and not crash:
        log.add('left', 'the page was closed')
    if crash:
      raise crash

  async def _crash(self):
    """Crashed if the page is to blame, or Broken."""
    if not self._chromium.is_connected():
      return Broken(self.crashed)
    end = time.monotonic() + CLOSE_S
    while not self._ends and time.monotonic() < end:
      await asyncio.sleep(0.05)  # the event may be late
    words = ', '.join(self._ends) or 'for an unknown reason'
    alone = set(self._ends) == {'crashed'}
    return (Crashed if alone else Broken)(f'{self.crashed}: {words}')

  async def _context(self, width):
    context = await self._chromium.new_context(
      viewport={'width': width, 'height': HEIGHT},
      service_workers='block',
      accept_downloads=False,
      locale='en-US',
      timezone_id='UTC',
      reduced_motion='reduce',
      color_scheme='light',
    )
    await context.add_init_script(_GUARD)
    return context

  def _watch(self, context, page, origin, log):
    dialogs = 0

    def dialog(found):
      nonlocal dialogs
      dialogs += 1
      log.add('errors', f'{found.type}: {found.message}')
      ends = found.page.close() if dialogs > MAX_DIALOGS else found.dismiss()
      _background(ends)

    def request(found):
      if not found.url.startswith((f'{origin}/', 'data:', 'blob:')):
        log.add('external', found.url)

    def response(found):
      if found.status >= 400:
        log.add('failed', f'{found.status} {found.url}')

    def navigated(frame):
      if frame.parent_frame is None and not frame.url.startswith(f'{origin}/'):
        log.add('left', frame.url)

    def opened(other):
      if other != page:
        log.add('left', 'another window was opened')
        _background(other.close())

    def crash(_):
      self.crashed = 'a page crashed'

    def socket(found):
      log.add('external', found.url)

    def console(message):
      if message.type in ('error', 'assert'):
        log.add('errors', message.text)

    context.on('dialog', dialog)
    context.on('page', opened)
    context.on('request', request)
    context.on('response', response)
    context.on('console', console)
    context.on('weberror', lambda found: log.add('errors', found.error))
    page.on('framenavigated', navigated)
    page.on('crash', crash)
    page.on('websocket', socket)


def _background(coroutine):
  async def run():
    with contextlib.suppress(Exception):
      await asyncio.wait_for(coroutine, CLOSE_S)

  task = asyncio.ensure_future(run())
  _tasks.add(task)
  task.add_done_callback(_tasks.discard)


_tasks = set()


def short(error):
  """The first line of an error."""
  return f'{type(error).__name__}: {error}'.splitlines()[0][:200]


class Meter:
  """Evaluates scripts in an isolated world of a page's main frame."""

  def __init__(self, page, scripts):
    self._page, self._scripts, self._session = page, scripts, None

  async def measure(self):
    """The JSON value of measure.js."""
    return (await self._evaluate('measure.js', returnByValue=True))['value']

  async def handle(self, name):
    """The object that a script gives, for `call`."""
    return (await self._evaluate(name))['objectId']

  async def call(self, handle, name, *values):
    """The JSON value of a function of a handle."""
    answer = await self._session.send(
      'Runtime.callFunctionOn',
      {
        'functionDeclaration': f'function(...v) {{ return this.{name}(...v); }}',
        'objectId': handle,
        'arguments': [{'value': value} for value in values],
        'returnByValue': True,
      },
    )
    return self._result(answer).get('value')

  async def shot(self, clip):
    """A screenshot of a part of the window, in base64."""
    options = {'clip': {**clip, 'scale': 1}, 'optimizeForSpeed': True}
    return (await self._session.send('Page.captureScreenshot', options))['data']

  async def _evaluate(self, name, **options):
    if self._session is None:
      self._session = await self._page.context.new_cdp_session(self._page)
    tree = await self._session.send('Page.getFrameTree')
    world = await self._session.send(
      'Page.createIsolatedWorld', {'frameId': tree['frameTree']['frame']['id']}
    )
    context = world['executionContextId']
    call = {'expression': self._scripts[name], 'contextId': context, **options}
    return self._result(await self._session.send('Runtime.evaluate', call))

  def _result(self, answer):
    if 'exceptionDetails' in answer:
      raise Unreadable(f'the page: {str(answer["exceptionDetails"])[:200]}')
    return answer['result']
