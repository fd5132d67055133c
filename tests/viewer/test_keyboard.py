"""What the mouse can do, the keyboard can: Tab reaches it, keys operate it."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from tests.viewer.conftest import press

GROUP_0 = ('j',) * 12
FIRST = (*GROUP_0, 'ArrowRight', 'j')
# Marks what has to be reached: controls, and whatever shows the pointer's hand, unless
# it is an item of a tree, which is one control.
MARK = """() => {
  const visible = (e) => e.getClientRects().length
    && getComputedStyle(e).visibility !== 'hidden';
  const hand = (e) => getComputedStyle(e).cursor === 'pointer';
  const controls = 'button:enabled, select, input, textarea, a[href], [tabindex="0"]';
  const found = [...document.querySelectorAll('#app *')].filter((e) => visible(e)
    && (e.matches(controls) || (hand(e) && !hand(e.parentElement))));
  const trees = new Set();
  for (const e of found) {
    const tree = e.closest('[role=tree], [role=listbox]');
    (tree ? tree : e).dataset.wanted = '';
    if (tree) trees.add(tree);
  }
  return document.querySelectorAll('[data-wanted]').length;
}"""
# Marks what has the focus with its outline; returns whether it had it before.
STEP = """() => {
  const e = document.activeElement, again = 'reached' in e.dataset;
  e.dataset.reached = getComputedStyle(e).outlineStyle;
  return again || e === document.body;
}"""
MISSED = """() => [...document.querySelectorAll('[data-wanted]')]
  .filter((e) => e.dataset.reached !== 'solid')
  .map((e) => `${e.tagName} ${e.className} ${e.getAttribute('aria-label')} `
    + `${e.textContent.slice(0, 30)}: ${e.dataset.reached}`)"""
VIEWS = {
  'list': ((), '.row', 9),
  'tree': (GROUP_0, '.icicle', 13),
  'timeline of a group': ((*GROUP_0, '2'), '.lane', 13),
  'transcript': (FIRST, '.transcript', 18),
  'tokens': ((*FIRST, '2'), '.tokens', 14),
  'timeline': ((*FIRST, '4'), '.timeline table', 13),
  'members': ((*GROUP_0, '3'), '.members .who', 30),
  'curves': (('v',), '.chart svg', 8),
  'findings': (('d',), '.finding .chart svg', 8),
}


@pytest.fixture
def opened(tab, example_link):
  tab.goto(example_link)
  tab.wait_for_selector('.row')
  return tab


def active(page, of='id'):
  return page.evaluate(f'document.activeElement.{of}')


def tab_to(page, selector):
  """Presses Tab until an element has the focus."""
  for _ in range(60):
    press(page, 'Tab')
    if page.evaluate(f'document.activeElement.matches({selector!r})'):
      return
  raise AssertionError(f'Tab does not reach {selector}')


@pytest.mark.parametrize('view', VIEWS)
def test_tab_reaches_every_control(opened, view):
  """And each shows that it has the focus."""
  keys, shown, least = VIEWS[view]
  press(opened, *keys)
  opened.wait_for_selector(shown)
  assert opened.evaluate(MARK) >= least
  for _ in range(60):
    press(opened, 'Tab')
    if opened.evaluate(STEP):
      break
  assert opened.evaluate(MISSED) == []


def test_filters(opened):
  """Phase, outcome, family and seconds."""
  tab_to(opened, 'nav button:nth-child(2)')
  press(opened, 'Enter')
  expect(opened.locator('.row')).to_have_count(3)
  tab_to(opened, 'select[aria-label=outcome]')
  press(opened, 's')
  expect(opened.locator('.row')).to_have_count(1)
  press(opened, 'ArrowUp')
  expect(opened.locator('.row')).to_have_count(3)
  tab_to(opened, 'select[aria-label=family]')
  press(opened, 'ArrowDown')
  expect(opened.locator('.row')).to_have_count(1)
  press(opened, 'ArrowUp')
  tab_to(opened, 'input[aria-label="least seconds"]')
  press(opened, '9', 'Enter')
  expect(opened.locator('.row')).to_have_count(0)


def test_what_is_typed_stays(opened):
  """The page is drawn again while seconds are typed, as it is while a job runs."""
  tab_to(opened, 'nav button:nth-child(2)')
  press(opened, 'Enter')
  tab_to(opened, 'input[aria-label="least seconds"]')
  press(opened, '9')
  opened.evaluate("""() => {
    const outcome = document.querySelector('select[aria-label=outcome]');
    outcome.value = 'success';
    outcome.dispatchEvent(new Event('change', {bubbles: true}));
  }""")
  expect(opened.locator('.row')).to_have_count(1)
  press(opened, 'Enter')
  expect(opened.locator('.row')).to_have_count(0)


def test_search(opened):
  """`/` goes there from anywhere, also from the right; Escape clears it."""
  press(opened, *GROUP_0, 'Enter', '/')
  assert active(opened) == 'search'
  opened.keyboard.type('lines in all.')
  expect(opened.locator('.row.trajectory').first).to_be_visible()
  before = opened.locator('.row').count()
  press(opened, 'Escape')
  assert active(opened) == 'list'
  expect(opened.locator('.row')).not_to_have_count(before)


def test_reading(opened, example_run):
  """Enter opens a group and goes to the right, where arrow keys scroll; Tab and Enter
  choose a view; a list of colours, the tokens and the tree have their own keys."""
  press(opened, *GROUP_0, 'Enter')
  assert active(opened) == 'detail'
  assert opened.get_attribute('#row-g0', 'aria-expanded') == 'true'
  opened.wait_for_selector('.icicle')
  press(opened, *['ArrowDown'] * 5)
  for _ in range(100):  # its policy forbids wait_for_function
    if scrolled := opened.evaluate('document.getElementById("detail").scrollTop'):
      break
    opened.wait_for_timeout(20)
  assert scrolled > 0
  assert opened.get_attribute('.row.on', 'id') == 'row-g0'

  tab_to(opened, '.icicle')
  press(opened, 'ArrowRight')
  expect(opened.locator('#segment-0')).not_to_have_attribute('aria-selected', 'true')
  tab_to(opened, '.segment button')
  press(opened, 'Enter')
  expect(opened.locator('.row.on')).to_have_attribute('id', 'row-rl-0-0')

  opened.wait_for_selector('.transcript')
  tab_to(opened, '#tab-tokens')
  press(opened, 'Enter')
  opened.wait_for_selector('.tokens .t')
  tab_to(opened, '.pick select')
  press(opened, 'ArrowDown')
  opened.wait_for_selector('.legend >> text=entropy')
  tab_to(opened, '.tokens')
  press(opened, 'ArrowRight', 'Shift+ArrowRight', 'ArrowLeft')
  position = opened.inner_text('.inspect dl').split()
  first = len(example_run.reader.completions('rl-0-0')[0].prompt_ids)
  assert position[-1] == str(first + 10), position


def test_a_lane_opens_its_trajectory(opened):
  press(opened, *GROUP_0, '2')
  opened.wait_for_selector('.lane')
  tab_to(opened, '.lane')
  press(opened, 'Tab', 'Enter')
  expect(opened.locator('.row.on')).to_have_attribute('id', 'row-rl-0-1')
  assert active(opened) == 'detail'


def test_a_message_is_closed_and_opened(opened):
  press(opened, *FIRST)
  opened.wait_for_selector('.transcript')
  tab_to(opened, '.step.thinking .who')
  press(opened, 'Enter')
  expect(opened.locator('.step.thinking pre').first).to_have_class('closed')
  press(opened, 'Space')
  expect(opened.locator('.step.thinking pre').first).not_to_have_class('closed')


def test_a_note(opened, example_run):
  press(opened, *FIRST[:-1], 'j', 'j')
  opened.wait_for_selector('.notes')
  press(opened, 'n')
  assert active(opened) == 'note'
  opened.keyboard.type('1 2 j')  # no keys of the page
  press(opened, 'Tab', 'Enter')
  opened.wait_for_selector('.notes article')
  notes = [n for n in example_run.annotations.of('rl-0-1') if n['kind'] == 'note']
  assert [n['text'] for n in notes] == ['1 2 j']


def test_the_help_keeps_the_focus(opened):
  """What is behind it cannot be reached; Escape closes it."""
  press(opened, '?')
  opened.wait_for_selector('[role=dialog]')
  press(opened, 'Tab', 'Tab', 'Shift+Tab')
  assert active(opened, 'getAttribute("role")') == 'dialog'
  press(opened, 'Escape')
  opened.wait_for_selector('[role=dialog]', state='detached')
  assert active(opened) == 'list'
