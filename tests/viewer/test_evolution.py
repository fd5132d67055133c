"""The evolution page in a real browser, from a server and as a file."""

from __future__ import annotations

import os
import pathlib
import re
import signal

import httpx
import pytest
from playwright.sync_api import expect

from m2jax.evolve.page import serving
from m2jax.evolve.page.source import Source
from tests import processes
from tests.evolve.page import records
from tests.viewer.conftest import KEY, press
from tests.viewer.test_page import CONTRAST
from tests.viewer.test_screenshots import TOO_WIDE

IN_VIEW = """() => {
  const of = (name) => document.querySelector(name).getBoundingClientRect();
  const box = of('.lineage'), node = of('.node[aria-selected=true] .ring');
  return node.left >= box.left && node.right <= box.right
    && node.top >= box.top && node.bottom <= box.bottom;
}"""
SIZES = {'desktop': (1300, 900), 'narrow': (400, 900)}


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """A workdir with its page as a file."""
  return written(tmp_path_factory.mktemp('small'), records.small())


@pytest.fixture(scope='module')
def long(tmp_path_factory):
  """The same of 300 rounds."""
  return written(tmp_path_factory.mktemp('long'), records.long(300))


def written(workdir, lines):
  records.write(workdir, lines)
  serving.write(Source(workdir), workdir / 'evolution.html')
  return workdir


@pytest.fixture(params=['server', 'file'])
def opened(request, tab, small):
  """The tab with the page of both kinds."""
  if request.param == 'file':
    show(tab, small)
    yield tab
  else:
    with serving.served(Source(small), KEY) as link:
      tab.goto(link)
      tab.wait_for_selector('#round .looks')
      yield tab
      tab.goto('about:blank')


def show(tab, workdir):
  tab.goto((workdir / 'evolution.html').as_uri())
  tab.wait_for_selector('#round .costs')


def rounds(tab):
  return [int(text) for text in tab.locator('.rounds td:first-child').all_inner_texts()]


def test_a_round_and_its_evidence(opened):
  """The last keep is open; a click selects, filters choose; texts are no markup."""
  page = opened
  lead = page.inner_text('.lead')
  assert lead.startswith('4 of 300 rounds are done: 1 kept, 1 reverted, 2 rejected')
  assert '100 % [89.3, 100.0], n = 32' in lead and '37.5 %' in lead
  assert '2 of 10' in page.inner_text('.state .facts')
  assert page.inner_text('#round h2').split() == ['Round', '1', 'kept']
  assert page.inner_text('#round .note-text') == records.HOSTILE.replace(
    '\u202e', '⟨U+202E⟩'
  )
  cells = page.locator('.looks tbody td').all_inner_texts()
  assert cells == ['16', '+75.0 pp', '[+50.0, +93.8]', '8.32', '8.92', '12', '0', '0']
  assert page.inner_text('#round .add') == '+  "temperature": 0.999'
  assert page.locator('img, .evolution b b').count() == 0
  assert page.evaluate('window.hacked') is None
  page.click('#node-2')
  expect(page.locator('#round h2')).to_contain_text('Round 2')
  assert 'hopeless' in page.inner_text('#round .reason')
  assert 'Sealed' not in page.inner_text('body') and not page.query_selector('.sealed')
  assert rounds(page) == [4, 3, 2, 1]
  page.click('.choices >> text=static checks')
  assert rounds(page) == [3]
  page.click('.rounds tr:has-text("bait")')
  expect(page.locator('#round .problems')).to_have_text('seed: an unknown field')
  expect(page.locator('#round .changes')).to_contain_text('seed')
  page.click('.choices >> text=all')
  page.fill('.tools input', 'does not ANSWER')
  assert rounds(page) == [4]
  page.wait_for_function('() => location.hash.includes("round=3")')
  assert 'key' not in page.url
  assert page.inner_text('.keeps tbody tr').startswith('1\tsampling.temperature\t+75.0')
  assert '+  "temperature": 0.999' in page.inner_text('[aria-labelledby=final-title]')


def test_keyboard(opened):
  """The graph: rounds, parents and children; focus is visible and Enter reads."""
  page = opened
  page.focus('.lineage')
  assert page.get_attribute('.lineage', 'aria-activedescendant') == 'node-1'
  press(page, 'ArrowRight')
  expect(page.locator('#node-2')).to_have_attribute('aria-selected', 'true')
  press(page, 'ArrowUp')
  expect(page.locator('#node-1')).to_have_attribute('aria-selected', 'true')
  press(page, 'ArrowUp', 'ArrowUp')
  expect(page.locator('#round h2')).to_have_text('The start')
  expect(page.locator('#round')).to_contain_text('"temperature": 1.0')
  press(page, 'ArrowDown')
  expect(page.locator('#node-1')).to_have_attribute('aria-selected', 'true')
  press(page, 'End', 'ArrowRight')
  expect(page.locator('#round h2')).to_contain_text('Round 4')
  press(page, 'Home', 'Enter')
  assert page.evaluate('document.activeElement.id') == 'round'
  outline = page.evaluate('getComputedStyle(document.activeElement).outlineStyle')
  assert outline == 'solid'


