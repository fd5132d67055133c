"""The address leads to a place in the run: it is kept, goes back, and can be sent."""

from __future__ import annotations

import contextlib
import re
import urllib.parse

import pytest
from playwright.sync_api import expect

from m2jax.observe import findings, metrics
from m2jax.pool.data_pool import DataPool
from m2jax.viewer import export, serving
from m2jax.viewer.run import Run
from tests.viewer import conftest
from tests.viewer.conftest import press

GROUPS = 52  # a page has 50
FINDING = {
  'kind': f'kind {conftest.HOSTILE}',
  'summary': f'the success rises {conftest.HOSTILE}',
  'phase': 'rl',
  'first_step': 2,
  'last_step': 2,
  'evidence': [{'name': 'success', 'steps': [2], 'values': [0.5], 'threshold': 0.4}],
  'log': [conftest.HOSTILE],
  'causes': [{'text': conftest.HOSTILE, 'field': conftest.HOSTILE}],
}


@pytest.fixture(scope='module', params=['server', 'file'])
def address(request, tmp_path_factory):
  """That of a run, without a fragment. Groups 29 and 30 were trained, in steps 1 and 2;
  two stages were evaluated; a trajectory has a flag."""
  workdir = tmp_path_factory.mktemp('links')
  with DataPool(f'sqlite:///{workdir}/pool.db') as pool:
    for item in range(GROUPS):
      step = {29: 1, 30: 2}.get(item)
      conftest.add_group(pool, item, step, text=f'Ask {item}', family='find')
    with metrics.MetricsWriter(workdir, use_tensorboard=False) as writer:
      for step in (1, 2):
        writer.write('rl', step, reward=0.5, success=0.25 * step)
    conftest.add_evaluation(pool, workdir, 'after SFT', ['e0', 'e1'], 1000.0)
    conftest.add_evaluation(pool, workdir, 'after RL', ['e2'], 2000.0)
  findings.write(workdir, [FINDING])
  with contextlib.closing(Run(workdir)) as run:
    run.annotations.flag('s29.1', 'hacked', True)
    run.annotations.flag('s29.1', 'look', True)
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


def test_two_backs_in_quick_succession(at):
  """What the first one shows is not written over the address of the second."""
  tab = at('group=30')
  shows(tab, 'Group 30', 'group=30')
  for group in (31, 32):
    tab.dispatch_event(f'#row-g{group}', 'click')
    shows(tab, f'Group {group}', f'group={group}')
  tab.evaluate("""() => {
    let left = 2;
    addEventListener('popstate', () => {
      if (!--left) return;
      setTimeout(() => {  // it is drawn
        const until = performance.now() + 90;  // the page would have written by then
        history.back();
        while (performance.now() < until);
      }, 10);
    });
    history.back();
  }""")
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


def rows(tab, *names):
  """Waits until the list has exactly these."""
  expect(tab.locator('.row')).to_have_count(len(names))
  for name in names:
    expect(tab.locator(f'#row-{name}'.replace('.', '\\.'))).to_be_visible()


def test_a_point_of_a_curve_leads_to_its_trajectories(at):
  """A step to what it trained, an evaluation to what it sampled; Back leads back."""
  tab = at()
  tab.click('nav >> text=Curves')
  expect(tab).to_have_url(re.compile('#phase=curves$'))
  expect(tab.locator('.chart')).to_have_count(3)
  point = tab.locator('[id="Success-0"]')
  point.hover()
  expect(tab.locator('.chart p').first).to_have_text('step 1: 25 %')
  point.click()
  rows(tab, 'g29', 's29.0', 's29.1')
  shows(tab, 'Group 29: 1 of 2', 'group=29&step=1')
  tab.reload()
  rows(tab, 'g29', 's29.0', 's29.1')
  tab.go_back()
  expect(tab.locator('.chart')).to_have_count(3)
  evaluations = tab.locator('.chart:last-child [role=listbox]')
  evaluations.press('ArrowLeft')  # from the last
  expect(evaluations).to_have_attribute('aria-activedescendant', 'Evaluations-0')
  evaluations.press('Enter')
  rows(tab, 'e0', 'e1')
  shows(tab, 'Evaluation after SFT', place_of_stage('after SFT', session='e1'))


def place_of_stage(stage, **more):
  stage = f'{stage}, step 4, dev, temperature 1'
  return urllib.parse.urlencode({**more, 'phase': 'eval', 'stage': stage})


def test_a_stage_without_trajectories_is_empty(at):
  """A link to an evaluation that is pruned does not show another's."""
  tab = at()
  tab.evaluate(f'location.hash = "{place_of_stage("before")}"')
  expect(tab.locator('.list')).to_contain_text('No trajectory here yet')
  rows(tab)


