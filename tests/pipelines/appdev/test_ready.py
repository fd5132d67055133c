"""A verifier that is killed: before it judges an app nobody's fault, later the app's.

Without a browser: a module in its place says when the verifier is killed, as the kernel
does for want of memory.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random

import pytest

from m2jax import sandbox
from m2jax.tasks import harbor
from m2jax_pipelines import appdev
from m2jax_pipelines.appdev import kinds

pytest.importorskip('playwright', reason='pip install -e ./m2jax_pipelines')
_KILL = 'os.kill(os.getpid(), 9)'
# A process that takes memory until it has been measured, and gives it back.
_TAKE = (
  "subprocess.run([sys.executable, '-c', "
  "'import time; x = bytearray(%d << 20); time.sleep(1)']); "
  "raise Broken('a page crashed')"
)
_BROWSER = """\
import os
import subprocess
import sys


class Broken(Exception):
  pass


class Crashed(Broken):
  pass


class Log:
  def __init__(self):
    self.errors = self.failed = self.external = self.left = self.restless = ()
    self.memory, self.crash = [], []

  def add(self, kind, text):
    getattr(self, kind).append(text)


class Site:
  origin = ''

  def close(self):
    pass


class Browser:
  async def __aenter__(self):
    return self

  async def __aexit__(self, *unused):
    pass

  async def control(self):
    {control}

  async def restart(self):
    pass

  def page(self, *unused, **options):
    {page}
"""
_ERROR = b'class Error(Exception):\n  pass\n'


@pytest.mark.parametrize(
  'control, page, outcome, reason',
  [
    (_KILL, 'pass', harbor.INVALID, 'exited with'),
    ('raise Broken("no page")', 'pass', harbor.INVALID, 'no page'),
    ('pass', _KILL, harbor.FAILED, 'exited with'),
    ('pass', 'raise Broken("gone")', harbor.INVALID, 'gone'),
    ('pass', 'raise Crashed("by itself")', harbor.FAILED, 'by itself'),
    ('pass', _TAKE % 100, harbor.INVALID, 'a page crashed'),
    ('pass', _TAKE % 800, harbor.FAILED, 'MiB more'),
  ],
)
def test_what_a_killed_verifier_means(tmp_path, control, page, outcome, reason):
  """A Chromium that fails is the app's doing only if it has taken much memory, or if
  a page crashed by itself."""
  app = kinds.DRAWERS['counter'](random.Random(0))
  draft = appdev.drafted(app, 'counter/0')
  tests = {
    **draft.tests,
    'browser.py': _BROWSER.format(control=control, page=page).encode(),
    'playwright/__init__.py': b'',
    'playwright/async_api.py': _ERROR,
  }
  metadata = dataclasses.replace(draft.metadata, verifier_site='')
  draft = dataclasses.replace(draft, tests=tests, metadata=metadata)
  task = harbor.of_directory(
    harbor.read(harbor.write(draft, tmp_path / 'tasks' / 'train'))
  )

  async def attempt():
    try:
      async with task.open() as environment:
        await task.solve(environment)
        return await task.judge(environment)
    finally:
      await sandbox.shutdown()

  verdict = asyncio.run(attempt())
  assert verdict.outcome == outcome and reason in verdict.reason, verdict
