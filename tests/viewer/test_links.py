"""The address leads to a place in the run: it is kept, goes back, and can be sent."""

from __future__ import annotations

import contextlib
import re

import pytest
from playwright.sync_api import expect

from m2jax.pool.data_pool import DataPool
from m2jax.viewer import export, serving
from m2jax.viewer.run import Run
from tests.viewer import conftest
from tests.viewer.conftest import press

GROUPS = 52  # a page has 50


@pytest.fixture(scope='module', params=['server', 'file'])
def address(request, tmp_path_factory):
  """That of a run, without a fragment. Group 30 is the last that was trained; two
  stages were evaluated."""
  workdir = tmp_path_factory.mktemp('links')
  with DataPool(f'sqlite:///{workdir}/pool.db') as pool:
    for item in range(GROUPS):
      step = 1 if item == 30 else None
      conftest.add_group(pool, item, step, text=f'Ask {item}', family='find')
    conftest.add_evaluation(pool, workdir, 'after SFT', ['e0', 'e1'], 1000.0)
    conftest.add_evaluation(pool, workdir, 'after RL', ['e2'], 2000.0)
  with contextlib.closing(Run(workdir)) as run:
    if request.param == 'file':
      export.write(run, workdir / 'run.html')
      yield (workdir / 'run.html').as_uri()
    else:
      with serving.serving(run, conftest.KEY) as link:
        yield link.partition('#')[0]


@pytest.fixture
def at(tab, address):
  """Opens a place; returns the tab."""

  def at(place=''):
    tab.goto('about:blank')
    tab.goto(f'{address}#key={conftest.KEY}&{place}')
    tab.wait_for_selector('.row')
    return tab

  return at


def shows(tab, about, place):
  """Waits for a detail and its address, in which no key is."""
  expect(tab.locator('.about')).to_contain_text(about)
  expect(tab).to_have_url(re.compile(re.escape(f'#{place}') + '$'))


def test_the_last_trained_group_is_selected(at):
  tab = at()
  shows(tab, 'Group 30: 1 of 2', 'group=30')
  expect(tab.locator('#row-g30.on')).to_be_visible()
  expect(tab.locator('.detail h2')).to_have_text('Ask 30')
  expect(tab).to_have_title(re.compile('^Ask 30 · links'))
  expect(tab.locator('#row-g30 .what')).to_have_text('Ask 30')
  assert tab.locator('#row-g30 .dots i.good').bounding_box()['width'] == 6


def test_reload_and_back(at):
  """Each selection is an entry of the history, tabs and filters are of the present."""
  tab = at()
  shows(tab, 'Group 30', 'group=30')
  tab.dispatch_event('#row-g31', 'click')
  shows(tab, 'Group 31', 'group=31')
  tab.dispatch_event('#row-s31\\.1', 'click')
  shows(tab, 'Group 31, rank 1', 'session=s31.1')
  press(tab, '2')
  shows(tab, 'rank 1', 'session=s31.1&tab=tokens')
  tab.select_option('select[aria-label=outcome]', 'success')
  place = 'session=s31.1&tab=tokens&outcome=success'
  shows(tab, 'rank 1', place)
  tab.reload()
  shows(tab, 'rank 1', place)
  tab.wait_for_selector('.tokens')
  assert tab.input_value('select[aria-label=outcome]') == 'success'
  expect(tab.locator('#row-s31\\.1.on')).to_be_visible()
  expect(tab.locator('#row-s31\\.0')).to_have_count(0)
  tab.go_back()
  shows(tab, 'Group 31: 1 of 2', 'group=31')
  press(tab, 'e')
  shows(tab, 'Evaluation after RL', 'session=e2&phase=eval')
  tab.go_back()
  shows(tab, 'Group 31: 1 of 2', 'group=31')
  tab.go_back()
  shows(tab, 'Group 30', 'group=30')


@pytest.mark.parametrize(
  'place, row, about',
  [
    ('group=0', 'g0', 'Group 0: 1 of 2 succeed'),
    ('session=s0.1&tab=timeline', 's0.1', 'Group 0, rank 1'),
    ('session=e0&phase=eval&outcome=success', 'e0', 'Evaluation after SFT'),
  ],
)
def test_a_link_selects_what_is_beyond_the_first_page(at, place, row, about):
  tab = at(place)
  shows(tab, about, place)
  expect(tab.locator('.row.on')).to_have_id(f'row-{row}')


def test_what_a_link_names_and_the_run_has_not(at):
  tab = at('session=none')
  expect(tab.locator('.detail [role=alert]')).to_contain_text('none of that name')


def test_stages_filter_evaluations(at):
  tab = at('phase=eval')
  expect(tab.locator('.row')).to_have_count(3)
  stage = 'after SFT, step 4, dev, temperature 1'
  tab.select_option('select[aria-label=stage]', stage)
  expect(tab.locator('.row')).to_have_count(2)
  expect(tab).to_have_url(re.compile(r'&stage=after\+SFT'))


def test_a_search_marks_what_it_found(at):
  """In the row, which says where the text is."""
  tab = at()
  tab.fill('#search', 'SEEN by s7.1')
  expect(tab.locator('.row.trajectory mark')).to_have_text('seen by s7.1')


def test_a_legend_says_what_is_drawn(at):
  text = at().inner_text('.side .legend')
  for word in 'succeeds', 'in part', 'fails', 'not counted', 'pending', 'failed':
    assert word in text


def test_a_colleague_without_the_key(new_tab, link):
  """The page asks for it, and then shows what the link selects."""
  new_tab.goto(link.partition('#')[0] + '#session=s0.1&tab=tokens')
  new_tab.fill('.keyform input', conftest.KEY)
  new_tab.click('.keyform button')
  new_tab.wait_for_selector('.tokens')
  shows(new_tab, 'Group 0, rank 1', 'session=s0.1&tab=tokens')


@pytest.fixture
def narrow(tab):
  tab.set_viewport_size({'width': 400, 'height': 800})
  return tab


def test_a_narrow_screen_shows_list_or_detail(narrow, at):
  """The list first, whose rows can be read; then what is selected, and back again."""
  tab = at()
  assert tab.locator('.detail').is_hidden()
  what = tab.locator('#row-g51 .what').bounding_box()
  assert what['width'] > 300
  tab.dispatch_event('#row-g51', 'click')
  shows(tab, 'Group 51', 'group=51')
  assert tab.locator('.side').is_hidden()
  tab.click('.back')
  expect(tab.locator('.side')).to_be_visible()
  expect(tab).to_have_url(re.compile('(view|html)$'))
  tab.go_back()
  shows(tab, 'Group 51', 'group=51')
  press(tab, 'Escape')
  expect(tab.locator('#list')).to_be_focused()
  assert tab.locator('.detail').is_hidden()
