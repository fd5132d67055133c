"""The page in a real browser, from a server and as a file."""

from __future__ import annotations

import os
import re
import signal

import pytest
from playwright.sync_api import expect

from m2jax.pool.data_pool import DataPool
from m2jax.viewer import export, serving
from m2jax.viewer.run import Run
from tests import processes
from tests.viewer import conftest
from tests.viewer.conftest import press


@pytest.fixture(scope='module')
def file(workdir, tmp_path_factory):
  """The exported page; one trajectory has scores of a learner."""
  path = tmp_path_factory.mktemp('export') / 'run.html'
  run = Run(workdir)
  run.annotations.tokens('s0.1', 's0.1-0', 'entropy', 4, [0.5, 1.0, 2.0])
  run.annotations.tokens('s0.1', 's0.1-0', 'learner_logprob', 4, [-0.25, -0.5, -1.0])
  run.annotations.note('s0.1', 'looked at')
  export.write(run, path)
  run.close()
  return path


@pytest.fixture
def served(tab, file, link):
  """The tab with the page of a server, whose run has the file's annotations."""
  tab.goto(link)
  tab.wait_for_selector('.row.on')
  return tab


@pytest.fixture(params=['server', 'file'])
def opened(request, tab):
  """The tab with the page of both kinds."""
  if request.param == 'server':
    return request.getfixturevalue('served')
  tab.goto(request.getfixturevalue('file').as_uri())
  tab.wait_for_selector('.row.on')
  return tab


def test_keyboard(served):
  """List, group, trajectory, views, search, help: without a mouse; focus is visible."""
  page = served
  assert page.get_attribute('.row.on', 'id') == 'row-g1'  # the last that was trained
  press(page, 'k')
  assert page.get_attribute('.row.on', 'id') == 'row-g2'
  press(page, 'j', 'j')
  assert page.get_attribute('.row.on', 'id') == 'row-g0'
  press(page, 'k', 'ArrowDown', 'ArrowRight', 'j', 'j')
  assert page.get_attribute('.row.on', 'id') == 'row-s0.1'
  assert page.get_attribute('#row-g0', 'aria-expanded') == 'true'
  page.wait_for_selector('.transcript')
  assert page.inner_text('.call pre') == 'ls'
  assert page.inner_text('.observation pre') == 'seen by s0.1'
  press(page, '2')
  page.wait_for_selector('.tokens')
  press(page, '4')
  page.wait_for_selector('.timeline')
  press(page, 'ArrowLeft', 'ArrowLeft')
  assert page.get_attribute('#row-g0', 'aria-expanded') == 'false'
  press(page, '?')
  page.wait_for_selector('[role=dialog]')
  press(page, 'Escape')
  page.wait_for_selector('[role=dialog]', state='detached')
  assert page.evaluate('document.activeElement.id') == 'list'
  press(page, '/')
  assert page.evaluate('document.activeElement.id') == 'search'
  outline = page.evaluate('getComputedStyle(document.activeElement).outlineStyle')
  assert outline == 'solid'
  page.keyboard.type('seen by s0.1')
  expect(page.locator('.row.trajectory')).to_have_count(1)
  press(page, 'Escape')
  expect(page.locator('.row')).to_have_count(3)
  press(page, 'e')
  page.wait_for_selector('#row-e0')


def test_tokens_with_their_terms(opened):
  """Ids, terms and colours of what is recorded; a legend that says what is missing."""
  page = opened
  press(page, 'j', 'j', 'j', 'ArrowRight', 'j', 'j', '2')
  page.wait_for_selector('.tokens')
  assert page.locator('.t').count() == 9  # 7 of the prompt, of which 3 are sampled; 2
  assert page.locator('.t.own').count() == 5
  page.locator('.t.own').nth(2).hover()
  shown = page.inner_text('.inspect')
  for value in ('13', '-0.7500', '+1.00', '5.000e-2', '4', '2.0000', '-1.0000'):
    assert value in shown.split(), (value, shown)
  colors = 'els => new Set(els.map(e => getComputedStyle(e).backgroundColor)).size'
  page.select_option('.pick select', 'entropy')
  page.wait_for_selector('.legend >> text=entropy')
  assert page.locator('.legend .warn').count() == 0
  assert page.eval_on_selector_all('.t.own', colors) == 4  # three, and none for turn 1
  page.select_option('.pick select', 'mask')
  page.wait_for_selector('.legend >> text=in the loss')
  assert page.eval_on_selector_all('.t', colors) == 2
  assert 'looked at' in page.inner_text('.notes')


