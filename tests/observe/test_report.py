"""The report: its numbers are those given, hostile text stays text, no loading."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html.parser
import json
import math
import re

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from m2jax.observe import (
  evaluations,
  plots,
  printable,
  report,
  stats,
  svg,
  transcript,
)

HOSTILE = (
  '</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>'
  '"\'><svg onload=alert(3)> {{ 7 * 7 }} {% raw %} \x1b[31m \u202e \x00 \ud800'
)
FAMILIES = ('count lines', 'edit file')


class _Page(html.parser.HTMLParser):
  """The page as a browser's parser sees it."""

  def __init__(self, text: str):
    super().__init__()
    self.tags, self.rows, self.cells, self.bodies = [], [], None, {}
    self.words, self._stack = [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, tuple(sorted(name for name, _ in attrs)), dict(attrs)))
    self._stack.append(tag)
    if tag == 'tr':
      self.cells = []
      self.rows.append(self.cells)
    if tag in ('td', 'th') and self.cells is not None:
      self.cells.append('')

  def handle_endtag(self, tag):
    if tag in self._stack:
      del self._stack[len(self._stack) - 1 - self._stack[::-1].index(tag) :]

  def handle_data(self, data):
    self.words.append(data)
    if self._stack and self._stack[-1] in ('script', 'style'):
      self.bodies[self._stack[-1]] = self.bodies.get(self._stack[-1], '') + data
    if self.cells and {'td', 'th'} & set(self._stack):
      self.cells[-1] += data


def _records(updates: int = 30) -> list[dict]:
  records = [
    {'phase': 'sft', 'step': i, 'loss': 5 / (i + 1), 'tokens_per_s': 1e4}
    for i in range(900)
  ]
  for i in range(1, updates + 1):
    records.append(
      {
        'phase': 'rl',
        'step': i,
        'loss': math.nan if i == 7 else -0.01 * i,
        'success': i / (updates + 1),
        'reward': 0.1,
        'policy/lag_mean': 1.5,
        'policy/lag_max': 3,
        'window/age_items_mean': 40,
        'window/age_items_max': 70,
        'window/order_distance_max': 17,
        'gateway/forks': 12345,
        'success/count lines': 0.25 * (i % 3),
        'ratio': 1.01,
        'clip_fraction': 0.02,
        'clipped_mass': 0.5,
      }
    )
  for stage, step, solved in (('after SFT', 900, 235), ('after RL', updates, 344)):
    for family, share in (('all', 1), *((f, 2) for f in FAMILIES)):
      for temperature in (1.0, 0):
        records.append(
          {
            'phase': 'eval',
            'stage': stage,
            'step': step,
            'family': family,
            'temperature': temperature,
            'successes': solved // share + (temperature == 0),
            'n': 400 // share,
          }
        )
  return records


def _episode(text: str = 'plain', index: int = 0) -> report.Episode:
  call = {'function': {'name': text, 'arguments': json.dumps({'command': text})}}
  return report.Episode(
    phase='rl',
    step=index,
    family=text,
    task=text,
    success=1.0,
    reward=1.1,
    end_reason='answer',
    error=text,
    wall_s=1.25,
    messages=(
      {'role': 'system', 'content': text},
      {'role': 'user', 'content': text},
      {
        'role': 'assistant',
        'content': text,
        'reasoning_content': text,
        'tool_calls': [call],
      },
      {'role': 'tool', 'content': text},
      {'role': 'assistant', 'content': text},
    ),
    turns=(
      report.Turn(0.25, (3, 4, 4), 17, text),
      report.Turn(-0.5, (4,), 9, text),
    ),
  )


def _render(text: str = 'plain', **changes) -> str:
  records = _records()
  records.append({'phase': 'rl', 'step': 31, f'success/{text}': 0.5})
  arguments = {
    'records': records,
    'trajectories': [_episode(text)],
    'summary': report.Summary(
      title=text,
      evaluations=[
        *evaluations.by_stage(records),
        evaluations.Evaluation(text, (3, 40), None, {text: (3, 40)}),
      ],
      facts={text: text},
      capacity_items=64,
      window_items=19,
    ),
    'config': {text: {'inner': text}},
  }
  return report.render(**(arguments | changes))


