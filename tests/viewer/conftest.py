"""A run with what the page has to survive, and a browser to look at it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil

import pytest

from m2jax import records
from m2jax.observe import metrics
from m2jax.pool.data_pool import DataPool
from m2jax.viewer import serving
from m2jax.viewer.run import Run
from tests.viewer import example

KEY = 'the-admin-key'
HOSTILE = (
  '</script><img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
)


def completion(id_, session, turn, prompt, response, parent=None, **fields):
  n = len(response)
  return records.Completion(
    *(id_, session, turn, parent, None if parent else 'first', prompt, response),
    logprobs=[-0.25 * (i + 1) for i in range(n)],
    versions=[3] * (n - 1) + [4],
    finish_reason='stop',
    status='ok',
    started_s=100.0 + turn,
    ended_s=100.5 + turn,
    **fields,
  )


def trajectory(session, item, rank, success=1.0, text='a task', family='find'):
  call = {'function': {'name': 'sh', 'arguments': '{"cmd": "ls"}'}}
  messages = (
    {'role': 'user', 'content': text},
    {'role': 'assistant', 'reasoning_content': 'hm', 'tool_calls': [call]},
    {'role': 'tool', 'content': f'seen by {session}'},
    {'role': 'assistant', 'content': 'an answer'},
  )
  return records.Trajectory(
    *(session, item, rank, 'a/spec', family, 'answer', success, 0.5 + item, 1),
    messages=messages,
  )


def add_group(pool, item, step=None, text='a task', family='find'):
  """Two trajectories of two turns, the first of which sampled the same beginning."""
  pool.submit(records.WorkItem(item, 'a/spec', 2))
  for rank in range(2):
    s = f's{item}.{rank}'
    first = [10, 11, 12 + rank]
    pool.add_completion(completion(f'{s}-0', s, 0, [1, 2, 3], first))
    prompt = [1, 2, 3, *first, 4]
    pool.add_completion(completion(f'{s}-1', s, 1, prompt, [20, 21], f'{s}-0'))
    pool.add_trajectory(trajectory(s, item, rank, float(rank), text, family))
  pool.flush()
  if step is not None:
    pool.complete(item)
    pool.take([item], step)
    reward = lambda r: records.TrajectoryReward(0.0, 0.0, 1.0, float(r))
    pool.set_rewards(
      {f's{item}.{r}': reward(r) for r in range(2)},
      {f's{item}.{r}-{t}': 2.0 * r - 1 for r in range(2) for t in range(2)},
    )
    pool.flush()


def add_evaluation(pool, workdir, stage, sessions, time_s, temperature=1.0):
  """Trajectories that end before a time, and the record of their evaluation at it."""
  for s in sessions:
    ended = completion(f'{s}-0', s, 0, [1, 2], [3])
    pool.add_completion(dataclasses.replace(ended, ended_s=time_s - 1))
    pool.add_trajectory(trajectory(s, -1, 0))
  pool.flush()
  record = dict(schema=metrics.SCHEMA, lineage=0, time_s=time_s, phase='eval', step=4)
  record |= dict(stage=stage, split='dev', temperature=temperature, family='all')
  record |= dict(successes=float(len(sessions)), n=len(sessions))
  with open(workdir / metrics.FILE_NAME, 'a') as file:
    file.write(json.dumps(record) + '\n')


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """Groups 0 and 1 trained in step 1; 2 is not yet; an evaluation. The pool is open."""
  workdir = tmp_path_factory.mktemp('run')
  with DataPool(f'sqlite:///{workdir}/pool.db') as pool:
    add_group(pool, 0, step=1)
    add_group(pool, 1, step=1, text=HOSTILE, family='<b>trail</b>')
    add_group(pool, 2)
    pool.add_trajectory(trajectory('e0', -1, 0, text='held out'))
    pool.flush()
    yield workdir


@pytest.fixture
def run(workdir):
  opened = Run(workdir)
  yield opened
  opened.close()


@pytest.fixture(scope='module')
def link(workdir):
  """The link to the page of a server."""
  opened = Run(workdir)
  with serving.serving(opened, KEY) as link:
    yield link
  opened.close()


@pytest.fixture(scope='package')
def example_run(tmp_path_factory):
  """The run of `example`."""
  workdir = tmp_path_factory.mktemp('example')
  example.write(workdir)
  with contextlib.closing(Run(workdir)) as run:
    yield run


@pytest.fixture(scope='package')
def example_link(example_run, tmp_path_factory):
  """The link to its page, which compares it with a better run."""
  workdir = tmp_path_factory.mktemp('better')
  example.write(workdir, better=True)
  with contextlib.closing(Run(workdir)) as other:
    with serving.serving(example_run, KEY, other=other) as link:
      yield link


@pytest.fixture(scope='package')
def browser():
  """Chromium, driven by playwright, whose event loop runs in this thread meanwhile."""
  found = os.environ.get('CHROMIUM') or shutil.which('chromium')
  if not found:
    pytest.skip('no chromium on PATH: apt-get install -y chromium, or set CHROMIUM')
  from playwright.sync_api import sync_playwright

  with sync_playwright() as playwright:
    arguments = ['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage']
    chromium = playwright.chromium.launch(executable_path=found, args=arguments)
    yield chromium
    chromium.close()


def press(page, *keys):
  for key in keys:
    page.keyboard.press(key)


_DESKTOP = {'width': 1400, 'height': 900}


@contextlib.contextmanager
def checked(page):
  """The page; at the end it must have had no error and no foreign request."""
  problems, urls = [], []
  error = lambda error: problems.append(str(error))
  request = lambda request: urls.append(request.url)
  page.on('pageerror', error)
  page.on('request', request)
  page.urls = urls
  yield page
  page.remove_listener('pageerror', error)
  page.remove_listener('request', request)
  assert not problems
  known = 'http://127.0.0.1:', 'file://', 'data:', 'about:'
  assert urls and all(url.startswith(known) for url in urls), urls


@pytest.fixture(scope='package')
def _page(browser):
  with browser.new_context(viewport=_DESKTOP) as context:
    page = context.new_page()
    page.set_default_timeout(10_000)
    yield page


@pytest.fixture
def tab(_page):
  """The only tab, which is empty and as wide as a desktop."""
  _page.goto('about:blank')
  _page.set_viewport_size(_DESKTOP)
  _page.emulate_media(color_scheme='light')
  with checked(_page) as page:
    yield page


@pytest.fixture
def new_tab(browser):
  """A tab of its own, without what the page has stored in the other."""
  with browser.new_context(viewport=_DESKTOP) as context:
    with checked(context.new_page()) as page:
      page.set_default_timeout(10_000)
      yield page