# The contrast of WCAG between a token's text and what is behind it, the least of all.
CONTRAST = """tokens => {
  const paint = document.createElement('canvas').getContext('2d');
  const pixel = (color) => {
    paint.fillStyle = color;
    paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3)
      .map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  };
  const light = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
  const ratio = (behind, color) => {
    const [a, b] = [behind.map(pixel).at(-1), pixel(color)].map(light);
    return Math.max(a, b) / Math.min(a, b);
  };
  const found = {};
  for (const token of tokens) {
    const behind = [], color = getComputedStyle(token).color;
    for (let e = token; e; e = e.parentElement)
      behind.unshift(getComputedStyle(e).backgroundColor);
    found[[...behind, color]] ??= ratio(behind, color);
  }
  return Math.min(...Object.values(found));
}"""


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_colours_can_be_read(tab, file, scheme):
  """Text on every scale has WCAG's contrast of 4.5, on light and dark pages."""
  tab.emulate_media(color_scheme=scheme)
  tab.goto(file.as_uri())
  tab.wait_for_selector('.row')
  press(tab, 'j', 'j', 'j', 'ArrowRight', 'j', 'j', '2')
  tab.wait_for_selector('.tokens')
  modes = ['none', 'logprob', 'entropy', 'mismatch', 'version', 'advantage', 'mask']
  for mode in modes:
    tab.select_option('.pick select', mode)
    tab.wait_for_timeout(50)
    assert tab.eval_on_selector_all('.t', CONTRAST) >= 4.5, mode


def test_prefix_tree(served):
  """The group's tree: what both sampled is one segment whose tokens have two terms."""
  page = served
  press(page, 'j', 'j', 'j')
  page.wait_for_selector('.icicle')
  assert page.locator('.icicle [role=treeitem]').count() == 5
  assert page.locator('.t.several').count() == 2
  page.locator('.t.several').first.hover()
  assert page.locator('.term').count() == 2
  page.focus('.icicle')
  press(page, 'ArrowRight', 'ArrowDown')
  text = page.inner_text('.segment')
  assert text.startswith('Segment of 1 token from position 5, 1 loss term;'), text


def test_a_trajectory_is_text_never_markup(opened):
  """Whatever a model or a tool writes, no element comes from it and no script runs."""
  page = opened
  press(page, 'ArrowRight', 'j')
  page.wait_for_selector('.transcript')
  assert page.inner_text('.step.task pre') == conftest.HOSTILE
  assert page.inner_text('.detail h2') == conftest.HOSTILE
  assert page.title().startswith(conftest.HOSTILE)
  assert page.locator('#app img').count() == 0
  assert page.locator('#app b').filter(has_text='trail').count() == 0
  assert page.evaluate('window.hacked') is None


def test_live(tab, workdir, tmp_path):
  """A group that a job adds appears by itself; a note is stored and shown."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    conftest.add_group(pool, 0)
    run = Run(tmp_path)
    with serving.serving(run, conftest.KEY) as link:
      tab.goto(link)
      tab.wait_for_selector('#row-g0.on')
      assert 'key' not in tab.url  # it stays out of the history
      conftest.add_group(pool, 1)
      tab.wait_for_selector('#row-g1')
      press(tab, 'k', 'ArrowRight', 'j')
      tab.wait_for_selector('.notes')
      press(tab, 'n')
      tab.keyboard.type('<i>odd</i>')
      tab.click('.notes button')
      tab.wait_for_selector('.notes article')
      assert '<i>odd</i>' in tab.inner_text('.notes article')
      tab.goto('about:blank')
    assert [n['text'] for n in run.annotations.of('s1.0')] == ['<i>odd</i>']
    run.close()


def test_without_the_key_the_page_asks_for_it(new_tab, link):
  """A link without its key shows a form, and nothing of the run."""
  new_tab.goto(link.partition('#')[0])
  new_tab.wait_for_selector('.keyform')
  assert new_tab.locator('.row').count() == 0
  new_tab.fill('.keyform input', conftest.KEY)
  new_tab.click('.keyform button')
  new_tab.wait_for_selector('.row')


def test_ctrl_c_ends_the_job(workdir):
  """It prints its link, answers, and ends with code 0 and without a traceback."""
  with processes.start('experiments.view', f'--workdir={workdir}') as job:
    line = job.stdout.readline()
    assert re.fullmatch(r'http://127\.0\.0\.1:\d+/view#key=\S+\n', line), line
    job.send_signal(signal.SIGINT)
    out, err = job.communicate(timeout=20)
  assert job.returncode == 0 and 'stopped' in out and 'Traceback' not in err
  assert os.stat(workdir / 'keys' / 'view').st_mode & 0o077 == 0
