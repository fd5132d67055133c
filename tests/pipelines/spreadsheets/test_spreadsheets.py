"""Spreadsheets: formulas pass, constants and hostile workbooks do not."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import shutil
import sys

import pytest

from m2jax.tasks import harbor
from m2jax_pipelines import installed, spreadsheets
from m2jax_pipelines.context import Context
from m2jax_pipelines.llm import LLMClient
from m2jax_pipelines.spreadsheets import engines, guard, models, mutants, tables
from tests.pipelines.spreadsheets.workbooks import (
  MODEL,
  bytes_of,
  edited,
  solved,
  spec,
  with_,
)

openpyxl = pytest.importorskip('openpyxl', reason='pip install -e ./m2jax_pipelines')
pytest.importorskip('formulas', reason='pip install -e ./m2jax_pipelines')


_DRAWERS = (*models.GENERATORS, *tables.drawers())


@pytest.mark.parametrize('draw', _DRAWERS, ids=lambda draw: draw.__name__)
def test_formulas_and_oracle_agree(grade, draw):
  """Two calculations that share nothing, with the given inputs and with others."""
  model = draw(random.Random(5))
  assert grade.judge(bytes_of(solved(model)), spec(model)) == (1, '')
  assert grade.judge(spreadsheets.workbook(model.cells), spec(model))[0] == 0


SOFFICE = pytest.mark.skipif(
  not shutil.which('soffice'), reason='apt-get install libreoffice-calc-nogui'
)


@SOFFICE
@pytest.mark.long
def test_libreoffice_agrees(grade, tmp_path):
  """On every kind, in one run of it: it takes seconds to start."""
  own = sys.modules['engines']  # as the verifier imports it
  wanted = {}
  for draw in _DRAWERS:
    model = draw(random.Random(5))
    for number, case in enumerate(spec(model)['cases']):
      book = solved(model)
      for place, value in case['inputs'].items():
        sheet, _, cell = place.partition('!')
        book[sheet][cell].value = value
      path = tmp_path / f'{draw.__name__}{number}.xlsx'
      book.save(path)
      wanted[path] = case['values']
  out = tmp_path / 'out'
  assert not own._soffice([*map(str, wanted)], str(tmp_path / 'profile'), str(out))
  for path, values in wanted.items():
    book = openpyxl.load_workbook(out / path.name, data_only=True)
    for place, value in values.items():
      sheet, _, cell = place.partition('!')
      found = own.plain(book[sheet][cell].value)
      assert own.same(found, json.loads(json.dumps(value))), (path.name, place)


_BROKEN = {
  'crash': '#!/bin/sh\nkill -SEGV $$\n',
  'hang': '#!/bin/sh\nsleep 60 & wait\n',
  'failure': '#!/bin/sh\necho no display >&2; exit 77\n',
  'nothing': '#!/bin/sh\nexit 0\n',
}


@pytest.mark.parametrize('name', _BROKEN)
def test_a_broken_libreoffice_is_no_judgement(grade, tmp_path, monkeypatch, name):
  """A reward of 0 would blame the agent for the machine's failure (law 5)."""
  program = tmp_path / 'soffice'
  program.write_text(_BROKEN[name])
  program.chmod(0o755)
  monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
  own = sys.modules['engines']  # as the verifier imports it
  monkeypatch.setattr(own, 'SOFFICE_S', 0.3)
  both = spec(MODEL, ('formulas', 'libreoffice'))
  with pytest.raises(own.EngineFailed, match='LibreOffice'):
    grade.judge(bytes_of(solved(MODEL)), both)
  # Wrong by the engine that works: no other verdict is left but this one.
  assert grade.judge(bytes_of(with_(B2='=Loan!B1')), both)[0] == 0


@pytest.mark.parametrize(
  'first, breaks', [('formulas', 'an exception'), ('libreoffice', 'a value')]
)
def test_engines_that_disagree_decide_nothing(grade, monkeypatch, first, breaks):
  """One finds the workbook right, the other does not: no reward is the right one."""
  own = sys.modules['engines']  # as the verifier imports it
  calculate = own.formulas
  cell = min(MODEL.wanted)

  def other(paths, cells):
    if breaks == 'an exception':
      raise ZeroDivisionError('a function that it does not know')
    return [{**values, cell: 'another'} for values in calculate(paths, cells)]

  both = {'formulas': calculate, 'libreoffice': calculate} | {first: other}
  for name, engine in both.items():
    monkeypatch.setattr(own, name, engine)
  used = spec(MODEL, ('formulas', 'libreoffice'))
  with pytest.raises(grade.Undecided, match=f'disagree: .*{first}.*right'):
    grade.judge(bytes_of(solved(MODEL)), used)
  # Both find this one wrong, whatever they say of it.
  reward, reason = grade.judge(bytes_of(with_(B2='=Loan!B1')), used)
  assert reward == 0 and 'formulas' in reason and 'libreoffice' in reason


def test_a_disagreement_is_an_invalid_verdict(grade, tmp_path, monkeypatch):
  """As the whole verifier writes it: no reward of 0, a reason."""
  own, tree = sys.modules['engines'], tmp_path / 'tree'
  tree.mkdir()
  (tree / 'book.xlsx').write_bytes(bytes_of(solved(MODEL)))
  used = spec(MODEL, ('formulas', 'libreoffice'))
  (tmp_path / 'cases.json').write_text(json.dumps(used))
  monkeypatch.setattr(own, 'available', lambda: ['formulas', 'libreoffice'])
  monkeypatch.setattr(own, 'libreoffice', lambda p, c: [dict.fromkeys(c, 0.5)] * len(p))
  monkeypatch.setattr(grade, 'TESTS', str(tmp_path))
  monkeypatch.setattr(sys, 'path', list(sys.path))
  monkeypatch.setenv('M2JAX_TREE', str(tree))
  monkeypatch.setenv('M2JAX_LOGS', str(tmp_path))
  grade.main()
  details = json.loads((tmp_path / 'details.json').read_text())
  assert details['invalid'].startswith('the engines disagree: ')
  assert not (tmp_path / 'reward.txt').exists()  # Harbor would count it


