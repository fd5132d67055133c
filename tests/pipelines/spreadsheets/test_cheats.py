"""Attempts to game the verifier of spreadsheets: each gets 0, or is refused."""

from __future__ import annotations

import functools
import io
import random
import re
import time
import zipfile

import pytest

from m2jax_pipelines.spreadsheets import guard, models, tables
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


def _constants():
  values = MODEL.case(None)['values']
  return with_(**{place.partition('!')[2]: v for place, v in values.items()})


def _constant_formulas():
  values = MODEL.case(None)['values']
  return with_(**{p.partition('!')[2]: f'={v}+0*Loan!B1' for p, v in values.items()})


def _array():
  book = solved(MODEL)
  formula = openpyxl.worksheet.formula.ArrayFormula('B2', '=-PMT(Loan!B2/12,360,1)')
  book['Answer']['B2'] = formula
  return book


def _name():
  book = solved(MODEL)
  book.defined_names['x'] = openpyxl.workbook.defined_name.DefinedName(
    'x', attr_text='Loan!$B$1'
  )
  return book


def _renamed():
  book = solved(MODEL)
  book['Loan'].title = 'Other'
  return book


@pytest.mark.parametrize(
  'make, reason',
  [
    (_constants, 'holds no formula'),
    (_constant_formulas, 'after inputs changed'),
    (lambda: with_(B2='=1200'), 'refers to no cell'),
    (lambda: with_(B2="'=-PMT(1)"), 'holds no formula'),
    (lambda: with_(B2='=B2'), ''),  # circular
    (lambda: with_(B2=None), 'holds no formula'),
    (lambda: with_(Loan_B1=1), 'was changed'),
    (lambda: with_(Loan_B2='=1/12'), 'was changed'),
    (lambda: with_(Loan_A1=None), 'was changed'),
    (lambda: with_(Answer_A1='other'), 'was changed'),
    (lambda: with_(B2='=INDIRECT("Loan!B1")'), 'INDIRECT is not allowed'),
    (lambda: with_(B2='=WEBSERVICE("http://a")+B9'), 'WEBSERVICE is not allowed'),
    (lambda: with_(B2='=[1]Sheet1!A1'), 'another workbook'),
    (lambda: with_(C9='=cmd|"/c x"!A1'), ''),
    (lambda: with_(B2='=RAND()*B1'), 'RAND is not allowed'),
    (lambda: with_(B2='=IF(Loan!B1=0,1,CELL("row",B1))'), 'CELL is not allowed'),
    (lambda: with_(B2='=' + '+'.join(['Loan!B1'] * 400)), 'characters'),
    (lambda: with_(B2='=-PMT(Loan!B2/12,Loan!B3*12,Loan!B1)&""'), 'is wrong'),
    (lambda: with_(B2='=1/0+Loan!B1'), ''),
    (_array, 'array formulas'),
    (_name, 'defined names'),
    (_renamed, 'is missing'),
  ],
)
def test_an_attempt_to_game_it_fails(grade, make, reason):
  reward, why = grade.judge(bytes_of(make()), spec(MODEL))
  assert reward == 0 and reason in why, why


def _twin(title):
  """The solved loan with a further sheet, whose name differs from one by case."""
  book = with_()
  book.create_sheet('x')['B2'] = 1
  return edited(book, change=('xl/workbook.xml', b'"x"', b'"%s"' % title.encode()))


def _changed(change):
  book = solved(MODEL)
  change(book['Answer'])
  return book


def _hidden_constant():
  """The value for the given inputs in a hidden sheet, behind a look-up."""
  value = MODEL.case(None)['values']['Answer!B2']
  book = with_()
  book.create_sheet('x')['A1'] = value
  book['x'].sheet_state = 'veryHidden'
  book['Answer']['B2'] = '=x!A1'
  return book


def _white(sheet):
  sheet['B2'].font = openpyxl.styles.Font(color='FFFFFFFF')


def _black(sheet):
  sheet['B2'].fill = openpyxl.styles.PatternFill('solid', fgColor='FF000000')
  sheet['B2'].font = openpyxl.styles.Font(color='FF000000')


GIVEN = MODEL.cells['Loan!B1']
VALUE = MODEL.case(None)['values']['Answer!B2']