@settings(deadline=None, max_examples=60)
@given(
  st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=4)
)
def test_headline_numbers_are_those_given(counts):
  """What people quote: rate, Wilson interval, counts and greedy, for every stage."""
  rows = [
    evaluations.Evaluation(f'stage {i}', (solved, 400), (greedy, 400))
    for i, (solved, greedy) in enumerate(counts)
  ]
  page = _Page(report.render([], [], report.Summary('t', rows), {}))
  table = [row for row in page.rows if row and row[0].startswith('stage ')]
  assert len(table) == len(rows)
  for cells, row in zip(table, rows, strict=True):
    figures = [float(f) for f in re.findall(r'([\d.]+) %', ' '.join(cells))]
    shares = [p[0] / p[1] for p in (row.sampled, row.greedy)]
    exact = [shares[0], *stats.wilson(*row.sampled), shares[1]]
    # One decimal; either way at a tie.
    np.testing.assert_allclose(figures, [100 * e for e in exact], atol=0.05 + 1e-9)
    assert cells[4] == f'{row.sampled[0]} / 400'
    assert cells[5].endswith(f' {row.greedy[0]} / 400')


def test_families_stand_before_and_after_with_their_change():
  """The table by family, from the same records as the headline."""
  page = _Page(_render())
  row = next(cells for cells in page.rows if cells and cells[0] == 'count lines')
  assert row[1] == '58.5 % 117 / 200'
  assert row[2] == '86.0 % 172 / 200'
  assert row[-1] == '+27.5'
  greedy = [cells for cells in page.rows if cells and cells[0] == 'after RL'][0]
  assert greedy[4:] == ['344 / 400', '86.2 % 345 / 400']


def test_evaluations_keep_the_latest_record_and_leave_curves_out():
  """An evaluation repeated after a restart counts once; 'during RL' is no stage."""
  old = {'phase': 'eval', 'stage': 'after RL', 'step': 3, 'successes': 1, 'n': 40}
  new = {**old, 'successes': 9}
  curve = {**old, 'stage': 'during RL'}
  (row,) = evaluations.by_stage([old, curve, new, {'phase': 'rl', 'step': 1}])
  assert row == evaluations.Evaluation('after RL', (9, 40))


def test_hostile_text_changes_no_element_and_is_shown():
  """Model and tool output in every place: the structure is as with plain text."""
  # '#' sorts before the other families, as HOSTILE does: the rows stay in order.
  plain, hostile = _Page(_render('#plain')), _Page(_render(HOSTILE))
  assert [t[:2] for t in hostile.tags] == [t[:2] for t in plain.tags]
  assert hostile.bodies == plain.bodies
  shown = ''.join(hostile.words)
  assert shown.count(printable.printable(HOSTILE)) >= 10
  for character in '\x1b\x00\u202e\ud800':
    assert character not in shown


@settings(deadline=None, max_examples=40)
@given(st.text() | st.text(alphabet='<>&"\'/={}%#! \n\t\x00-[]acript'))
def test_any_text_leaves_the_structure_alone(text):
  """The same for text nobody thought of."""
  episode = dataclasses.replace(_episode(f'x{text}'))
  benign = [t[:2] for t in _Page(_one(_episode('x'))).tags]
  assert [t[:2] for t in _Page(_one(episode)).tags] == benign


def _one(episode: report.Episode) -> str:
  return report.render([], [episode], report.Summary('t'), {})


