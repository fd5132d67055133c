"""Spreadsheets: formulas pass, constants and hostile workbooks do not."""

from __future__ import annotations

import asyncio
import io
import json
import random
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from m2jax import pipelines
from m2jax.pipelines import spreadsheets
from m2jax.pipelines.spreadsheets import engines, guard, models, tables

openpyxl = pytest.importorskip('openpyxl', reason='pip install m2jax[pipelines]')
pytest.importorskip('formulas', reason='pip install m2jax[pipelines]')


@pytest.fixture(scope='module')
def grade():
  """The verifier as it runs: beside its modules, not in a package."""
  here = str(Path(spreadsheets.__file__).parent)
  sys.path.insert(0, here)
  try:
    import grade as module

    yield module
  finally:
    sys.path.remove(here)
    for name in ('grade', 'guard', 'engines'):
      sys.modules.pop(name, None)


def _spec(model, used=('formulas',)):
  config = spreadsheets.Config(hidden_cases=1)
  found = spreadsheets.spec(config, model, random.Random(1), used)
  return json.loads(json.dumps(found))


def _bytes(book) -> bytes:
  file = io.BytesIO()
  book.save(file)
  return file.getvalue()


def _solved(model):
  book = openpyxl.load_workbook(io.BytesIO(spreadsheets.workbook(model.cells)))
  for place, wanted in model.wanted.items():
    sheet, _, cell = place.partition('!')
    book[sheet][cell] = wanted.formula
  return book


_DRAWERS = (*models.GENERATORS, *tables.drawers())


@pytest.mark.parametrize('draw', _DRAWERS, ids=lambda draw: draw.__name__)
def test_formulas_and_oracle_agree(grade, draw):
  """Two calculations that share nothing, with the given inputs and with others."""
  model = draw(random.Random(5))
  assert grade.judge(_bytes(_solved(model)), _spec(model)) == (1, '')
  assert grade.judge(spreadsheets.workbook(model.cells), _spec(model))[0] == 0


@pytest.mark.skipif(
  not shutil.which('soffice'), reason='apt-get install libreoffice-calc-nogui'
)
@pytest.mark.long
@pytest.mark.parametrize('draw', _DRAWERS, ids=lambda draw: draw.__name__)
def test_libreoffice_agrees(grade, draw):
  model = draw(random.Random(5))
  found = grade.judge(_bytes(_solved(model)), _spec(model, ('formulas', 'libreoffice')))
  assert found == (1, '')


MODEL = models.loan(random.Random(2))


def _with(**cells):
  """The solved loan, with other cells: 'B2' is of Answer, 'Loan_B1' of Loan."""
  book = _solved(MODEL)
  for name, value in cells.items():
    sheet, _, cell = name.rpartition('_')
    book[sheet or 'Answer'][cell] = value
  return book


def _constants():
  values = MODEL.case(None)['values']
  return _with(**{place.partition('!')[2]: v for place, v in values.items()})


def _constant_formulas():
  values = MODEL.case(None)['values']
  return _with(**{p.partition('!')[2]: f'={v}+0*Loan!B1' for p, v in values.items()})


def _array():
  book = _solved(MODEL)
  formula = openpyxl.worksheet.formula.ArrayFormula('B2', '=-PMT(Loan!B2/12,360,1)')
  book['Answer']['B2'] = formula
  return book


def _name():
  book = _solved(MODEL)
  book.defined_names['x'] = openpyxl.workbook.defined_name.DefinedName(
    'x', attr_text='Loan!$B$1'
  )
  return book


def _renamed():
  book = _solved(MODEL)
  book['Loan'].title = 'Other'
  return book