@pytest.mark.parametrize(
  'make, reason',
  [
    (_hidden_constant, 'after inputs changed'),
    (lambda: with_(B2=f'=IF(Loan!B1={GIVEN},{VALUE},0)'), 'after inputs changed'),
    (lambda: with_(B2=f'=INDEX({{{VALUE},1}},1)+0*Loan!B1'), ''),
    (lambda: with_(B2=f'=SUM(Loan!B1,-Loan!B1)+{VALUE}'), 'after inputs changed'),
    (lambda: with_(B2=f'="{VALUE}"&IF(Loan!B1=0,"","")'), 'is wrong'),
    (lambda: with_(B2=f"'{VALUE}"), 'holds no formula'),
    (lambda: with_(B2=str(VALUE)), 'holds no formula'),
    (lambda: with_(B2='=NOW()*0+Loan!B1'), 'NOW is not allowed'),
    (lambda: with_(B2='=OFFSET(Loan!B1,0,0)'), 'OFFSET is not allowed'),
    (lambda: with_(B2='=HYPERLINK("http://a",Loan!B1)'), 'HYPERLINK is not allowed'),
    (lambda: with_(B2='=_xlfn.LET(x,Loan!B1,x)'), 'not allowed'),
    (lambda: with_(B2='=\u0405UM(Loan!B1)'), 'not allowed'),  # a Cyrillic letter
    (lambda: with_(Z9='=RAND()'), 'RAND is not allowed'),  # in another cell
    (lambda: with_(B2="='file:///etc/passwd'#$x.A1"), ''),
    (lambda: with_(Loan_B1=str(GIVEN)), 'was changed'),  # text like the number
    (lambda: with_(Loan_B1=True), 'was changed'),
    (lambda: _twin('ANSWER'), 'by case only'),
    (lambda: _twin('loan'), 'by case only'),
    (lambda: _changed(lambda s: s.merge_cells('A1:B4')), ''),
    (
      lambda: _changed(lambda s: s.row_dimensions[2].__setattr__('hidden', True)),
      'hidden',
    ),
    (
      lambda: _changed(lambda s: s.column_dimensions['B'].__setattr__('hidden', True)),
      'hidden',
    ),
    (
      lambda: _changed(lambda s: s.column_dimensions.group('A', 'C', hidden=True)),
      'hidden',
    ),
    (lambda: _changed(lambda s: setattr(s, 'sheet_state', 'hidden')), 'hidden'),
    (lambda: _changed(_white), 'colour'),
    (lambda: _changed(_black), 'colour'),
    (lambda: _changed(lambda s: setattr(s['B2'], 'number_format', ';;;')), 'format'),
    (lambda: _changed(lambda s: setattr(s['B2'], 'number_format', '"1200"')), 'format'),
    (lambda: _changed(lambda s: setattr(s['B2'], 'number_format', '0;"7"0')), 'format'),
    (lambda: _changed(lambda s: setattr(s['B2'], 'number_format', '0,,')), 'format'),
  ],
)
def test_a_hidden_or_constant_answer_fails(grade, make, reason):
  reward, why = grade.judge(bytes_of(make()), spec(MODEL))
  assert reward == 0 and reason in why, why


@functools.cache
def _task(draw):
  model = draw(random.Random(f'0/{draw.__name__}/0'))
  return model, spec(model)


def _every(old, new):
  """Each formula of the solution, with other text in it."""

  def change(model):
    return {
      place: changed
      for place, wanted in model.wanted.items()
      if (changed := re.sub(old, new, wanted.formula)) != wanted.formula
    }

  return change


def _one(place, old, new):
  return lambda model: {place: re.sub(old, new, model.wanted[place].formula)}


def _visible(place, condition='{0}=""'):
  """The value for the given inputs, whatever they are."""

  def change(model):
    value = model.case(None)['values'][place]
    cell = condition.format(min(model.inputs))
    return {place: f'=IF({cell},0,"{value}")'}

  return change


def _given(place, reference):
  """The given value for each reference to an input."""
  return lambda model: _every(reference, repr(model.cells[place]))(model)


def _summed_by_hand(model):
  """The rows that have the region now, one by one."""
  formula = model.wanted['Answer!B3'].formula
  region = re.search('"(.*)"', formula)[1]
  rows = [c.rpartition('A')[2] for c, v in model.cells.items() if v == region]
  return {'Answer!B3': '=' + '+'.join(f'Sales!C{row}' for row in rows)}


