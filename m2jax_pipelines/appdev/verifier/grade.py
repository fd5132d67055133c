"""Agent-as-a-Verifier for a small web app: execution, interaction, visual proxies.

facts/m2-and-forge.md §5: every criterion is yes or no, with its evidence.

1. Execution, a hard gate: files, load, requests, errors, other origins, staying on the
   page, no crash, nothing that alternates. If one fails, the reward is 0.
2. Interaction: the steps of spec.json, each criterion in a new browser context, with
   inputs and data that the agent has not seen. If none passes, the reward is 0.
3. Visual: the proxies of `visual`.

Reward: the share of criteria of 2 and 3 that pass. If Chromium does not start, or ends
twice, the verdict is `invalid`. A page that crashes by itself, and a Chromium that ends
after the app has taken much memory, count against the app. So does a verifier that is
killed after `m2jax: ready`, which is printed once Chromium shows a page.
"""

import asyncio
import contextlib
import json
import os
import sys
import sysconfig
import time

TESTS = os.environ.get('M2JAX_TESTS', os.path.dirname(os.path.abspath(__file__)))
APP = 'app'
MAX_FILES, MAX_BYTES = 40, 1 << 20
CRITERION_S, TOTAL_S, MAX_HUNG = 30.0, 150.0, 2
DEADLINE_S = 260.0  # below the task's limit, so that there is a reason
SETTLE_S, SLOW_CONTROL_S = 0.1, 4.0
MAX_IMAGE_BYTES, MAX_DOM_CHARS = 200_000, 3000
MAX_GROWN_BYTES = 512 << 20  # of the 1.5 GiB of the sandbox
NARROW = 375
SCRIPTS = ('measure.js', 'seen.js', 'still.js')
IDLE_S = 2.2  # how long what is shown must not alternate
_GATE = {
  'files': f'{APP}/index.html is there; at most {MAX_FILES} files, {MAX_BYTES} bytes',
  'load': 'the page loads, with its title',
  'requests': 'no request fails',
  'errors': 'no console errors, exceptions or dialogs',
  'origin': 'no requests to other origins',
  'stays': 'the page stays open, in one window, where it is',
  'still': 'what is shown does not alternate by itself',
  'crash': 'no page crashes by itself',
  'memory': f'the browser does not crash after taking {MAX_GROWN_BYTES >> 20} MiB more',
}
_KINDS = {
  'requests': 'failed',
  'errors': 'errors',
  'origin': 'external',
  'stays': 'left',
  'still': 'restless',
  'crash': 'crash',
  'memory': 'memory',
}


class Report:
  """Criteria with their evidence, in order."""

  def __init__(self):
    self.rows, self.images, self.dom = [], {}, ''

  def add(self, layer, name, text, passed, evidence):
    self.rows.append(
      dict(layer=layer, id=name, text=text, passed=bool(passed), evidence=evidence)
    )

  def of(self, layer):
    return [row for row in self.rows if row['layer'] == layer]

  def reward(self):
    """Between 0 and 1; see the module."""
    if not all(row['passed'] for row in self.of('execution')):
      return 0.0
    if not any(row['passed'] for row in self.of('interaction')):
      return 0.0
    judged = self.of('interaction') + self.of('visual')
    return sum(row['passed'] for row in judged) / len(judged)

  def details(self):
    """details.json."""
    failed = [row for row in self.rows if not row['passed']]
    gate = [row for row in failed if row['layer'] == 'execution']
    reason = '; '.join(
      f'{row["layer"]} {row["id"]}: {row["evidence"]}' for row in (gate or failed)[:3]
    )
    log = [
      f'{"yes" if row["passed"] else "no "} {row["layer"]}/{row["id"]}: {row["text"]}\n'
      f'    {row["evidence"]}\n'
      for row in self.rows
    ]
    files = {'criteria.txt': ''.join(log), 'dom.txt': self.dom, **self.images}
    return {
      'reason': reason[:600],
      'criteria': self.rows,
      'evidence': {k: v for k, v in files.items() if v},
    }


def read_app(tree):
  """(files, what is wrong) of the app below `tree`; paths are relative to it."""
  root, found, total = os.path.join(tree, APP), {}, 0
  for directory, _, names in os.walk(root):
    for name in names:
      path = os.path.join(directory, name)
      if os.path.islink(path) or not os.path.isfile(path):
        continue
      total += os.path.getsize(path)
      if total > MAX_BYTES or len(found) >= MAX_FILES:
        return {}, f'more than {MAX_FILES} files or {MAX_BYTES} bytes'
      with open(path, 'rb') as file:
        found[os.path.relpath(path, root)] = file.read()
  return found, '' if found.get('index.html') else f'no {APP}/index.html'


