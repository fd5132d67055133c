"""How the page looks: every view, light and dark, on a desktop and on a narrow screen.

SCREENSHOTS=shots python -m pytest tests/viewer/test_screenshots.py

writes shots/VIEW-SCHEME-SIZE.png for people to look at. What a program can see is
tested: nothing is wider than the screen, cut off or empty.
"""

from __future__ import annotations

import contextlib
import os
import pathlib

import pytest
from playwright.sync_api import TimeoutError

from m2jax.observe import findings, report
from tests.viewer import conftest, example
from tests.viewer.conftest import press

SIZES = {'desktop': (1400, 900), 'narrow': (420, 900)}
GROUP = ('j',) * 12
EDITED = (*GROUP, 'ArrowRight', *'jjjj')
VIEWS = {
  'list': ((), '.row.on'),
  'group-tree': (GROUP, '.icicle'),
  'group-timeline': ((*GROUP, '2'), '.timeline svg'),
  'transcript': (EDITED, '.transcript'),
  'tokens': ((*EDITED, '2'), '.tokens .t'),
  'branches': ((*EDITED, '3'), '.icicle'),
  'timeline': ((*EDITED, '4'), '.timeline table'),
  'evaluation': (('e', '#row-eval-0', 'j'), '.transcript'),
  'help': (('?',), '[role=dialog]'),
  'members': ((*GROUP, '3'), '.members .differs'),
  'flags': ((*EDITED, 'l'), '.flags [aria-pressed=true]'),
  'curves': (('v',), '.chart svg'),
  'findings': (('d',), '.finding .chart .shade'),
  'compare': (('@compare',), '.pairs tr button'),
  'pair': (('@compare', '@task'), '.members'),
}


# Elements whose text is wider than themselves, where that is neither scrolled nor shown
# by an ellipsis, and those that reach beyond the window.
TOO_WIDE = """() => [...document.querySelectorAll('#app *')].filter((e) => {
  const style = getComputedStyle(e), box = e.getBoundingClientRect();
  if (!box.width || style.visibility === 'hidden') return false;
  if (e.closest('svg, .wide > *')) return false;
  const cut = e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0
    && style.overflowX !== 'auto' && style.textOverflow !== 'ellipsis'
    && style.display !== 'inline';
  return cut || box.right > innerWidth + 1 || box.left < -1;
}).map((e) => `${e.tagName}.${e.className} ${e.textContent.slice(0, 40)}`)"""


@pytest.mark.parametrize('view', VIEWS)
def test_every_view(tab, example_link, tmp_path, view):
  """Colours change no place, so that one scheme is enough for what is too wide."""
  keys, shown = VIEWS[view]
  folder = os.environ.get('SCREENSHOTS')
  tab.goto(example_link)
  tab.wait_for_selector('.row')
  for key in keys:
    if key.startswith('#'):
      tab.wait_for_selector(key)
    elif key.startswith('@'):
      tab.locator(
        {'@compare': 'text=Compare', '@task': '.pairs button'}[key]
      ).first.click()
    else:
      press(tab, key)
  tab.wait_for_selector(shown)
  for size, (width, height) in SIZES.items():
    tab.set_viewport_size({'width': width, 'height': height})
    with contextlib.suppress(TimeoutError):  # a drawing follows a frame later
      tab.wait_for_function(f'() => !({TOO_WIDE})().length', timeout=5_000)
    assert tab.evaluate(TOO_WIDE) == [], size
    for scheme in ('light', 'dark') if folder else ('dark',):
      tab.emulate_media(color_scheme=scheme)
      path = pathlib.Path(folder or tmp_path) / f'{view}-{scheme}-{size}.png'
      assert len(tab.screenshot(path=path)) > 10_000, size  # not one colour


def test_the_report_of_findings(tab, tmp_path):
  """Each has its plot with a shaded window, and its text is no element."""
  hostile = conftest.HOSTILE + 'x' * 300
  found = example.FINDING | {'summary': hostile, 'log': [hostile]}
  rows = [{'phase': 'rl', 'step': i, 'success': 0.5 - i / 20} for i in range(6)]
  path = tmp_path / 'report.html'
  shown = findings.parse([found, found])
  report.write_report(path, rows, (), report.Summary('a run'), {}, shown)
  tab.goto(path.as_uri())
  assert tab.locator('.finding svg .shade').count() == 2
  assert tab.locator('.finding img').count() == 0
  assert tab.evaluate('window.hacked') is None
  for size, (width, height) in SIZES.items():
    tab.set_viewport_size({'width': width, 'height': height})
    assert tab.evaluate('document.documentElement.scrollWidth <= innerWidth'), size
    for scheme in 'light', 'dark':
      tab.emulate_media(color_scheme=scheme)
      folder = pathlib.Path(os.environ.get('SCREENSHOTS') or tmp_path)
      image = folder / f'report-findings-{scheme}-{size}.png'
      assert len(tab.screenshot(path=image)) > 10_000, size