_STOCKS = tables.drawers()
WRONG = [
  (models.project, lambda m: {'Answer!B5': '=IF(B1>0,"accept","reject")'}),
  (models.project, lambda m: {'Answer!B5': '=IF(B4>0,"accept","reject")'}),
  (models.project, _visible('Answer!B5')),
  (models.project, _given('Answer!B1', r'\bB1\b')),
  (models.project, _one('Answer!B4', r'B\d+\)', 'B5)')),
  (models.orders, _given('Answer!B1', r'\$B\$1\b')),
  (models.orders, _one('Answer!B6', '>=', '>')),
  (models.orders, _one('Answer!B6', r'IF\(.*\)$', '1')),
  (models.orders, _given('Orders!A2', r'Orders!A2\b')),
  (models.orders, _every(r'\$2:', '$3:')),
  (models.ledger, _every('">"', '">="')),
  (models.ledger, lambda m: _every('">"&B1', f'">{m.cells["Answer!B1"]}"')(m)),
  (models.ledger, _every(r'\$2:', '$3:')),
  (models.ledger, _summed_by_hand),
  *((draw, _visible('Answer!B4')) for draw in _STOCKS),
  *((draw, _one('Answer!B4', r'\$2:', '$3:')) for draw in _STOCKS),
  (models.loan, _given('Loan!B3', r'Loan!B3\b')),
  (models.loan, lambda m: {'Answer!B4': '=Loan!B1-B2*Loan!B4'}),
]


@pytest.mark.parametrize('draw, change', WRONG)
def test_a_formula_of_other_meaning_fails(grade, draw, change):
  """Some case of the task that is drawn tells it from the right one."""
  model, cases = _task(draw)
  book, formulas = solved(model), change(model)
  assert formulas
  for place, formula in formulas.items():
    book['Answer'][place.partition('!')[2]] = formula.replace("'", '"')
  reward, reason = grade.judge(bytes_of(book), cases)
  assert reward == 0 and ('is wrong' in reason or 'refers to no' in reason), reason


def _whole(formula):
  return re.sub(r'\$([A-Z])\$2:\$([A-Z])\$\d+', r'$\1:$\2', formula)


def _signs(model):
  """SUMPRODUCT of numbers that signs make of truth values."""
  formula = model.wanted['Answer!B4'].formula
  new = re.sub(r'\((\(.*?\))\*(.*)\*(.*)\)', r'(--\1,\2,\3)', formula)
  assert '--' in new
  return {'Answer!B4': new}


def _look_up(model):
  return {
    place: f'=VLOOKUP(Orders!A{i},Prices!A:B,2,FALSE)*Orders!B{i}'
    f'*(1-IF(Orders!B{i}>=$B$2,$B$1,0))'
    for i, place in enumerate([*model.wanted][:-1], 2)
  }


@pytest.mark.parametrize(
  'draw, change',
  [
    (models.ledger, _signs),
    (
      models.ledger,
      lambda m: {p: f.replace('--', '- -') for p, f in _signs(m).items()},
    ),
    (models.ledger, _one('Answer!B4', r'=(.*)', r'=--\1')),
    (
      models.ledger,
      lambda m: {
        p: _whole(w.formula) for p, w in m.wanted.items() if 'PRODUCT' not in w.formula
      },
    ),
    (models.ledger, _every(r'(:\$[A-Z]\$)\d+', r'\g<1>1048576')),
    (models.ledger, _every(r'(:\$[A-Z]\$)\d+', r'\g<1>500')),
    (models.orders, _look_up),
    (models.orders, lambda m: {p: _whole(w.formula) for p, w in m.wanted.items()}),
    (models.project, _one('Answer!B4', r'\)$', ',0.1)')),
    (models.project, _one('Answer!B3', r'=(.*)\+(NPV.*)', r'=\2+\1')),
    (models.loan, _one('Answer!B3', '=(.*)', r'=ROUND (\1,9)')),
    *((draw, _every(r'^=(INDEX|AVERAGE.*)', r'=+\1')) for draw in _STOCKS),
  ],
)
def test_other_right_formulas_pass(grade, draw, change):
  model, cases = _task(draw)
  book, formulas = solved(model), change(model)
  for place, formula in formulas.items():
    book['Answer'][place.partition('!')[2]] = formula
  started = time.process_time()
  assert formulas and grade.judge(bytes_of(book), cases) == (1, '')
  assert time.process_time() - started < 20


@pytest.mark.parametrize(
  'change',
  [
    lambda s: setattr(s['B2'], 'number_format', '#,##0.00'),
    lambda s: setattr(s['B2'], 'number_format', '"EUR" 0.00;[Red]-0.00'),
    lambda s: setattr(s['B2'], 'number_format', '0.0%'),
    lambda s: setattr(s['B2'], 'font', openpyxl.styles.Font(color='FF0000FF')),
    lambda s: s.column_dimensions.group('D', 'E', hidden=True),
    lambda s: s.__setitem__('D1', '=Loan!B1'),
  ],
)
def test_other_right_workbooks_pass(grade, change):
  assert grade.judge(bytes_of(_changed(change)), spec(MODEL)) == (1, '')