@pytest.mark.parametrize(
  'make, reason',
  [
    (_constants, 'holds no formula'),
    (_constant_formulas, 'after inputs changed'),
    (lambda: _with(B2='=1200'), 'refers to no cell'),
    (lambda: _with(B2="'=-PMT(1)"), 'holds no formula'),
    (lambda: _with(B2='=B2'), ''),  # circular
    (lambda: _with(B2=None), 'holds no formula'),
    (lambda: _with(Loan_B1=1), 'was changed'),
    (lambda: _with(Loan_B2='=1/12'), 'was changed'),
    (lambda: _with(Loan_A1=None), 'was changed'),
    (lambda: _with(Answer_A1='other'), 'was changed'),
    (lambda: _with(B2='=INDIRECT("Loan!B1")'), 'INDIRECT is not allowed'),
    (lambda: _with(B2='=WEBSERVICE("http://a")+B9'), 'WEBSERVICE is not allowed'),
    (lambda: _with(B2='=[1]Sheet1!A1'), 'another workbook'),
    (lambda: _with(C9='=cmd|"/c x"!A1'), ''),
    (lambda: _with(B2='=RAND()*B1'), 'RAND is not allowed'),
    (lambda: _with(B2='=IF(Loan!B1=0,1,CELL("row",B1))'), 'CELL is not allowed'),
    (lambda: _with(B2='=' + '+'.join(['Loan!B1'] * 400)), 'characters'),
    (lambda: _with(B2='=-PMT(Loan!B2/12,Loan!B3*12,Loan!B1)&""'), 'is wrong'),
    (lambda: _with(B2='=1/0+Loan!B1'), ''),
    (_array, 'array formulas'),
    (_name, 'defined names'),
    (_renamed, 'is missing'),
  ],
)
def test_an_attempt_to_game_it_fails(grade, make, reason):
  reward, why = grade.judge(_bytes(make()), _spec(MODEL))
  assert reward == 0 and reason in why, why


def _edited(*, add=None, change=None, **options) -> bytes:
  """The solved workbook as a zip archive with other parts."""
  source, target = io.BytesIO(_bytes(_solved(MODEL))), io.BytesIO()
  with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, 'w', 8) as new:
    for part in old.infolist():
      data = old.read(part)
      if change and part.filename == change[0]:
        data = data.replace(change[1], change[2])
      new.writestr(part.filename, data)
    for name, data in (add or {}).items():
      new.writestr(name, data)
  return target.getvalue()


_SHEET = 'xl/worksheets/sheet1.xml'


@pytest.mark.parametrize(
  'make, reason',
  [
    (lambda: b'', 'no readable zip'),
    (lambda: b'PK\x03\x04' + b'x' * 100, 'no readable zip'),
    (lambda: b'x' * (3 << 20), 'bytes'),
    (lambda: _edited(add={'xl/media/a.png': b'\0' * (7 << 20)}), 'compressed'),
    (lambda: _edited(add={f'x{i}.xml': b'<a/>' for i in range(300)}), 'parts'),
    (lambda: _edited(add={'xl/vbaProject.bin': b'x'}), 'macros'),
    (lambda: _edited(add={'xl/externalLinks/externalLink1.xml': b'<a/>'}), 'links'),
    (lambda: _edited(add={'xl/embeddings/o.bin': b'x'}), 'embedded'),
    (lambda: _edited(add={'xl/connections.xml': b'<a/>'}), 'connections'),
    (lambda: _edited(add={'../../etc/x.xml': b'<a/>'}), 'outside'),
    (lambda: _edited(add={'XL/worksheets/sheet1.xml': b'<a/>'}), 'one name'),
    (
      lambda: _edited(
        change=(_SHEET, b'<worksheet', b'<!DOCTYPE a [<!ENTITY b "c">]><worksheet')
      ),
      'entities',
    ),
    (
      lambda: _edited(add={'a.xml': '<?xml version="1.0"?><a/>'.encode('utf-16')}),
      'UTF-8',
    ),
    (
      lambda: _edited(add={'a.xml': b'<?xml version="1.0" encoding="utf-7"?><a/>'}),
      'UTF-8',
    ),
    (lambda: _edited(change=(_SHEET, b'r="A1"', b'r="XFD1"')), 'column'),
    (lambda: _edited(change=(_SHEET, b'r="A1"', b'r="A1048576"')), 'row'),
    (lambda: _edited(change=(_SHEET, b'<row r="1"', b'<row r="999999999999"')), 'row'),
    (
      lambda: _edited(
        add={'xl/_rels/x.rels': b'<R TargetMode="External" Target="a"/>'}
      ),
      'outside',
    ),
  ],
)
def test_a_hostile_workbook_is_refused(grade, make, reason):
  """Before a parser sees it, and with the reason."""
  assert reason in guard.check(make())
  assert grade.judge(make(), _spec(MODEL))[0] == 0


def test_an_ordinary_workbook_is_not_refused():
  assert guard.check(_edited()) == ''


def test_values_are_compared_by_type():
  assert engines.same(1.0, 1.0 + 1e-9) and engines.same('Accept', 'accept')
  assert not engines.same(1.0, True) and not engines.same('1', 1.0)
  assert not engines.same(None, 0.0) and not engines.same(float('nan'), 1.0)


@pytest.mark.long
def test_tasks_are_admitted(tmp_path):
  config = spreadsheets.Config(count=1, engines=('formulas',))
  assert asyncio.run(pipelines.run(config, tmp_path, show=False)).tasks == 1