def test_the_page_loads_nothing_and_its_policy_admits_only_its_own_script():
  """Self-contained: no address anywhere, and a policy that would stop one."""
  text = _render()
  page = _Page(text)
  assert not re.search(r'https?:|//[a-z]|@import|url\(', text)
  loading = {'src', 'href', 'srcset', 'action', 'data', 'poster', 'xlink:href'}
  for tag, names, attrs in page.tags:
    assert not any(name.startswith('on') or name == 'style' for name in names)
    for name in loading & set(names):
      known = '#', 'data:,', *(['trajectories.html#'] if tag == 'a' else [])
      assert attrs[name].startswith(known), (tag, name)
  (policy,) = [a['content'] for t, _, a in page.tags if 'http-equiv' in a]
  assert policy.startswith("default-src 'none'")
  assert 'unsafe' not in policy
  for kind in ('script', 'style'):
    digest = hashlib.sha256(page.bodies[kind].encode()).digest()
    assert f"{kind}-src 'sha256-{base64.b64encode(digest).decode()}'" in policy


def test_trajectories_are_readable_with_credit_and_versions():
  """Thinking, call, observation, answer in order; advantage and versions by turn."""
  text = _one(_episode())
  kinds = re.findall(r'class="step (\w+)"', text)
  assert kinds == [
    'system', 'task', 'thinking', 'text', 'call', 'observation', 'answer',
  ]  # fmt: skip
  first, second = re.findall(r'<p class="turn">(.*?)</p>', text)
  assert 'turn 1 · policy 3–4 · 17 tokens · plain' in first
  assert '<b class="good">+0.250</b>' in first
  assert 'turn 2 · policy 4 · 9 tokens · plain' in second
  assert '<b class="bad">-0.500</b>' in second
  assert 'data-verdict="solved"' in text
  alike = _one(dataclasses.replace(_episode(), turns=[report.Turn(-1e-17)]))
  assert '<b class="none">+0.000</b>' in alike
  broken = dataclasses.replace(_episode(), end_reason='infrastructure', success=0.0)
  assert 'data-verdict="not judged"' in _one(broken)  # law 5: not a failure
  failed = dataclasses.replace(_episode(), success=0.0)
  assert 'data-verdict="failed"' in _one(failed)


def test_a_long_observation_keeps_its_ends_and_says_what_is_missing():
  """A page must stay readable when a command printed a megabyte."""
  long = 'begin ' + 'x' * 10**6 + ' end'
  text = _one(
    dataclasses.replace(_episode(), messages=[{'role': 'tool', 'content': long}])
  )
  assert len(text) < 60_000
  assert 'begin xxx' in text
  assert 'xxx end' in text
  left_out = int(re.search(r'… ([\d,]+) characters omitted', text)[1].replace(',', ''))
  shown = text.count('x' * 10) * 10
  assert abs(left_out + shown - len(long)) < 2000


_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.text(),
  lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(), c, max_size=3),
)


@settings(deadline=None, max_examples=100)
@given(
  st.lists(
    _JSON
    | st.dictionaries(
      st.sampled_from(['role', 'content', 'reasoning_content', 'tool_calls']),
      _JSON | st.sampled_from(['assistant', 'tool', 'user']),
    ),
    max_size=4,
  )
)
def test_messages_of_any_shape_become_steps(messages):
  """Agents send what they like; a page comes out all the same."""
  for step in transcript.steps(messages):
    assert isinstance(step.text, str)
  _one(dataclasses.replace(_episode(), messages=messages))


def test_every_plot_stays_in_its_box_and_bounds_stand_where_they_should():
  """Coordinates are finite and inside; a NaN breaks the line instead of the page."""
  found = plots.sections(_records(), capacity_items=64, window_items=19)
  drawn = {plot.title: plot for section in found for plot in section.plots}
  assert {'Success', 'Reward', 'Loss', 'Policy lag', 'Age', 'SFT loss'} <= set(drawn)
  assert 'Entropy' not in drawn  # nothing recorded, nothing drawn
  for title, value in (
    ('Importance ratio', '1.01'),
    ('Clip fraction', '2 %'),
    ('Clipped mass', '0.5'),
  ):
    assert _hover(drawn[title])[0]['text'] == [value] * 30
  for plot in drawn.values():
    for points in re.findall(r'points="([^"]*)"', plot.drawing):
      for pair in points.split():
        x, y = map(float, pair.split(','))
        assert 0 <= x <= svg.WIDTH
        assert 0 <= y <= svg.HEIGHT
  assert drawn['Loss'].drawing.count('<polyline') == 2
  assert drawn['Success'].drawing.count('<circle') == 2  # after SFT and after RL
  assert len(_hover(drawn['SFT loss'])[0]['x']) <= 450  # 900 points were given
  assert _limit(drawn['Age']) == pytest.approx(64 + 19 - 2, abs=1)
  assert _limit(drawn['Out-of-order distance']) == pytest.approx(18, abs=0.3)
  assert plots.sections([]) == []