def test_a_stored_value_must_be_the_formulas(grade):
  """Some programs show stored values without a calculation."""
  data = edited()
  with zipfile.ZipFile(io.BytesIO(data)) as archive:
    place = 'xl/worksheets/sheet2.xml'
    old = re.search(rb'r="B2"[^>]*><f>[^<]*</f>', archive.read(place)).group()
    rest = re.search(re.escape(old) + rb'(<v ?/>|<v></v>)', archive.read(place)).group()
  for value, expected in ((VALUE, ''), (VALUE + 1, 'stores another value')):
    data = edited(change=(place, rest, old + b'<v>%r</v>' % value))
    reward, reason = grade.judge(data, spec(MODEL))
    assert reward == (not expected) and expected in reason


_SHEET = 'xl/worksheets/sheet1.xml'


@pytest.mark.parametrize(
  'make, reason',
  [
    (lambda: b'', 'no readable zip'),
    (lambda: b'PK\x03\x04' + b'x' * 100, 'no readable zip'),
    (lambda: b'x' * (3 << 20), 'bytes'),
    (lambda: edited(add={'xl/media/a.png': b'\0' * (7 << 20)}), 'compressed'),
    (lambda: edited(add={f'x{i}.xml': b'<a/>' for i in range(300)}), 'parts'),
    (lambda: edited(add={'xl/vbaProject.bin': b'x'}), 'macros'),
    (lambda: edited(add={'xl/externalLinks/externalLink1.xml': b'<a/>'}), 'links'),
    (lambda: edited(add={'xl/embeddings/o.bin': b'x'}), 'embedded'),
    (lambda: edited(add={'xl/connections.xml': b'<a/>'}), 'connections'),
    (lambda: edited(add={'../../etc/x.xml': b'<a/>'}), 'outside'),
    (lambda: edited(add={'XL/worksheets/sheet1.xml': b'<a/>'}), 'one name'),
    (
      lambda: edited(
        change=(_SHEET, b'<worksheet', b'<!DOCTYPE a [<!ENTITY b "c">]><worksheet')
      ),
      'entities',
    ),
    (
      lambda: edited(add={'a.xml': '<?xml version="1.0"?><a/>'.encode('utf-16')}),
      'UTF-8',
    ),
    (
      lambda: edited(add={'a.xml': b'<?xml version="1.0" encoding="utf-7"?><a/>'}),
      'UTF-8',
    ),
    (lambda: edited(change=(_SHEET, b'r="A1"', b'r="XFD1"')), 'column'),
    (lambda: edited(change=(_SHEET, b'r="A1"', b'r="A1048576"')), 'row'),
    (lambda: edited(change=(_SHEET, b'<row r="1"', b'<row r="999999999999"')), 'row'),
    (
      lambda: edited(add={'xl/_rels/x.rels': b'<R TargetMode="External" Target="a"/>'}),
      'outside',
    ),
    (lambda: edited(add={'x.rels': b'<R TargetMode="&#69;xternal"/>'}), 'references'),
    (lambda: edited(add={'xl/a.bin': b'\xef\xbb\xbf <!DOCTYPE a>'}), 'another name'),
    (lambda: edited(add={'a.png': '<a/>'.encode('utf-16')}), 'another name'),
    (lambda: edited(add={'a.dat': b'<!DOCTYPE a [<!ENTITY b "c">]>'}), 'entities'),
    (lambda: edited(change=(_SHEET, b'r="A1"', b'r="&#65;1"')), 'references'),
    (lambda: edited(change=(_SHEET, b'r="A2"', b'r="A1"')), 'one place'),
    (lambda: edited(add={'/etc/x.xml': b'<a/>'}), 'outside'),
    (lambda: edited(add={'xl\\..\\x.xml': b'<a/>'}), 'outside'),
    (lambda: edited(add={'xl/macrosheets/sheet1.xml': b'<a/>'}), 'macros'),
    (lambda: edited(add={'customXml/item1.xml': b'<a/>'}), 'custom XML'),
  ],
)
def test_a_hostile_workbook_is_refused(grade, make, reason):
  """Before a parser sees it, and with the reason."""
  assert reason in guard.check(make())
  assert grade.judge(make(), spec(MODEL))[0] == 0
