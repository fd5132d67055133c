"""The page's data of a record: against the loop's own fold, and of hostile records."""

from __future__ import annotations

import json

import pytest

from m2jax.evolve import lineage
from m2jax.evolve.page import serving, source
from m2jax.evolve.page.fold import COLUMNS
from m2jax.evolve.page.source import Source
from tests.evolve import simulated
from tests.evolve.page import records


def named(page):
  return [dict(zip(COLUMNS, row, strict=True)) for row in page['rows']]


def opened(workdir, lines):
  return Source(records.write(workdir, lines))


def test_a_lineage_of_the_loop(tmp_path):
  """Scores, incumbent, cost and counters are those of the loop's fold."""
  bad = {'sampling.temperature': 99.0}
  script = simulated.script(
    *(simulated.BETTER, simulated.WORSE, bad, simulated.BEST, simulated.WORSE)
  )
  loop = simulated.make(tmp_path, script, rounds=7)
  state = loop.run()
  loop.close()
  found = Source(tmp_path)
  page = found.page()
  rows = named(page)
  assert [row['decision'] for row in rows] == [a.decision for a in state.attempts]
  assert {'keep', 'revert', 'reject'} <= {row['decision'] for row in rows}
  assert [row['parent'] for row in rows] == [a.parent for a in state.attempts]
  for row, attempt in zip(rows, state.attempts, strict=True):
    assert row['effect'] == (attempt.effect if row['round'] else None)
    assert (row['mean'] is None) == (attempt.score is None)
  mean = lineage.mean(state.nodes[state.incumbent].scores)
  n = len(state.nodes[state.incumbent].scores)
  number, *scores = page['incumbent']
  assert (number, scores[1]) == (state.incumbent, n)
  assert scores[0] == pytest.approx(mean) and scores[2] < mean < scores[3]
  assert page['start'][2] == len(state.nodes[0].scores)
  assert page['spent']['tokens'] == state.spent.tokens
  assert page['spent']['episodes'] == state.spent.episodes
  assert page['failures'] == state.failures and page['since_keep'] == state.since_keep
  assert page['stopped'] == state.stopped and page['status'] == 'finished'
  third = {name: mean for name, mean, *_ in page['sealed']['means']}
  assert third == pytest.approx(state.sealed['means'])
  for row in rows[1:]:
    texts = found.round(row['round'])
    if row['phase'] == 'gate':
      pairs, effect, low, high, evidence, needed = texts['looks'][-1][:6]
      assert (pairs, evidence, needed) == (row['pairs'], row['evidence'], row['needed'])
      assert (effect, low, high) == pytest.approx(
        [row['effect'], row['effect_low'], row['effect_high']]
      )
    else:
      assert not texts['looks']
  final = found.final()
  assert [number for number, _ in final['keeps']] == page['keeps']
  assert '+    "temperature": 0.3' in final['diff']


def test_rounds_as_they_are_recorded(tmp_path):
  """Every kind of end; the round in progress; a torn line; rows never change."""
  lines = records.small()
  found = opened(tmp_path, lines[:12])
  first = found.page()
  assert [row['decision'] for row in named(first)] == ['start', 'keep']
  assert first['current'] == [2, 'smoke'] and first['sealed'] is None
  records.write(tmp_path, lines[12:], 'a')
  with open(tmp_path / 'record.jsonl', 'a') as file:
    file.write('{"schema":1,"kind":"loo')  # the process is killed here
  rest = found.page(len(first['rows']), first['identity'])
  assert rest['first'] == 2 and rest['left_out'] == 0
  assert rest['current'] == [5, 'static checks']
  rows = named(found.page())
  assert named(first) + named(rest) == rows
  assert [(row['decision'], row['phase']) for row in rows] == [
    ('start', ''),
    ('keep', 'gate'),
    ('revert', 'gate'),
    ('reject', 'checked'),
    ('reject', 'proposal'),
  ]
  assert rest['counts'] == {'keep': 1, 'revert': 1, 'checked': 1, 'proposal': 1}
  assert rows[2]['n'] == 15 and rows[2]['mean'] == pytest.approx(1 / 3)
  assert [row[:3] for row in rest['second']] == [[0, 0.5, 4], [1, 0.75, 4]]
  looks = found.round(2)['looks']
  assert looks[0][0] == 16 and looks[0][6:] == [0, 11, 0]  # a failure counts as 0
  assert found.round(3)['problems'] == ['seed: an unknown field']
  assert found.round(4)['error'] == 'the model does not answer'
  assert found.round(6) is None
  assert '\u202e' not in json.dumps(found.round(1), ensure_ascii=False)


def test_another_record_in_its_place(tmp_path):
  """--fresh: the page gets all rows of the new one."""
  found = opened(tmp_path, records.small())
  before = found.page()
  records.write(tmp_path, [records.begin() | {'time_s': 1.8e9}, records.baseline()])
  after = found.page(len(before['rows']), before['identity'])
  assert after['first'] == 0 and len(after['rows']) == 1
  (tmp_path / 'record.jsonl').unlink()
  assert found.page()['reading'] == 1 and found.round(9) is None


