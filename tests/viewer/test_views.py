"""What the page draws is what the run recorded: colours, weights in time, branches."""

from __future__ import annotations

import contextlib
import re

import numpy as np
from playwright.sync_api import expect

from m2jax.pool.data_pool import DataPool
from m2jax.viewer import serving
from m2jax.viewer.run import Run
from tests.viewer import conftest, example
from tests.viewer.conftest import press

GROUP_0 = ('j',) * 12  # the last of the list
FIRST = (*GROUP_0, 'ArrowRight', 'j')  # its trajectory of rank 0
EDITED = (*GROUP_0, 'ArrowRight', *'jjjj')
# The recorded tokens in order, with what is behind each: [r, g, b, alpha].
TOKENS = """tokens => tokens.map((token) => {
  const numbers = getComputedStyle(token).backgroundColor.match(/[\\d.]+/g).map(Number);
  return { own: token.classList.contains('own'), text: token.textContent,
    color: numbers.length === 3 ? [...numbers, 1] : numbers };
})"""
BLUE, SIGNED = (0, 114, 178), ((33, 102, 172), (247, 247, 247), (179, 88, 6))
LOWEST, HIGHEST = (0, 34, 78), (254, 232, 56)  # cividis
TRAINED, UNUSED = (86, 180, 233), (230, 159, 0)
CLEAR = (0, 0, 0, 0)


def strength(fraction):
  return (*BLUE, 0.9 * np.clip(fraction, 0, 1))


def signed(value, limit):
  """Through five colours: the ends, white, and those half way."""
  stops = np.array([SIGNED[0], (146, 197, 222), SIGNED[1], (253, 184, 99), SIGNED[2]])
  x = np.clip(value / limit, -1, 1)
  at = np.linspace(-1, 1, 5)
  return (*(np.interp(x, at, stops[:, k]) for k in range(3)), 1)


def recorded(run, session):
  """One dict a sampled token, in order: the measures that the page colours by."""
  extra = {(n['completion'], n.get('name')): n for n in run.annotations.of(session)}
  advantages = {t.turn: t.advantage for t in run.reader.turns(session)}
  found = []
  for c in run.reader.completions(session):
    learner = extra.get((c.id, 'learner_logprob'))
    entropy = extra.get((c.id, 'entropy'))
    for i, logprob in enumerate(c.logprobs):
      measures = {'logprob': logprob, 'version': c.versions[i]}
      measures['advantage'] = advantages[c.turn]
      if learner:
        measures['entropy'] = entropy['values'][i]
        measures['mismatch'] = learner['values'][i] - logprob
      found.append(measures)
  return found


def drawn(page, mode):
  page.select_option('.pick select', mode)
  page.wait_for_timeout(20)
  return page.eval_on_selector_all('.tokens .t', TOKENS)


def shown(page, link, keys, wait):
  page.goto(link)
  page.wait_for_selector('.row.on')
  press(page, *keys)
  page.wait_for_selector(wait)


def test_each_token_has_the_colour_of_its_value(tab, example_link, example_run):
  """By every measure: a strength of blue, a place between the ends of a scale, or a
  class; prompts and observations, which have no value, have none."""
  shown(tab, example_link, (*FIRST, '2'), '.tokens .t')
  values = recorded(example_run, 'rl-0-0')
  expected = {
    'logprob': [strength(v['logprob'] / -6) for v in values],
    'entropy': [strength(v['entropy'] / 3) for v in values],
    'mismatch': [signed(v['mismatch'], 0.5) for v in values],
    'advantage': [signed(v['advantage'], 2) for v in values],
    'version': [(*(HIGHEST if v['version'] else LOWEST), 1) for v in values],
    'mask': [(*TRAINED, 1)] * len(values),
    'none': [CLEAR] * len(values),
  }
  for mode, colors in expected.items():
    tokens = drawn(tab, mode)
    own = [token['color'] for token in tokens if token['own']]
    assert len(own) == len(values) < len(tokens)
    # The scores of logprobs are stored in units of 1e-4; colours are bytes.
    np.testing.assert_allclose(own, colors, atol=1.01, err_msg=mode)
    alphas = np.array(own)[:, 3], np.array(colors)[:, 3]
    np.testing.assert_allclose(*alphas, atol=0.005, err_msg=mode)
    assert {tuple(t['color']) for t in tokens if not t['own']} == {CLEAR}, mode
    different = len(set(map(tuple, own)))
    least = {'logprob': 9, 'entropy': 9, 'mismatch': 9, 'version': 2}.get(mode, 1)
    assert different >= least, mode


def test_tokens_open_at_the_first_that_was_sampled(tab, tmp_path):
  """However long its prompt is; it is chosen, so that its terms are shown."""
  with DataPool(f'sqlite:///{tmp_path}/pool.db') as pool:
    pool.add_completion(conftest.completion('s-0', 's', 0, [5] * 3000, [7, 8]))
    pool.add_trajectory(conftest.trajectory('s', -1, 0))
    pool.flush()
    with contextlib.closing(Run(tmp_path)) as run:
      with serving.serving(run, conftest.KEY) as link:
        tab.goto(f'{link}&session=s&tab=tokens')
        chosen = tab.locator('.t[aria-current]')
        expect(chosen).to_be_in_viewport()
        expect(chosen).to_have_text('⟨7⟩')
        assert '3000' in tab.inner_text('.inspect').split()