class Judge:
  """Judges one app with a browser that may have judged others."""

  def __init__(self, files, spec, chromium, site, watch):
    import browser

    self._scripts = {name: read_script(name) for name in SCRIPTS}
    self._files, self._spec, self._site = files, spec, site
    self._chromium, self._watch, self._log = chromium, watch, browser.Log()
    self._report, self._hung = Report(), 0
    self._end = time.monotonic() + TOTAL_S

  async def run(self):
    """The report. Raises browser.Broken."""
    loaded = await self._load()
    if loaded:
      for criterion in self._spec['criteria']:
        passed, evidence = await self._criterion(criterion)
        text = criterion['text']
        self._report.add('interaction', criterion['id'], text, passed, evidence)
      if any(row['passed'] for row in self._report.rows):
        await self._visual()
      else:
        self._proxies('nothing works')
    self._gate(loaded)
    return self._report

  def _gate(self, loaded):
    rows = self._report.rows
    self._report.rows = []
    self._report.add('execution', 'files', _GATE['files'], True, sizes(self._files))
    said = self._loaded
    self._report.add('execution', 'load', _GATE['load'], loaded, said)
    for name, kind in _KINDS.items():
      bad = getattr(self._log, kind)
      evidence = '; '.join(bad[:3]) or 'none in any context'
      self._report.add('execution', name, _GATE[name], not bad, evidence)
    self._report.rows += rows

  async def _in_page(self, work, files=None, **options):
    """Runs `work(page)` in a new context; returns (passed, evidence)."""
    import browser

    self._site.files = {**self._files, **(files or {})}
    if self._hung >= MAX_HUNG:
      return False, f'not tried: the app hung {self._hung} times'
    if time.monotonic() > self._end:
      await self._blame()
      return False, f'not tried: the app took more than {TOTAL_S:.0f} s'
    self._watch.reset()
    try:
      return await self._used(work, options)
    except browser.Broken as error:
      grown = self._watch.grown_bytes
      if grown >= MAX_GROWN_BYTES:
        self._log.add('memory', f'{error}, after {grown >> 20} MiB more were taken')
      elif isinstance(error, browser.Crashed):
        await self._chromium.control()
        self._log.add('crash', str(error))
      else:
        raise
    self._hung += 1
    await self._chromium.restart()
    await self._chromium.control()
    return False, 'the app crashed the page, or took the memory of the browser'

  async def _used(self, work, options):
    import browser
    import steps
    from playwright.async_api import Error

    opened = self._chromium.page(self._site.origin, self._log, **options)
    async with opened as page:
      try:
        evidence = await asyncio.wait_for(work(page), CRITERION_S)
        await asyncio.sleep(SETTLE_S)
        return True, evidence
      except steps.Unmet as error:
        failed = str(error)
      except (Error, browser.Unreadable) as error:  # it closed, or is no document
        failed = f'the page cannot be read: {browser.short(error)}'
      except TimeoutError:
        self._hung += 1
        failed = f'the page did not answer within {CRITERION_S:.0f} s'
    await self._blame()
    return False, failed

  async def _blame(self):
    """Raises Broken if time was lost by this machine, not by the app."""
    import browser

    started = time.monotonic()
    await self._chromium.control()
    if time.monotonic() - started > SLOW_CONTROL_S:
      raise browser.Broken('this machine is too slow')

  async def _open(self, page):
    import browser
    import steps

    try:
      await page.goto(f'{self._site.origin}/', wait_until='load')
    except Exception as error:
      what = browser.short(error)
      raise steps.Unmet(f'the page does not load: {what}') from error

  async def _load(self):
    import steps

    async def work(page):
      await self._open(page)
      await asyncio.sleep(SETTLE_S)
      title = steps.plain(await page.title())
      if title != self._spec['title']:
        raise steps.Unmet(f'the title is {title!r}')
      return f'title {title!r}'

    passed, self._loaded = await self._in_page(
      work, encoded(self._spec.get('view_files'))
    )
    return passed

  async def _criterion(self, criterion):
    import steps

    async def work(page):
      runner = steps.Runner(page, self._scripts)
      await self._open(page)
      try:
        await runner.run(criterion['steps'])
      except steps.Unmet:
        await self._picture(page, 'failed')
        raise
      return '; '.join(runner.evidence)[-700:]

    clock = bool(self._spec.get('clock'))
    return await self._in_page(work, encoded(criterion.get('files')), clock=clock)

  async def _visual(self):
    import browser
    import steps
    import visual

    pages, shots = [], []

    async def work(page):
      await self._open(page)
      try:
        await steps.Runner(page, self._scripts).run(self._spec['view'])
      except steps.Unmet:
        async with self._watched(page):
          pass
        raise
      async with self._watched(page) as meter:
        for width in (browser.WIDTH, NARROW):
          await page.set_viewport_size({'width': width, 'height': browser.HEIGHT})
          await asyncio.sleep(SETTLE_S)
          pages.append(await meter.measure())
          shots.append(await self._picture(page, f'width-{width}'))
        snapshot = await page.locator('body').aria_snapshot(timeout=steps.ACTION_MS)
        self._report.dom = snapshot[:MAX_DOM_CHARS]

    clock, files = bool(self._spec.get('clock')), encoded(self._spec.get('view_files'))
    passed, evidence = await self._in_page(work, files, clock=clock)
    if not passed:
      return self._proxies(evidence)
    for name, fine, what in visual.judge(pages, shots[0]):
      self._report.add('visual', name, visual.PROXIES[name], fine, what)

  @contextlib.asynccontextmanager
  async def _watched(self, page):
    """Nothing of the page may alternate for `IDLE_S`."""
    import browser

    end, meter = time.monotonic() + IDLE_S, browser.Meter(page, self._scripts)
    watching = await meter.handle('still.js')
    yield meter  # nothing more of a page that failed in between
    await asyncio.sleep(max(end - time.monotonic(), 0))
    for what in await meter.call(watching, 'stop'):
      self._log.add('restless', what)

  def _proxies(self, why):
    import visual

    for name, text in visual.PROXIES.items():
      self._report.add('visual', name, text, False, f'not measured: {why}')

  async def _picture(self, page, name):
    """A screenshot, kept as evidence unless it is large."""
    import visual

    try:
      png = await page.screenshot(timeout=5000)
    except Exception:
      if name == 'failed':
        return b''
      raise
    if len(png) <= MAX_IMAGE_BYTES:
      self._report.images[f'{name}.png'] = visual.encoded(png)
    return png