def test_a_link_that_is_followed_before_the_address_is_written(at):
  """The page does not write the former selection over it."""
  tab = at('group=29')
  shows(tab, 'Group 29: 1 of 2', 'group=29')
  tab.evaluate(
    """async () => {
      document.querySelector('#row-g28').click();
      for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
      await new Promise((done) => setTimeout(done));
      const due = performance.now() + 100;  // the address is to be written before
      while (performance.now() < due);
      location.hash = 'group=30';
    }"""
  )
  shows(tab, 'Group 30: 1 of 2', 'group=30')


def test_a_range_of_rewards_is_a_filter(at):
  """A bar by a click, several by dragging or keys; again, or Escape, removes it. The
  other filters change the bars."""
  tab = at()
  selected = tab.locator('.bars [aria-selected=true]')
  expect(tab.locator('.bars [role=option]')).to_have_count(10)
  expect(selected).to_have_count(10)
  tab.click('#bar-9')
  rows(tab, 'g30', 's30.1', 'g29', 's29.1')
  expect(selected).to_have_count(1)
  expect(tab).to_have_url(re.compile('least_reward=0.9$'))
  tab.reload()
  rows(tab, 'g30', 's30.1', 'g29', 's29.1')
  tab.click('#bar-9')
  expect(selected).to_have_count(10)
  expect(tab).not_to_have_url(re.compile('reward'))
  box = tab.locator('.bars').bounding_box()
  y, x = box['y'] + box['height'] / 2, lambda share: box['x'] + share * box['width']
  tab.mouse.move(x(0.25), y)
  tab.mouse.down()
  tab.mouse.move(x(0.15), y)
  tab.mouse.move(x(0.05), y)
  tab.mouse.up()
  rows(tab, 'g30', 's30.0', 'g29', 's29.0')
  expect(tab).to_have_url(re.compile('most_reward=0.3$'))
  expect(selected).to_have_count(3)
  tab.focus('.bars')
  press(tab, 'Escape')
  expect(selected).to_have_count(10)
  press(tab, *['ArrowRight'] * 9, 'Enter', 'Shift+ArrowLeft', 'Shift+ArrowLeft')
  expect(tab).to_have_url(re.compile('least_reward=0.7$'))
  rows(tab, 'g30', 's30.1', 'g29', 's29.1')
  tab.fill('input[aria-label=step]', '2')
  press(tab, 'Enter')
  rows(tab, 'g30', 's30.1')
  expect(tab.locator('#bar-0')).to_have_attribute('title', '0 to 0.1: 1')
  tab.click('.histogram >> text=all')
  rows(tab, 'g30', 's30.0', 's30.1')


def test_flags_are_shown_and_filter(at):
  tab = at()
  expect(tab.locator('#row-g29 .flag')).to_have_attribute(
    'title', 'hacked, look at this'
  )
  tab.select_option('select[aria-label=flag]', 'infrastructure')
  rows(tab)
  tab.select_option('select[aria-label=flag]', 'look')
  rows(tab, 'g29', 's29.1')
  expect(tab).to_have_url(re.compile('flag=look$'))
  tab.reload()
  rows(tab, 'g29', 's29.1')
  tab.dispatch_event('#row-s29\\.1', 'click')
  expect(tab.locator('.detail')).to_contain_text('look at this')


def test_members_side_by_side(at):
  """A column each, and the first turn that is different; a click opens one."""
  tab = at('group=29&tab=members')
  expect(tab.locator('.member')).to_have_count(2)
  expect(tab.locator('.member pre').first).to_have_text('an answer')
  expect(tab.locator('.member').nth(1)).to_contain_text('as the first column')
  expect(tab.locator('.member .flag')).to_have_text('⚑ hacked, look at this')
  cells = tab.locator('.cell')
  expect(cells).to_have_count(4)
  expect(cells.nth(3)).to_contain_text('seen by s29.1')
  tab.click('.member >> text=rank 1')
  shows(tab, 'Group 29, rank 1', 'session=s29.1&tab=members')


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


def test_a_finding_leads_to_the_trajectories_of_its_window(at):
  """Window and threshold are drawn over the whole series; text of others is text."""
  tab = at()
  tab.click('nav >> text=Findings')
  expect(tab).to_have_url(re.compile('#phase=findings$'))
  expect(tab.locator('.finding .point')).to_have_count(2)
  expect(tab.locator('.finding .shade')).to_have_count(1)
  expect(tab.locator('.finding .bound')).to_have_count(1)
  expect(tab.locator('.finding')).to_contain_text('the success rises </script><img')
  assert tab.locator('.finding img').count() == 0
  assert tab.evaluate('window.hacked') is None
  expect(tab.locator('a.window')).to_have_text(['step 2'])
  tab.click('a.window')
  rows(tab, 'g30', 's30.0', 's30.1')
