"""Required cells whose value is not shown as it is: each workbook gets 0."""

from __future__ import annotations

import pytest

from m2jax_pipelines.spreadsheets import guard
from tests.pipelines.spreadsheets.workbooks import (
  MODEL,
  PROJECT,
  bytes_of,
  edited,
  solved,
  spec,
)

openpyxl = pytest.importorskip('openpyxl', reason='pip install -e ./m2jax_pipelines')
pytest.importorskip('formulas', reason='pip install -e ./m2jax_pipelines')

_MAIN = b'http://schemas.openxmlformats.org/spreadsheetml/2006/main'
_SHEET, _STYLES = 'xl/worksheets/sheet2.xml', 'xl/styles.xml'


def changed(change, model=MODEL):
  """The solved workbook after a change of its sheet Answer."""
  book = solved(model)
  change(book['Answer'])
  return book


def _set(name, value, what='B2'):
  return lambda sheet: setattr(sheet[what], name, value)


def _font(**fields):
  return _set('font', openpyxl.styles.Font(**fields))


def _colour(**fields):
  return _font(color=openpyxl.styles.colors.Color(**fields))


def _on(ground, colour, pattern='solid'):
  def change(sheet):
    sheet['B2'].fill = openpyxl.styles.PatternFill(pattern, fgColor=ground)
    sheet['B2'].font = openpyxl.styles.Font(color=colour)

  return change


def _gradient(sheet):
  sheet['B2'].fill = openpyxl.styles.GradientFill(stop=('FF000000', 'FFFFFFFF'))


def _row(**fields):
  return lambda s: [setattr(s.row_dimensions[2], k, v) for k, v in fields.items()]


def _column(**fields):
  return lambda s: [setattr(s.column_dimensions['B'], k, v) for k, v in fields.items()]


def _sheet(**fields):
  return lambda s: [setattr(s.sheet_format, k, v) for k, v in fields.items()]


def _view(**fields):
  return lambda s: [setattr(s.sheet_view, k, v) for k, v in fields.items()]


def _narrow_group(sheet):
  sheet.column_dimensions['A'].min, sheet.column_dimensions['A'].max = 1, 3
  sheet.column_dimensions['A'].width = 0.1


def _condition(sheet):
  style = openpyxl.styles.differential.DifferentialStyle(
    numFmt=openpyxl.styles.numbers.NumberFormat(numFmtId=200, formatCode='"9999"')
  )
  rule = openpyxl.formatting.rule.Rule(type='expression', dxf=style, formula=['TRUE'])
  sheet.conditional_formatting.add('B2', rule)


def _table(sheet):
  sheet['C1'] = 'Other'
  sheet.add_table(openpyxl.worksheet.table.Table(displayName='t', ref='B1:C4'))


def _theme(data):
  """A theme in which the colour of text is white."""
  book = solved(MODEL)
  book['Answer']['B2'].font = openpyxl.styles.Font(
    color=openpyxl.styles.colors.Color(theme=1)
  )
  return edited(book, change=('xl/theme/theme1.xml', *data))


@pytest.mark.parametrize(
  'change, reason',
  [
    (_colour(theme=0), 'colour'),
    (_colour(theme=1, tint=0.99), 'colour'),
    (_colour(theme=99), 'colour'),
    (_colour(indexed=9), 'colour'),
    (_colour(indexed=65), 'colour'),
    (_colour(rgb='FFFEFEFE'), 'colour'),
    (_colour(rgb='FFFFFF00'), 'colour'),  # yellow
    (_on('FF000000', 'FF101010'), 'colour'),
    (_on('FF000000', None), 'colour'),  # automatic
    (_on('FF000000', 'FFFFFFFF', 'lightGrid'), 'colour'),
    (_gradient, 'colour'),
    (_font(sz=1), 'small'),
    (_font(name='Wingdings'), 'font'),
    (_font(charset=2), 'font'),
    (_font(strike=True), 'struck'),
    (_set('alignment', openpyxl.styles.Alignment(horizontal='fill')), 'alignment'),
    (_set('alignment', openpyxl.styles.Alignment(indent=200)), 'alignment'),
    (_row(height=0.5), 'small'),
    (_column(width=0.1), 'small'),
    (_narrow_group, 'small'),
    (_sheet(zeroHeight=True), 'hidden'),
    (_sheet(defaultRowHeight=0), 'small'),
    (_sheet(defaultColWidth=0), 'small'),
    (_view(showFormulas=True), 'formulas'),
    (_view(showZeros=False), 'zeros'),
    (_view(zoomScale=10), 'small'),
    (_condition, 'conditional'),
    (_table, 'table'),
    (lambda s: setattr(s.parent.calculation, 'calcMode', 'manual'), 'calculat'),
    (lambda s: setattr(s.parent.calculation, 'fullPrecision', False), 'calculat'),
  ],
)
def test_a_cell_that_cannot_be_read_fails(grade, change, reason):
  reward, why = grade.judge(bytes_of(changed(change)), spec(MODEL))
  assert reward == 0 and reason in why, why