BAD = [
  '{',
  '[]',
  'null',
  '{"schema":1,"kind":["look"]}',
  '[' * 100_000,
  '{"schema":1,"kind":"look","round":1,"look":0,"pairs":[[0,0,NaN,1]],"incumbent":0}',
  records.line('proposal'),
  records.proposal(1, parent=7),
  records.proposal(1, parent=-1),
  records.proposal(10**9),
  records.decision(1, 'delete'),
  records.decision(0, 'keep'),
  records.decision(1, 'keep', phase='<b>'),
  records.look(1, [(0.0, 7.0)]),
  records.look(1, [(0.0, '1')]),
  records.look(1, [(0.0, 1.0)], incumbent=3),
  records.look(1, []) | {'pairs': 'all'},
  records.second(1),
  records.begin(),
  records.line('sealed', results=[]),
  records.line('sealed', results={'start': [[1, 2]]}),
  {'schema': 2, 'kind': 'stop', 'reason': ''},
]


@pytest.mark.parametrize('bad', BAD, ids=range(len(BAD)))
def test_a_line_that_cannot_be_used_is_left_out(tmp_path, bad):
  """And nothing else is: the page is that of the record without it."""
  lines = records.small()
  whole = opened(tmp_path, lines).page()
  found = opened(tmp_path, [*lines[:2], bad, *lines[2:]])
  page = found.page()
  assert page['left_out'] == 1 and page['problems'][0].startswith('line 3: ')
  assert page['rows'] == whole['rows']
  assert page['spent'] == whole['spent']
  assert found.round(1) is not None


MIXED = [None, 1, 'x', [], {}, [[]], [1, 2, 'x'], {'text': []}]
JUNK = [None, True, -1, 1e308, '\ud800', MIXED, {'a': MIXED, 'b': {'tokens': 'x'}}]


@pytest.mark.parametrize('junk', JUNK, ids=range(len(JUNK)))
def test_values_of_any_kind_give_a_page(tmp_path, junk):
  """Any field replaced by what it should not be: a page, JSON, no exception."""
  lines = [*records.small()[:9], records.sealed()]
  for i, line in enumerate(lines):
    for name in line:
      found = opened(tmp_path, [*lines[:i], line | {name: junk}, *lines[i + 1 :]])
      page = found.page()
      texts = [found.round(number) for number in range(3)]
      json.dumps([page, texts, found.final()], allow_nan=False).encode()


def test_settings_that_are_none(tmp_path):
  """No gate can be computed again: pairs and effects are there, no evidence."""
  for config in (7, {}, {'gate': {'looks': 3}}, {'gate': {'alpha': 9, 'looks': [1]}}):
    found = opened(tmp_path, [records.begin(config), *records.small()[1:]])
    assert found.page()['limits']['rounds'] == 0
    assert found.round(1)['looks'][0][:6] == [16, 0.75, None, None, None, None]


def test_sizes_are_bounded(tmp_path, monkeypatch):
  """A long line is passed over in blocks, texts are cut, a large record is in parts."""
  monkeypatch.setattr(source, 'MAX_LINE_BYTES', 1_200_000)
  monkeypatch.setattr(source, '_BLOCK', 1_000)
  monkeypatch.setattr(source, 'PART_BYTES', 500_000)
  texts = dict.fromkeys(('memory', 'criticism', 'diff', 'note', 'source'), 'é' * 30_000)
  huge = records.proposal(1, **texts)
  lines = [*records.small()[:3], json.dumps({'x': 'y' * 2_000_000}), huge]
  lines += [records.decision(1, 'reject', 'checked', 'z' * 10_000)]
  found = opened(tmp_path, lines)
  parts = [found.page()]
  while parts[-1]['reading'] < 1:
    parts.append(found.page())
  assert len(parts) > 1 and len(parts[-1]['rows']) == 2
  assert parts[-1]['problems'] == ['line 4: longer than 1 MiB']
  assert len(json.dumps(parts[-1]['rows'], ensure_ascii=False)) < 2_000
  assert len(json.dumps(found.round(1), ensure_ascii=False)) < 60_000


def test_a_file_keeps_the_texts_of_keeps(tmp_path, monkeypatch):
  """Beyond its size a file leaves out texts of other rounds."""
  found = opened(tmp_path, records.long(120))
  whole = serving.write(found, tmp_path / 'evolution.html')
  monkeypatch.setattr(serving, '_FILE_CHARACTERS', 20_000)
  assert serving.write(found, tmp_path / 'evolution.html') < whole
  assert not list(tmp_path.glob('*.new'))


def test_no_record(tmp_path):
  with pytest.raises(ValueError, match='no record.jsonl'):
    Source(tmp_path)


@pytest.mark.long
def test_ten_thousand_rounds_and_a_line_of_50_mb(tmp_path):
  """They are read in parts; none of what a page asks for is large."""
  lines = records.long(10_000)
  lines.insert(5000, json.dumps({'x': 'y' * 50_000_000}))
  found = opened(tmp_path, lines)
  page = found.page()
  while page['reading'] < 1:
    page = found.page()
  assert page['rounds'] == 10_000 and page['left_out'] == 1
  assert len(json.dumps(page)) < 5_000_000
  assert len(json.dumps(found.page(10_001, page['identity']))) < 200_000
  assert serving.write(found, tmp_path / 'evolution.html') < 20_000_000