def read_script(name):
  """The text of a script beside this file."""
  with open(os.path.join(TESTS, name), encoding='utf-8') as file:
    return file.read()


def encoded(files):
  """Files of the spec, as bytes."""
  return {name: text.encode() for name, text in (files or {}).items()}


def sizes(files):
  """A line about an app's files."""
  shown = ', '.join(f'{name} {len(data)}' for name, data in sorted(files.items())[:6])
  return f'{len(files)} files (bytes): {shown}'


async def judge(files, spec, chromium, site):
  """The report on an app. A crash is tried again once; raises browser.Broken."""
  import browser
  import memory

  with memory.Watch() as watch:
    try:
      return await Judge(files, spec, chromium, site, watch).run()
    except browser.Broken:
      await chromium.restart()
      await chromium.control()
      return await Judge(files, spec, chromium, site, watch).run()


async def verdict(tree, spec):
  """(reward, details.json) of the app below a tree."""
  import browser

  files, wrong = read_app(tree)
  if wrong:
    report = Report()
    report.add('execution', 'files', _GATE['files'], False, wrong)
    return 0.0, report.details()
  site = browser.Site()
  try:
    async with browser.Browser() as chromium:
      await chromium.control()
      print('m2jax: ready', flush=True)
      report = await judge(files, spec, chromium, site)
  except browser.Broken as error:
    return 0.0, {'invalid': f'infrastructure: {error}'}
  finally:
    site.close()
  return report.reward(), report.details()


async def bounded(judging):
  """The verdict. Apps time out much earlier: the machine is to blame for a late one."""
  try:
    return await asyncio.wait_for(judging, DEADLINE_S)
  except TimeoutError:
    return 0.0, {'invalid': f'infrastructure: no verdict within {DEADLINE_S:.0f} s'}


def main():
  sys.path[:0] = [os.environ.get('M2JAX_SITE') or sysconfig.get_path('purelib'), TESTS]
  with open(os.path.join(TESTS, 'spec.json'), encoding='utf-8') as file:
    spec = json.load(file)
  tree = os.environ.get('M2JAX_TREE', '/workspace')
  reward, details = asyncio.run(bounded(verdict(tree, spec)))
  logs = os.environ.get('M2JAX_LOGS', '/logs/verifier')
  os.makedirs(logs, exist_ok=True)
  with open(os.path.join(logs, 'details.json'), 'w', encoding='utf-8') as file:
    json.dump(details, file)
  if 'invalid' not in details:
    with open(os.path.join(logs, 'reward.txt'), 'w', encoding='utf-8') as file:
      file.write(str(reward))


if __name__ == '__main__':
  main()