def _hover(plot: plots.Plot) -> list[dict]:
  """The drawn series as the page's script reads them: name, x, text."""
  data = re.search('data-plot="([^"]*)"', plot.drawing)[1]
  return json.loads(html.unescape(data))['series']


def _evaluation(step: int, successes: int, n: int, **fields) -> dict:
  record = {
    'phase': 'eval',
    'stage': 'during RL',
    'split': 'dev',
    'step': step,
    'family': 'all',
    'temperature': 1.0,
    'successes': successes,
    'n': n,
  }
  return record | fields


def test_development_success_is_drawn_over_the_updates_with_its_interval():
  """At temperature 1, all families; held-out tasks stay a series of their own."""
  records = [
    *_records(),
    _evaluation(10, 30, 100),
    _evaluation(20, 60, 100),
    _evaluation(20, 7, 100, temperature=0.0),
    _evaluation(20, 9, 10, family='count lines', calls=3),
  ]
  (learning, *_) = plots.sections(records)
  series = {s['name']: s for s in _hover(learning.plots[0])}
  assert learning.plots[0].title == 'Success'
  assert series['development, 95 % interval']['x'] == [10, 20]
  assert series['development, 95 % interval']['text'] == ['30 %', '60 %']
  assert series['held out, 95 % interval']['x'] == [0, 30]
  drawing = learning.plots[0].drawing
  low, high = stats.wilson(60, 100)
  y = {share: svg.HEIGHT - 34 - share * (svg.HEIGHT - 44) for share in (low, high)}
  assert f'y1="{y[low]:.2f}" y2="{y[high]:.2f}"' in drawing
  # evaluations during RL are no rows of the headline
  assert evaluations.by_stage(records) == evaluations.by_stage(_records())


def test_points_lead_to_their_trajectories():
  """An evaluation by its name, a curve of updates by its step, of a family only its
  own; SFT has no trajectories."""
  records = [
    *_records(),
    _evaluation(20, 60, 100),
    _evaluation(20, 6, 10, family='count lines'),
  ]
  found = plots.sections(records)
  drawn = {plot.title: plot for section in found for plot in section.plots}
  stage = 'phase=eval&stage=during+RL%2C+step+20%2C+dev%2C+temperature+1'
  hrefs = lambda title: [
    html.unescape(x) for x in re.findall('href="([^"]*)"', drawn[title].drawing)
  ]
  assert f'trajectories.html#{stage}' in hrefs('Success')
  assert hrefs('count lines') == [f'trajectories.html#{stage}&family=count+lines']
  links = {title: {s['link'] for s in _hover(drawn[title])} for title in drawn}
  assert links['Loss'] == {'trajectories.html#step='}
  assert links['SFT loss'] == {''}
  assert links['Success'] == {'trajectories.html#step=', ''}  # '': of evaluations
  assert links['count lines'] == {'trajectories.html#family=count+lines&step=', ''}