@pytest.mark.parametrize(
  'number_format',
  [
    *('[$7-409]0', '[$1,000 -409]0', '*90', '770', '0.007', '"minus "0', '-0', '(0)'),
    *('\\-0', '0" million"', '0\\k', '0;0', '0;[Red]0', '0;-0;7', '0;-0;"none"'),
    *('[White]0.00', '[Yellow]0', '[Color2]0', '[>5]0', '[h]:mm', 'yyyy-mm-dd', '@@'),
    *('0,', '0.0,,', '# ?/?', '0!7', '0;;', '0;-0;;', '% ', '0%%', '_7'),
    *('[DBNum1]0', '[$-1E000]0', '"$7"0', '"1 EUR "0', '0.0.0', '0E+0E+0', 'General0'),
  ],
)
def test_a_format_that_shows_another_value_fails(number_format):
  """Some of them in a workbook: test_cheats.py."""
  assert not guard.shows(number_format)


@pytest.mark.parametrize('number_format', ['0;0;0;"not "@', '0;-0;0;', '0;-0;0;"x"'])
def test_a_format_that_shows_another_text_fails(number_format):
  assert not guard.shows(number_format)


def test_a_workbook_that_shows_another_text_fails(grade):
  book = changed(_set('number_format', '0;0;0;"not "@', 'B5'), PROJECT)
  reward, why = grade.judge(bytes_of(book), spec(PROJECT))
  assert reward == 0 and 'format' in why, why


@pytest.mark.parametrize(
  'part, old, new, reason',
  [
    (_SHEET, b'</sheetData>', b'</sheetData><drawing r:id="rId1"/>', 'drawing'),
    (
      _SHEET,
      b'</sheetData>',
      b'</sheetData><extLst><ext><x14:conditionalFormattings/></ext></extLst>',
      'conditional',
    ),
    (
      _SHEET,
      b'</sheetData>',
      b'</sheetData><x-y:drawing xmlns:x-y="%s"/>' % _MAIN,
      'drawing',
    ),
    (
      _SHEET,
      b'</sheetData>',
      b'<x-y:row xmlns:x-y="%s" r="999999"/></sheetData>' % _MAIN,
      'a row beyond',
    ),
    (_SHEET, b'<row r="2"', b'<row r="2" ht="0" customHeight="1"', 'small'),
    (
      _SHEET,
      b'<sheetData>',
      b'<cols><col min="2" max="2" width="0" customWidth="1"/></cols><sheetData>',
      'small',
    ),
    ('xl/theme/theme1.xml', b'windowText', b'window', 'colour'),
    ('xl/theme/theme1.xml', b'<a:dk1>', b'<a:dk1><a:srgbClr val="FFFFFF"/>', 'colour'),
    (
      _STYLES,
      b'</styleSheet>',
      b'<colors><indexedColors>%s</indexedColors></colors></styleSheet>'
      % (b'<rgbColor rgb="00FFFFFF"/>' * 64),
      'colour',
    ),
  ],
)
def test_a_part_that_hides_a_cell_fails(grade, part, old, new, reason):
  book = changed(_colour(indexed=8) if part == _STYLES else _colour(theme=1))
  data = edited(book, change=(part, old, new.replace(b'x14:', b'').replace(b'r:', b'')))
  assert data != edited(book)
  reward, why = grade.judge(data, spec(MODEL))
  assert reward == 0 and reason in why, why


@pytest.mark.parametrize(
  'change',
  [
    _colour(theme=1),
    _colour(theme=4),
    _colour(theme=0, tint=-0.5),
    _colour(indexed=12),
    _on('FF203864', 'FFFFFFFF'),
    _on('FFFFF2CC', 'FF000000'),
    _font(sz=20, b=True, name='Arial'),
    _row(height=30),
    _column(width=20),
    _view(zoomScale=80),
    lambda s: setattr(s, 'freeze_panes', 'A2'),
    _set('alignment', openpyxl.styles.Alignment(horizontal='right', indent=1)),
  ],
)
def test_a_cell_in_another_look_passes(grade, change):
  """By the part of the verifier that looks at looks; it raises otherwise."""
  data, case = bytes_of(changed(change)), spec(MODEL)
  values = case['cases'][0]['values']
  grade.check_shown(data, grade.load(data), case['required'], values)


@pytest.mark.parametrize(
  'number_format',
  [
    *('General', '0', '0.00', '#,##0', '#,##0.00', '0.0%', '0.00E+00', '##0.0E+0'),
    *('"$"#,##0_);("$"#,##0)', '#,##0.00_);[Red](#,##0.00)', '$#,##0.00', '"€"0.00'),
    '_(* #,##0_);_(* \\(#,##0\\);_(* "-"_);_(@_)',
    '_("$"* #,##0.00_);_("$"* \\(#,##0.00\\);_("$"* "-"??_);_(@_)',
    '_("$"* #,##0.00_)_("$"* \\(#,##0.00\\)_("$"* "-"??_)_(@_)',
    *('[$€-407]#,##0.00', '#,##0.00 [$EUR]', '#,##0.00\\ "€"', '[$$-409]#,##0.00'),
    *('[Blue]0.00', '"EUR" 0.00;[Red]-0.00', '0.00;-0.00;0.00;@', '$#,##0;-$#,##0'),
  ],
)
def test_a_usual_format_passes(number_format):
  assert guard.shows(number_format)
