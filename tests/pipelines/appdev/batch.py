"""Judges several apps in one sandbox with one Chromium; for tests.

`judged` runs on the host; this file is also what runs in the sandbox, where it prints
a JSON object: name → {reward, reason, criteria}. The verifier's time limits are shorter
there, as apps that hang are among those judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path


def judged(jobs, sites: Path, *, crash='', chromium='', timeout_s=300.0) -> dict:
  """Judges {name: (files, spec)}.

  Args:
    jobs: files: path in the app → bytes; spec: of the verifier.
    sites: directory for the packages of the sandbox; filled if it is empty.
    crash: where the app should be opened, a 'page' crashes, a 'process' of a page is
      killed, or the 'browser' is.
    chromium: path of the browser in the sandbox, if not the verifier's.
    timeout_s: elapsed time of all.
  """
  return asyncio.run(_judged(jobs, sites, [crash, chromium], timeout_s))


async def _judged(jobs, sites, options, timeout_s):
  from m2jax import sandbox
  from m2jax.tasks.harbor import verifier
  from m2jax_pipelines import appdev, installed

  site = installed.site(sites, 'appdev', appdev.PACKAGES)
  tests = Path(appdev.__file__).parent / 'verifier'
  places = (verifier.python(), (str(site), '/site'), (str(tests), '/tests'))
  limits = sandbox.Limits(
    cpu_s=300, wall_s=timeout_s, output_bytes=8 << 20, **appdev.NEEDS
  )
  request = {
    name: [{k: v.decode('latin-1') for k, v in files.items()}, spec]
    for name, (files, spec) in jobs.items()
  }
  contents = {
    'batch.py': Path(__file__).read_bytes(),
    'request.json': json.dumps([request, *options]).encode(),
  }
  host = sandbox.Host(read_only=places)
  try:
    async with await sandbox.create(contents=contents, limits=limits, host=host) as box:
      found = await box.exec('M2JAX_TESTS=/tests python3 -I -B batch.py')
  finally:
    await sandbox.shutdown()
  if found.returncode:
    raise RuntimeError(f'{found.returncode}: {found.stderr[-2000:]}')
  return json.loads(found.stdout)


async def _crash_page(judge, page):
  with contextlib.suppress(Exception):
    await page.goto('chrome://crash', timeout=2000)


async def _kill_process(judge, page):
  await _kill(lambda line: b'--type=renderer' in line)


async def _crash_browser(judge, page):
  await _kill(lambda line: b'--type=' not in line)


async def _kill(chosen):
  for name in filter(str.isdigit, os.listdir('/proc')):
    with contextlib.suppress(OSError):
      line = Path(f'/proc/{name}/cmdline').read_bytes()
      if b'chromium' in line.split(b'\0')[0] and chosen(line):
        os.kill(int(name), signal.SIGKILL)
  await asyncio.sleep(1)


async def _inside(request, crash, executable):
  import browser
  import grade

  browser.LOAD_S, grade.CRITERION_S, grade.MAX_HUNG = 5.0, 8.0, 1
  if executable:
    browser.CHROMIUM = (executable,)
  if crash:
    grade.Judge._open = {
      'page': _crash_page,
      'process': _kill_process,
      'browser': _crash_browser,
    }[crash]
  try:
    return await _all(request, browser, grade)
  except browser.Broken as error:
    return {name: {'invalid': str(error)} for name in request}


async def _all(request, browser, grade):
  found, site = {}, browser.Site()
  async with browser.Browser() as chromium:
    await chromium.control()
    for name, (files, spec) in request.items():
      files = {path: text.encode('latin-1') for path, text in files.items()}
      try:
        report = await grade.judge(files, spec, chromium, site)
        found[name] = {'reward': report.reward(), **report.details()}
      except browser.Broken as error:
        found[name] = {'invalid': str(error)}
        await chromium.restart()
  return found


if __name__ == '__main__':
  sys.path[:0] = ['/site', os.environ['M2JAX_TESTS']]
  with open('request.json', encoding='utf-8') as file:
    print(json.dumps(asyncio.run(_inside(*json.load(file)))))