def test_success_by_family_over_the_updates():
  """A plot for each family, trained or evaluated, over one range of updates."""
  records = _records() + [
    _evaluation(0, 2, 10, family='count lines', calls=1),
    _evaluation(0, 1, 10, family='count lines', calls=2),
    _evaluation(20, 9, 10, family='count lines', calls=1),
    _evaluation(20, 4, 10, family='only evaluated', calls=4),
    _evaluation(20, 5, 10, family='only evaluated', calls=4),  # again after a restart
  ]
  (section,) = [s for s in plots.sections(records) if s.title == 'Success by family']
  assert [p.title for p in section.plots] == ['count lines', 'only evaluated']
  each, mean, points = _hover(section.plots[0])
  assert each['text'][:3] == ['25 %', '50 %', '0 %']
  assert mean['text'][2] == '25 %'
  assert (points['x'], points['text']) == ([0, 20], ['15 %', '90 %'])
  (points,) = _hover(section.plots[1])
  assert (points['x'], points['text']) == ([20], ['50 %'])
  assert len(section.legend) == 3
  page = _Page(report.render(records, [], report.Summary('t'), {}))
  assert page.words.count('development, 95 % interval') == 1  # not once a plot


def test_chain_lengths_have_a_table():
  """Success by the number of tool calls that suffice, summed over the families."""
  records = [
    _evaluation(1, good, 10, stage=stage, split='held_out', family=family, calls=calls)
    for stage, gain in (('after SFT', 0), ('after RL', 2))
    for family, calls, good in (
      ('a', 1, 6 + gain),
      ('b', 1, 7 + gain),
      ('b', 12, 1 + 2 * gain),
    )
  ]
  summary = report.Summary('t', evaluations.by_stage(records))
  page = _Page(report.render(records, [], summary, {}))
  rows = {cells[0]: cells[1:] for cells in page.rows if cells}
  assert rows['1'][:2] == ['65.0 % 13 / 20', '85.0 % 17 / 20']
  assert rows['12'] == ['10.0 % 1 / 10', '50.0 % 5 / 10', '', '+40.0']
  assert rows['b'][:2] == ['40.0 % 8 / 20', '70.0 % 14 / 20']
  assert evaluations.by_stage(records, 'dev') == []


def _limit(plot: plots.Plot) -> float:
  """The value of a plot's dashed line, read from its axis."""
  axis = re.findall(
    r'y1="([\d.]+)" y2="\1"/><text class="tick"[^>]*>([\d.]+)</text>', plot.drawing
  )
  (y0, v0), (y1, v1) = [(float(y), float(v)) for y, v in (axis[0], axis[-1])]
  limit = re.search(
    r'class="limit[^>]*><polyline points="[\d.]+,([\d.]+)', plot.drawing
  )
  return v0 + (float(limit[1]) - y0) / (y1 - y0) * (v1 - v0)


@settings(deadline=None, max_examples=200)
@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_cover_the_range_in_round_steps(low, span):
  """Axes people can read: few ticks, equal steps of 1, 2 or 5, covering the data."""
  high = low + span
  assume(span > 1e-6 * abs(low))  # below that float spacing shows
  ticks = svg.ticks(low, high)
  slack = 1e-6 * (high - low)
  assert 2 <= len(ticks) <= 8
  assert ticks[0] <= low + slack
  assert ticks[-1] >= high - slack
  step = (ticks[-1] - ticks[0]) / (len(ticks) - 1)
  mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
  assert min(abs(mantissa - m) for m in (1, 2, 5)) < 1e-3
  for text in (svg.number, svg.percent):
    texts = [text for _, text in svg._marks(ticks, float, text)]
    assert len(set(texts)) == len(texts), texts


def test_a_report_is_replaced_only_by_a_whole_one(tmp_path):
  """A failure while writing must not leave half a page over a good one."""
  path = tmp_path / 'report.html'
  arguments = [], [], report.Summary('first'), {}
  report.write_report(path, *arguments)
  good = path.read_text('utf-8')
  assert '<title>first</title>' in good
  with pytest.raises(AttributeError):
    report.write_report(path, [], [object()], report.Summary('second'), {})
  assert path.read_text('utf-8') == good
  report.write_report(
    path, _records(), [_episode(HOSTILE)], report.Summary(HOSTILE), {}
  )
  assert path.read_text('utf-8') != good
  assert [p.name for p in tmp_path.iterdir()] == ['report.html']
