"""A finished run as one HTML file that needs no server and no network.

The index of all trajectories comes first, then the script, then one element per rollout
group (and per 50 evaluations) with its bundle. Each is JSON, compressed with gzip and
written in base64, which the browser decompresses when it is opened: it shows the list
while it still reads the rest of the file. Writing needs one group in memory.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from m2jax.pool.pages import LISTED, PHASES, Condition
from m2jax.viewer import page
from m2jax.viewer.run import Run

_EVALUATIONS = 50  # per element
_SESSION = LISTED.index('session')


def write(
  run: Run,
  path: str | os.PathLike,
  on_progress: Callable[[float], None] = lambda fraction: None,
) -> int:
  """Writes the page; replaces an old one only when the new one is complete.

  Args:
    run: what to write; what is added meanwhile may be left out.
    path: the HTML file's path.
    on_progress: is passed the fraction that is done.

  Returns:
    The number of bytes.

  Raises:
    OSError: the file cannot be written.
  """
  path = pathlib.Path(path)
  items, training = _all(run, 'rl')
  _, evaluations = _all(run, 'eval')
  chunks = [
    [row[_SESSION] for row in evaluations[i : i + _EVALUATIONS]]
    for i in range(0, len(evaluations), _EVALUATIONS)
  ]
  noted = run.annotations.counts()
  index = {
    'summary': run.summary(),
    'items': items,
    'rl': training,
    'eval': evaluations,
    'evaluations_per_chunk': _EVALUATIONS,
    'noted': noted,
    'curves': run.curves(),
    'edges': {p: run.reader.histogram(Condition(p))['edges'] for p in PHASES},
  }
  html = page.exported(run.title)
  temporary = path.with_name(path.name + '.new')
  total = max(1, len(items) + len(chunks))
  with open(temporary, 'w', encoding='utf-8') as out:
    out.write(html.head + element('index', index) + html.script)
    for done, (item, *_) in enumerate(items):
      out.write(element(f'group-{item}', _noted(run, run.bundles.group(item), noted)))
      on_progress((done + 1) / total)
    for done, sessions in enumerate(chunks):
      bundle = _noted(run, run.bundles.sessions(sessions), noted)
      out.write(element(f'eval-{done}', bundle))
      on_progress((len(items) + done + 1) / total)
    out.write(page.TAIL)
    size = out.tell()
  os.replace(temporary, path)
  return size


def _all(run: Run, phase: str) -> tuple[list, list]:
  """The items and trajectories of a phase, the newest first."""
  assert phase in PHASES
  items, rows, before = [], [], None
  while True:
    found = run.reader.page(Condition(phase), before, n=200)
    items += found.items
    rows += found.rows
    if (before := found.before) is None:
      return items, rows


def _noted(run: Run, bundle: dict[str, Any] | None, noted: dict[str, int]):
  if bundle is None:
    return None
  sessions = [t['session'] for t in bundle['trajectories'] if t['session'] in noted]
  return bundle | {'annotations': {s: run.annotations.of(s) for s in sessions}}


def element(name: str, value: Any) -> str:
  """A value as an element of the page, which `unpack` in data.js reads."""
  packed = gzip.compress(json.dumps(value, separators=(',', ':')).encode(), 6)
  text = base64.b64encode(packed).decode()
  # Base64 has no character that could end the element.
  return f'<script type="application/gzip" id="data-{name}">{text}</script>\n'