def test_live(tab, tmp_path):
  """Rounds that are added appear; the selection stays; --fresh begins anew."""
  lines = records.small()
  records.write(tmp_path, lines[:9])
  with serving.served(Source(tmp_path), KEY) as link:
    tab.goto(link)
    tab.wait_for_selector('#node-1')
    tab.click('#node-0')
    records.write(tmp_path, lines[9:], 'a')
    tab.wait_for_selector('#node-4')
    expect(tab.locator('#round h2')).to_have_text('The start')
    expect(tab.locator('.state')).to_contain_text('Round 5: static checks')
    fresh = [records.begin() | {'time_s': 1.8e9}, records.baseline(16, 0)]
    records.write(tmp_path, fresh)
    expect(tab.locator('.lead')).to_contain_text('the start is still the incumbent')
    expect(tab.locator('.lead')).to_contain_text('100 %')
    assert tab.locator('.node').count() == 1
    tab.goto('about:blank')


def test_who_may_ask(small):
  """No key, a foreign Host, an unknown or wrong parameter: an error, no data."""
  with serving.served(Source(small), KEY) as link:
    url = link.partition('/view')[0] + '/view'
    page = httpx.get(url)
    assert "default-src 'none'" in page.headers['content-security-policy']
    assert 'cooler' not in page.text
    key = {'Authorization': f'Bearer {KEY}'}
    for path in ('evolution', 'round/1', 'final'):
      ask = lambda path, **headers: httpx.get(f'{url}/api/{path}', headers=headers)
      assert ask(path).status_code == 401
      assert ask(path, **key | {'Host': 'evil.example'}).status_code in (403, 421)
      assert ask(path, **key).status_code == 200
    wrong = {'evolution?x=1': 400, 'evolution?after=-1': 400, 'round/x': 400}
    wrong |= {'round/77': 404, f'evolution?identity={"a" * 99}': 400}
    for path, status in wrong.items():
      assert ask(path, **key).status_code == status, path


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_how_it_looks(tab, small, tmp_path, scheme):
  """Nothing is wider than the screen, and text on diffs and buttons has contrast."""
  tab.emulate_media(color_scheme=scheme)
  show(tab, small)
  photograph(tab, tmp_path, f'evolution-small-{scheme}')
  texts = '.diff span, .choices button, .badge, .up, .down, .problems li, td .soft'
  tab.click('#node-3')
  tab.wait_for_selector('.problems')
  assert tab.eval_on_selector_all(texts, CONTRAST) >= 4.5


@pytest.mark.long
def test_three_hundred_rounds(tab, long, tmp_path):
  """All are reachable; the graph scrolls to what is selected; a page of the table."""
  show(tab, long)
  photograph(tab, tmp_path, 'evolution-long')
  assert tab.locator('.sealed tr').count() == 2
  assert '+30.0 pp [+5.0, +55.0]' in tab.inner_text('.sealed')
  assert tab.locator('.plot .second').count() == 5
  assert tab.locator('.plot .score.keep').count() == 5
  tab.focus('.lineage')
  press(tab, 'Home')
  tab.wait_for_selector('#node-0[aria-selected=true]')
  tab.wait_for_function(IN_VIEW)
  for key in ('End', 'ArrowUp', 'ArrowLeft'):
    press(tab, key)
    tab.wait_for_function(IN_VIEW)
  seen = rounds(tab)
  while tab.locator('.pages >> text=Older').count():
    tab.click('.pages >> text=Older')
    seen += rounds(tab)
  assert seen == list(range(300, 0, -1))
  tab.click('.choices >> text=static checks')
  decided = tab.locator('.rounds td:nth-child(2)').all_inner_texts()
  assert len(decided) == 92 and {x.strip() for x in decided} == {
    'rejected: static checks'
  }


@pytest.mark.long
def test_ten_thousand_rounds(tab, tmp_path):
  """What is beyond the view has no element; a key still selects."""
  show(tab, written(tmp_path, records.long(10_000)))
  assert tab.evaluate("document.querySelectorAll('#app *').length") < 10_000
  tab.focus('.lineage')
  press(tab, 'End')
  expect(tab.locator('#round h2')).to_contain_text('Round 10000')


def test_the_command(small, tmp_path):
  """experiments.view finds the record, writes the file, and serves until Ctrl-C."""
  path = tmp_path / 'page.html'
  flags = f'--workdir={small}', f'--export={path}'
  done = processes.run('experiments.view', *flags, timeout_s=120)
  assert done.returncode == 0 and path.stat().st_size > 10_000, done.stderr
  with processes.start('experiments.view', f'--workdir={small}') as job:
    line = job.stdout.readline()
    assert re.fullmatch(r'http://127\.0\.0\.1:\d+/view#key=\S+\n', line), line
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=20)
  assert job.returncode == 0 and 'stopped' in out and 'Traceback' not in err


def photograph(tab, tmp_path, name):
  folder = pathlib.Path(os.environ.get('SCREENSHOTS') or tmp_path)
  for size, (width, height) in SIZES.items():
    tab.set_viewport_size({'width': width, 'height': height})
    tab.wait_for_function(f'() => !({TOO_WIDE})().length')
    assert tab.evaluate('document.documentElement.scrollWidth') <= width
    tab.screenshot(path=folder / f'{name}-{size}.png', full_page=True)