def test_both_engines_judge_where_both_are(monkeypatch):
  """By default a task names all engines of the machine that makes it."""
  used = []
  for here in (['formulas'], ['formulas', 'libreoffice']):
    monkeypatch.setattr(engines, 'available', lambda here=here: here)
    used.append(spreadsheets.engines_of(spreadsheets.Config()))
  assert used == [('formulas',), ('formulas', 'libreoffice')]
  one = spreadsheets.Config(engines=('formulas',))
  assert spreadsheets.engines_of(one) == ('formulas',)


@SOFFICE
@pytest.mark.long
@pytest.mark.parametrize('broken', [False, True], ids=['sound', 'out of time'])
def test_libreoffice_judges_in_the_sandbox(tmp_path, monkeypatch, broken):
  """The whole way of a verdict: passed with both engines, invalid without one."""
  config = spreadsheets.Config(engines=('formulas', 'libreoffice'))
  used, rng = config.engines, random.Random(1)
  draft = spreadsheets.drafted(config, MODEL, rng, used, 'loan/0')
  if broken:
    engine = draft.tests['engines.py'].replace(
      b'SOFFICE_S, SOFFICE_TRIES = 30, 2', b'SOFFICE_S, SOFFICE_TRIES = 0.01, 1'
    )
    draft = dataclasses.replace(draft, tests={**draft.tests, 'engines.py': engine})
  installed.site(tmp_path / 'sites', spreadsheets._SITE, spreadsheets._PACKAGES)
  path = harbor.write(draft, tmp_path / 'tasks' / 'train')
  task = harbor.of_directory(harbor.read(path))

  async def attempt():
    async with task.open() as environment:
      solved = await task.solve(environment)
      assert solved.returncode == 0, solved.stderr
      return await task.judge(environment)

  verdict = asyncio.run(attempt())
  assert verdict.outcome == (harbor.INVALID if broken else harbor.PASSED), verdict


def test_an_ordinary_workbook_is_not_refused():
  assert guard.check(edited()) == ''


def test_values_are_compared_by_type():
  assert engines.same(1.0, 1.0 + 1e-9) and engines.same('Accept', 'accept')
  assert not engines.same(1.0, True) and not engines.same('1', 1.0)
  assert not engines.same(None, 0.0) and not engines.same(float('nan'), 1.0)


@pytest.mark.parametrize('draw', _DRAWERS, ids=lambda draw: draw.__name__)
def test_every_input_changes_in_hidden_cases(draw):
  model = draw(random.Random(3))
  assert set(model.inputs) <= set(model.cells)
  cases = mutants.choose(model, random.Random(1), 3)
  assert cases == mutants.choose(model, random.Random(1), 3)
  assert cases[0]['inputs'] == {} and len(cases) >= 4
  assert all(set(case['inputs']) == set(model.inputs) for case in cases[1:])
  told = [list(case['values'].values()) for case in cases]
  assert all(len({values[i] for values in told}) > 1 for i in range(len(told[0])))


def test_wrong_formulas_are_derived():
  model = models.orders(random.Random(3))
  found = dict.fromkeys(f for place, f in mutants.of(model) if place == 'Answer!B5')
  price = model.wanted['Answer!B5'].formula.partition('*IF')[0]
  low = model.cells['Answer!B2']
  for rest in (
    '*IF(Orders!B2>$B$2,1-$B$1,1)',
    '*IF(1=1,1-$B$1,1)',
    '*IF(1=2,1-$B$1,1)',
    f'*IF(Orders!B2>=({low}),1-$B$1,1)',
    '*IF(Orders!B2>=$B$2,1-(0.1),1)',
  ):
    assert price + rest in found
  assert any('$B$3:' in formula for formula in found)
  assert f'=({model.case(None)["values"]["Answer!B5"]!r})' in found


def _candidates(directory, number):
  """The first candidates of a run in a directory."""

  async def first():
    config = spreadsheets.Config(engines=('formulas',))
    context = Context(directory, LLMClient(config.author, 'author'))
    found = []
    async for candidate in spreadsheets.candidates(config, context):
      found.append(candidate)
      if len(found) == number:
        return found

  return asyncio.run(first())


def test_hidden_cases_are_drawn_with_the_salt_of_a_dataset(tmp_path, monkeypatch):
  """The code and the seed do not tell them; a run that goes on draws the same."""
  monkeypatch.setattr(installed, 'site', lambda *_: None)
  one, other = (_candidates(tmp_path / name, 1)[0].draft for name in 'ab')
  assert one.overlay.keys() == other.overlay.keys()
  assert one.instruction == other.instruction
  cases = [json.loads(draft.tests['cases.json'])['cases'] for draft in (one, other)]
  assert cases[0][0] == cases[1][0] and cases[0][1:] != cases[1][1:]
  again = _candidates(tmp_path / 'a', 1)[0].draft
  assert again.tests == one.tests
  salt = (tmp_path / 'a' / 'salt').read_bytes()
  assert len(salt) == 32
  files = {**one.tests, **one.overlay, **one.solution}
  assert not any(salt in data for data in files.values())


def test_a_workbook_whose_wrong_formulas_are_not_told_is_rejected(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(installed, 'site', lambda *_: None)
  monkeypatch.setattr(mutants, 'MOST', 0)
  found = _candidates(tmp_path, 1)[0]
  assert found.draft is None and 'wrong formulas are right in all cases' in found.reason
