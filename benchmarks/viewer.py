"""How soon the trajectory page of a large run paints, from a server and as a file.

  python -m benchmarks.viewer --pool_mb=100

Writes a pool of that size with random tokens, exports it (not with --nofile), and opens
both forms in headless Chromium, --opens times; prints medians. `paint`: first
contentful paint; `list`: rows of the list are there; `tokens`: a trajectory in the
middle has its tokens on the screen.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import statistics
import tempfile
import time

import numpy as np
from absl import app, flags

from m2jax import records
from m2jax.pool.data_pool import DataPool
from m2jax.viewer import export, serving
from m2jax.viewer.run import Run

POOL_MB = flags.DEFINE_integer('pool_mb', 100, 'Size of the pool.', lower_bound=1)
OPENS = flags.DEFINE_integer('opens', 3, 'How often each is opened.', lower_bound=1)
FILE = flags.DEFINE_bool('file', True, 'Whether the file is written and opened.')
JSON = flags.DEFINE_bool('json', False, 'Print one JSON object instead of a table.')

_GROUP, _TURNS, _PROMPT, _RESPONSE = 8, 4, 200, 400
_KEY = 'key'


def _add_item(pool: DataPool, item: int, rng: np.random.Generator) -> None:
  pool.submit(records.WorkItem(item, f'random/train/words/{item}', _GROUP))
  first = rng.integers(0, 50_000, _PROMPT)
  for rank in range(_GROUP):
    session, prompt, parent = f'rl-{item}-{rank}', first, None
    for turn in range(_TURNS):
      response = rng.integers(0, 50_000, _RESPONSE)
      completion = records.Completion(
        f'{session}-{turn}',
        session,
        turn,
        parent,
        None,
        prompt,
        response,
        -rng.exponential(1.0, _RESPONSE),
        np.full(_RESPONSE, item // 16),
        'stop',
        'ok',
        started_s=1e9 + item + turn,
        ended_s=1e9 + item + turn + 0.7,
      )
      pool.add_completion(completion)
      parent = completion.id
      prompt = np.concatenate([prompt, response, rng.integers(0, 50_000, 20)])
    texts = [' '.join(map(str, rng.integers(0, 10**6, 200))) for _ in range(_TURNS)]
    messages = tuple({'role': 'assistant', 'content': text} for text in texts)
    pool.add_trajectory(
      records.Trajectory(
        *(session, item, rank, f'random/train/words/{item}', 'words', 'answer'),
        float(rank % 2),
        3.0,
        _TURNS,
        messages=messages,
      )
    )


def _make(workdir: pathlib.Path) -> int:
  """Writes the pool; returns the number of its items."""
  rng, item = np.random.default_rng(0), 0
  with DataPool(f'sqlite:///{workdir}/pool.db') as pool:
    while True:
      for _ in range(20):
        _add_item(pool, item, rng)
        item += 1
      pool.flush()
      if sum(p.stat().st_size for p in workdir.glob('pool.db*')) > POOL_MB.value * 1e6:
        pool.ledger()  # moves the log into the file
        return item


def _open(browser, url: str, middle: int) -> dict[str, float]:
  """Seconds from opening the page."""
  page = browser.new_page(viewport={'width': 1400, 'height': 900})
  page.set_default_timeout(120_000)
  started = time.perf_counter()
  page.goto(url, wait_until='commit')
  page.wait_for_selector('.row')
  listed_s = time.perf_counter() - started
  for _ in range(middle):
    page.keyboard.press('j')
  page.keyboard.press('ArrowRight')
  page.keyboard.press('j')
  started = time.perf_counter()
  page.keyboard.press('2')
  page.wait_for_selector('.tokens .t')
  tokens_s = time.perf_counter() - started
  paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
  row = {
    'paint_s': page.evaluate(paint) / 1e3,
    'list_s': listed_s,
    'tokens_s': tokens_s,
  }
  page.close()
  return row


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
  return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def main(_):
  from playwright.sync_api import sync_playwright

  with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
    workdir = pathlib.Path(directory)
    items = _make(workdir)
    run = stack.enter_context(contextlib.closing(Run(workdir)))
    places = {'server': stack.enter_context(serving.serving(run, _KEY))}
    found = {'pool_mb': (workdir / 'pool.db').stat().st_size / 1e6, 'items': items}
    if FILE.value:
      started = time.perf_counter()
      found['file_mb'] = export.write(run, workdir / 'run.html') / 1e6
      found['export_s'] = time.perf_counter() - started
      places['file'] = (workdir / 'run.html').as_uri()
    playwright = stack.enter_context(sync_playwright())
    browser = playwright.chromium.launch(
      executable_path=shutil.which('chromium'), args=['--no-sandbox', '--disable-gpu']
    )
    middle = min(40, items // 2)
    for name, url in places.items():
      found[name] = _median([_open(browser, url, middle) for _ in range(OPENS.value)])
    browser.close()
  if JSON.value:
    print(json.dumps(found))
    return
  print(f'pool {found["pool_mb"]:.0f} MB, {items} groups')
  if FILE.value:
    size, seconds = found['file_mb'], found['export_s']
    print(f'file {size:.0f} MB, written in {seconds:.0f} s')
  print(f'{"":8}{"paint":>9}{"list":>9}{"tokens":>9}')
  for name in places:
    cells = ''.join(f'{v:8.2f}s' for v in found[name].values())
    print(f'{name:8}{cells}')


if __name__ == '__main__':
  app.run(main)