def test_the_mask_tells_what_is_in_the_loss(tab, example_link):
  """A group whose trajectories all succeed has no advantage, and is in no loss."""
  assert all(example.succeeds(3, rank) for rank in range(example.RANKS))
  keys = ('j',) * 6 + ('ArrowRight', 'j', '2')  # from group 9, the last that was taken
  shown(tab, example_link, keys, '.tokens .t')
  assert 'Group 3, rank 0' in tab.inner_text('.detail .about')
  tokens = drawn(tab, 'mask')
  assert {tuple(t['color']) for t in tokens if t['own']} == {(*UNUSED, 1)}


GENERATIONS = """groups => groups.map((g) => ({
  completion: g.dataset.completion, title: g.querySelector('title').textContent,
  texts: [...g.querySelectorAll('text')].map((t) => t.textContent),
  parts: [...g.querySelectorAll('rect')].map((r) => ({
    version: Number(r.dataset.version), x: Number(r.getAttribute('x')),
    width: Number(r.getAttribute('width')), fill: getComputedStyle(r).fill })),
}))"""


def test_the_timeline_has_the_weights_of_each_completion(
  tab, example_link, example_run
):
  """Each is where it ran, cut where its weights changed, in the colour of the version;
  the tools are the time between."""
  shown(tab, example_link, (*GROUP_0, '2'), '.generation')
  found = tab.eval_on_selector_all('.generation', GENERATIONS)
  by_id = {
    c.id: c
    for rank in range(example.RANKS)
    for c in example_run.reader.completions(f'rl-0-{rank}')
  }
  assert {g['completion'] for g in found} == set(by_id) and len(found) == len(by_id)
  seconds, places = [], []
  for g in found:
    c = by_id[g['completion']]
    versions, tokens = np.unique(c.versions, return_counts=True)
    assert [p['version'] for p in g['parts']] == versions.tolist()
    widths = np.array([p['width'] for p in g['parts']])
    np.testing.assert_allclose(widths / widths.sum(), tokens / tokens.sum(), atol=1e-6)
    lefts = g['parts'][0]['x'] + np.cumsum([0, *widths[:-1]])
    np.testing.assert_allclose([p['x'] for p in g['parts']], lefts, atol=1e-6)
    fills = [f'rgb{HIGHEST if v else LOWEST}' for v in versions]
    assert [p['fill'] for p in g['parts']] == fills
    assert set(g['texts']) <= {f'v{v}' for v in versions} and g['texts']
    assert f'weights {versions[0]}–{versions[-1]}' in re.sub(r'\s+', ' ', g['title'])
    seconds += [c.started_s - 1e9, c.ended_s - 1e9]
    places += [g['parts'][0]['x'], g['parts'][0]['x'] + widths.sum()]
  assert any(len(g['parts']) == 2 for g in found)
  line = np.polyfit(seconds, places, 1)
  assert line[0] > 50  # pixels in a second
  np.testing.assert_allclose(np.polyval(line, seconds), places, atol=0.01)


def test_the_turns_of_a_trajectory(tab, example_link, example_run):
  """The table below its timeline has the numbers of the pool."""
  shown(tab, example_link, (*EDITED, '4'), '.timeline table')
  rows = tab.eval_on_selector_all(
    '.timeline tbody tr',
    'rows => rows.map((r) => [...r.cells].map((c) => c.innerText))',
  )
  sampled = example_run.reader.completions('rl-0-3')
  assert len(rows) == len(sampled) == 3
  for row, c in zip(rows, sampled, strict=True):
    assert row[0] == str(c.turn)
    assert row[2] == f'{c.ended_s - c.started_s:.3f}'
    assert row[3:5] == [str(len(c.prompt_ids)), str(len(c.response_ids))]
    assert row[5] == f'{c.versions[0]}–{c.versions[-1]}'
    assert row[6] == '+1.00'
  assert [row[-1] for row in rows] == [
    *('the first', 'turn 0 extended', 'new: context_edited'),
  ]


def test_a_context_edit_begins_a_branch(tab, example_link, example_run):
  """The tokens of both contexts can be read, the transcript says where it was edited,
  and the tree has two leaves that share their beginning."""
  *_, before, after = example_run.reader.completions('rl-0-3')
  assert after.parent is None and len(after.prompt_ids) < len(before.tokens)
  shown(tab, example_link, EDITED, '.transcript')
  heads = tab.locator('.turn').all_inner_texts()
  assert ['context_edited' in text for text in heads] == [False, False, True]

  press(tab, '2')
  tab.wait_for_selector('.tokens .t')
  decode = example.train_tokenizer(12).decode
  choice = tab.get_by_label('Branch')
  names = choice.locator('option').all_inner_texts()
  assert [name.split(' (')[0] for name in names] == ['1: to turn 1', '2: to turn 2']
  assert 'context_edited' in names[1]
  for which, c in enumerate((before, after)):
    choice.select_option(str(which))
    tab.wait_for_timeout(100)
    tokens = tab.eval_on_selector_all('.tokens .t', TOKENS)
    assert len(tokens) == len(c.tokens)
    written = [token['text'].replace('↵', '') for token in tokens]
    assert written == [decode([i]) for i in c.tokens]

  press(tab, '3')
  tab.wait_for_selector('.icicle')
  shared = sum(np.cumprod(before.tokens[: len(after.tokens)] == after.tokens))
  total = len(before.tokens) + len(after.tokens) - shared
  text = tab.inner_text('.detail [role=tabpanel]')
  assert f'{total} tokens once each' in text and 0 < shared < len(after.prompt_ids)
  assert tab.locator('.icicle [role=treeitem]').count() >= 3
