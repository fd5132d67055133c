"""Slides: a deck that follows the rules passes; each broken rule fails."""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
import zipfile
from pathlib import Path

import pytest

from m2jax import pipelines
from m2jax.pipelines import slides, spreadsheets
from m2jax.pipelines.slides import render

openpyxl = pytest.importorskip('openpyxl', reason='pip install m2jax[pipelines]')
pptx = pytest.importorskip('pptx', reason='pip install m2jax[pipelines]')
from pptx.chart.data import CategoryChartData  # noqa: E402
from pptx.util import Inches, Pt  # noqa: E402

DRAFT = slides.drafted('Orders', random.Random(3), 'orders/0')
SPEC = json.loads(DRAFT.tests['spec.json'])
PLACE = Inches(0.5), Inches(1.8), Inches(9), Inches(5)


@pytest.fixture(scope='module')
def grade():
  paths = [str(Path(m.__file__).parent) for m in (slides, spreadsheets)]
  sys.path[:0] = paths
  sys.modules.pop('grade', None)
  try:
    import grade as module

    yield module
  finally:
    for path in paths:
      sys.path.remove(path)
    for name in ('grade', 'guard', 'look', 'settings'):
      sys.modules.pop(name, None)


@pytest.fixture(scope='module')
def solved(tmp_path_factory):
  from m2jax.pipelines.slides import solve

  path = tmp_path_factory.mktemp('deck') / 'deck.pptx'
  rows = [line.split(',') for line in DRAFT.overlay['data.csv'].decode().split()[1:]]
  solve.write(rows, json.loads(DRAFT.solution['plan.json'])['titles'], path)
  return path


def _bytes(deck) -> bytes:
  file = io.BytesIO()
  deck.save(file)
  return file.getvalue()


def _box(slide, text, *place, points=None):
  box = slide.shapes.add_textbox(*place)
  box.text_frame.text = text
  if points:
    box.text_frame.paragraphs[0].runs[0].font.size = Pt(points)


def _chart(deck, categories=None, values=None, series=1):
  chart = next(s.chart for s in deck.slides[2].shapes if s.has_chart)
  data = CategoryChartData()
  data.categories = categories or SPEC['chart']['categories']
  for number in range(series):
    data.add_series(f's{number}', values or SPEC['chart']['values'])
  chart.replace_data(data)


def _drop(deck, slide, index):
  shape = deck.slides[slide].shapes[index]
  shape._element.getparent().remove(shape._element)


def _last(deck):
  ids = deck.slides._sldIdLst
  ids.remove(ids[2])


VALUES, NAMES = SPEC['chart']['values'], SPEC['chart']['categories']


@pytest.mark.parametrize(
  'change, reason',
  [
    (lambda d: setattr(d.slides[0].shapes.title, 'text', 'Other'), 'the title'),
    (lambda d: setattr(d.slides[0].shapes.title, 'text', ''), 'the title'),
    (lambda d: _drop(d, 0, 0), 'the title'),
    (_last, 'slides'),
    (lambda d: d.slides.add_slide(d.slide_layouts[6]), 'slides'),
    (lambda d: d.slides[1]._element.set('show', '0'), 'hidden'),
    (lambda d: _drop(d, 1, 1), 'does not say'),
    (lambda d: _box(d.slides[0], 'x', Inches(9), Inches(7), *PLACE[2:]), 'within'),
    (lambda d: _box(d.slides[0], 'x', -Inches(5), *PLACE[1:]), 'within'),
    (lambda d: _box(d.slides[2], 'cover', *PLACE), 'on top'),
    (lambda d: _box(d.slides[0], 'tiny', *PLACE, points=4), 'points'),
    (lambda d: _box(d.slides[0], 'word ' * 2000, *PLACE), 'overflows'),
    (lambda d: _box(d.slides[0], 'x' * 90, *PLACE[:3], Inches(0.2)), 'overflows'),
    (lambda d: d.slides[0].shapes.add_group_shape(), 'grpSp is not allowed'),
    (lambda d: _box(d.slides[0], 'x', *PLACE[:2], 0, 0), 'no place'),
    (lambda d: _chart(d, values=[v + 1 for v in VALUES]), 'values'),
    (lambda d: _chart(d, values=VALUES[::-1]), 'values'),
    (lambda d: _chart(d, categories=NAMES[::-1]), 'categories'),
    (lambda d: _chart(d, categories=NAMES[:-1], values=VALUES[:-1]), 'categories'),
    (lambda d: _chart(d, series=2), 'one series'),
    (lambda d: _drop(d, 2, 1), '0 charts'),
  ],
)
def test_an_attempt_to_game_it_fails(grade, solved, change, reason):
  deck = pptx.Presentation(str(solved))
  change(deck)
  reward, why = grade.judge(_bytes(deck), SPEC)
  assert reward == 0 and reason in why, why


def test_the_solution_passes(grade, solved):
  assert grade.judge(solved.read_bytes(), SPEC) == (1, '')
  assert grade.judge(None, SPEC)[0] == 0


def _run(deck, slide, paragraph=1):
  """A run of text of a slide's second shape."""
  return deck.slides[slide].shapes[1].text_frame.paragraphs[paragraph].runs[0]


def _summary(deck, *lines):
  frame = deck.slides[1].shapes[1].text_frame
  frame.text = '\n'.join(lines)
  for paragraph in frame.paragraphs:
    for run in paragraph.runs:
      run.font.size = Pt(14)


def _coloured(deck, colour, fill=None):
  from pptx.dml.color import RGBColor

  for paragraph in deck.slides[1].shapes[1].text_frame.paragraphs:
    for run in paragraph.runs:
      run.font.color.rgb = RGBColor.from_string(colour)
  if fill:
    shape = deck.slides[1].shapes[1]
    shape.fill.solid()
    shape.fill.fore_color.rgb = RGBColor.from_string(fill)


A = '{http://schemas.openxmlformats.org/drawingml/2006/main}'
P = '{http://schemas.openxmlformats.org/presentationml/2006/main}'
C = '{http://schemas.openxmlformats.org/drawingml/2006/chart}'


def _made(deck):
  """(chart's shape, its XML)"""
  shape = next(s for s in deck.slides[2].shapes if s.has_chart)
  return shape, shape.chart._chartSpace


def _cache_only(deck):
  """The chart shows the data, and its workbook has others."""
  _, root = _made(deck)
  kept = [(v, v.text) for v in root.iter(C + 'v')]
  other = io.BytesIO()
  book = openpyxl.load_workbook(
    io.BytesIO(_made(deck)[0].chart.part.chart_workbook.xlsx_part.blob)
  )
  book.active['B2'] = 1
  book.save(other)
  _made(deck)[0].chart.part.chart_workbook.xlsx_part._blob = other.getvalue()
  assert all(v.text == text for v, text in kept)


def _no_workbook(deck):
  _, root = _made(deck)
  root.remove(root.find(C + 'externalData'))


def _other_cells(deck):
  _, root = _made(deck)
  next(f for f in root.iter(C + 'f') if '$B$2' in f.text).text = 'Sheet1!$B$3:$B$9'


def _no_drawing(deck):
  from pptx.oxml import parse_xml

  series = next(_made(deck)[1].iter(C + 'ser'))
  for old in series.findall(C + 'spPr'):
    series.remove(old)
  names = f'xmlns:c="{C[1:-1]}" xmlns:a="{A[1:-1]}"'
  series.insert(3, parse_xml(f'<c:spPr {names}><a:noFill/></c:spPr>'))


def _axis(deck, tag, value):
  from pptx.oxml import parse_xml

  scaling = list(_made(deck)[1].iter(C + 'scaling'))[-1]
  scaling.append(parse_xml(f'<c:{tag} xmlns:c="{C[1:-1]}" val="{value}"/>'))


def _axis_ends(deck, tag, value):
  """The axis of categories crosses the other somewhere else."""
  from pptx.oxml import parse_xml

  axis = next(_made(deck)[1].iter(C + 'catAx'))
  old = axis.find(C + 'crosses')
  axis.replace(old, parse_xml(f'<c:{tag} xmlns:c="{C[1:-1]}" val="{value}"/>'))


def _bars(deck):
  """Horizontal bars, whose categories run downwards."""
  from pptx.oxml import parse_xml

  root = _made(deck)[1]
  next(root.iter(C + 'barDir')).set('val', 'bar')
  scaling = next(root.iter(C + 'catAx')).find(C + 'scaling')
  scaling.replace(
    scaling.find(C + 'orientation'),
    parse_xml(f'<c:orientation xmlns:c="{C[1:-1]}" val="maxMin"/>'),
  )


def _in_thousands(deck):
  from pptx.oxml import parse_xml

  unit = (
    f'<c:dispUnits xmlns:c="{C[1:-1]}"><c:builtInUnit val="thousands"/></c:dispUnits>'
  )
  next(_made(deck)[1].iter(C + 'valAx')).append(parse_xml(unit))


def _titled(deck, text):
  chart = _made(deck)[0].chart
  chart.has_title = True
  chart.chart_title.text_frame.text = text


def _axis_titled(deck, text):
  axis = _made(deck)[0].chart.value_axis
  axis.has_title = True
  axis.axis_title.text_frame.text = text


def _named(deck, text):
  """The series, and with it the legend."""
  next(next(_made(deck)[1].iter(C + 'tx')).iter(C + 'v')).text = text


def _label(deck):
  chart = _made(deck)[0].chart
  frame = chart.plots[0].series[0].points[0].data_label.text_frame
  frame.text = '9999'


def _tiny(deck):
  shape = _made(deck)[0]
  shape.width, shape.height = Inches(0.2), Inches(0.2)


def _inherited(deck):
  """Text that gets its size from the shape's own list style."""
  shape = deck.slides[1].shapes[1]
  for paragraph in shape.text_frame.paragraphs:
    for run in paragraph.runs:
      run.font.size = None
  style = shape._element.find(f'{P}txBody/{A}lstStyle')
  if style is None:
    style = shape._element.find(f'{P}txBody').makeelement(A + 'lstStyle', {})
    shape._element.find(f'{P}txBody').insert(1, style)
  level = style.makeelement(A + 'lvl1pPr', {})
  level.append(level.makeelement(A + 'defRPr', {'sz': '100'}))
  style.append(level)


def _master(deck):
  """Titles get one point from the master's style."""
  style = deck.slide_master._element.find(f'{P}txStyles/{P}titleStyle/{A}lvl1pPr')
  style.find(A + 'defRPr').set('sz', '100')
  for slide in deck.slides:
    for run in slide.shapes.title.text_frame.paragraphs[0].runs:
      run.font.size = None


def _shrunk(deck):
  body = deck.slides[1].shapes[1]._element.find(f'{P}txBody/{A}bodyPr')
  for old in list(body):
    body.remove(old)
  body.append(body.makeelement(A + 'normAutofit', {'fontScale': '10000'}))


def _field(deck):
  """A fact in a field of one point."""
  run = _run(deck, 1)._r
  field = run.makeelement(A + 'fld', {'id': '{0}', 'type': 'slidenum'})
  for part in list(run):
    field.append(part)
  field.find(A + 'rPr').set('sz', '100')
  run.getparent().replace(run, field)


def _hidden_shape(deck):
  deck.slides[1].shapes[1]._element.find(f'{P}nvSpPr/{P}cNvPr').set('hidden', '1')


def _table(deck):
  shape = deck.slides[0].shapes.add_table(1, 1, *PLACE)
  shape.table.cell(0, 0).text = 'x'


def _animated(deck):
  element = deck.slides[1]._element
  element.append(element.makeelement(P + 'timing', {}))


def _two_titles(deck):
  from copy import deepcopy

  tree = deck.slides[0].shapes._spTree
  tree.append(deepcopy(deck.slides[0].shapes.title._element))
  other = deck.slides[0].shapes[-1]
  other.left, other.top, other.width, other.height = PLACE


def _body_as_title(deck):
  """python-pptx takes any placeholder of index 0 for the title."""
  next(deck.slides[0]._element.iter(P + 'ph')).set('type', 'body')


def _dark_background(deck):
  from pptx.dml.color import RGBColor

  fill = deck.slides[1].background.fill
  fill.solid()
  fill.fore_color.rgb = RGBColor(0, 0, 0)


def _filled(colour, alpha=''):
  def change(deck):
    from pptx.oxml import parse_xml

    series = next(_made(deck)[1].iter(C + 'ser'))
    for old in series.findall(C + 'spPr'):
      series.remove(old)
    names = f'xmlns:c="{C[1:-1]}" xmlns:a="{A[1:-1]}"'
    inner = f'<a:srgbClr val="{colour}">{alpha}</a:srgbClr>'
    xml = f'<c:spPr {names}><a:solidFill>{inner}</a:solidFill></c:spPr>'
    series.insert(3, parse_xml(xml))

  return change


def _line(deck):
  """A line chart whose line is not drawn."""
  from pptx.enum.chart import XL_CHART_TYPE

  data = CategoryChartData()
  data.categories = NAMES
  data.add_series('Value', VALUES)
  _drop(deck, 2, 1)
  frame = deck.slides[2].shapes.add_chart(XL_CHART_TYPE.LINE, *PLACE, data)
  frame.chart.plots[0].series[0].format.line.fill.background()


def _formatted(deck):
  plot = _made(deck)[0].chart.plots[0]
  plot.has_data_labels = True
  plot.data_labels.show_value = True
  plot.data_labels.number_format = '"9999"'
  plot.data_labels.number_format_is_linked = False


def _axis_formatted(deck):
  labels = _made(deck)[0].chart.value_axis.tick_labels
  labels.number_format, labels.number_format_is_linked = '"77"0', False


def _set(tag, name, value):
  """Sets an attribute of all elements of a kind in the summary's text."""

  def change(deck):
    body = deck.slides[1].shapes[1]._element.find(f'{P}txBody')
    for paragraph in body.findall(A + 'p'):
      paragraph.get_or_add_pPr()
    for one in body.iter(A + tag):
      one.set(name, str(value))

  return change


def _spaced(deck):
  for paragraph in deck.slides[1].shapes[1].text_frame.paragraphs:
    paragraph.space_before = Pt(900)


def _indented_style(deck):
  """The same by the list style of the shape."""
  body = deck.slides[1].shapes[1]._element.find(f'{P}txBody')
  style = body.find(A + 'lstStyle')
  if style is None:
    style = body.makeelement(A + 'lstStyle', {})
    body.insert(1, style)
  style.append(style.makeelement(A + 'lvl1pPr', {'marL': '27432000'}))


def _chart_in_summary(deck):
  data = CategoryChartData()
  data.categories = NAMES
  data.add_series('v', VALUES)
  shapes = deck.slides[1].shapes
  shapes[1].height = Inches(2)
  box = Inches(0.5), Inches(4), Inches(9), Inches(3)
  shapes.add_chart(_made(deck)[0].chart.chart_type, *box, data)


def _picture_in_summary(deck):
  from PIL import Image

  image = io.BytesIO()
  Image.new('RGB', (400, 100), 'white').save(image, 'PNG')
  image.seek(0)
  deck.slides[1].shapes[1].height = Inches(2)
  deck.slides[1].shapes.add_picture(image, Inches(0.5), Inches(4))


def _layout(deck):
  """What is shown on a slide, and is no part of it."""
  from copy import deepcopy

  box = deepcopy(deck.slides[1].shapes[1]._element)
  deck.slides[1].slide_layout.shapes._spTree.append(box)
  for text in box.iter(A + 't'):
    text.text = f'{OTHERS[0]} 12345'


def _connector_text(deck):
  """A line that is as wide as the summary and lies over it."""
  from pptx.enum.shapes import MSO_CONNECTOR

  left, top, width, height = PLACE
  line = deck.slides[1].shapes.add_connector(
    MSO_CONNECTOR.STRAIGHT, left, top + Inches(0.3), left + width, top + Inches(0.3)
  )
  line.line.width = Pt(1500)


TOTAL, BEST, MOST = SPEC['slides'][1]['texts']
OTHERS = SPEC['slides'][1]['others']


@pytest.mark.parametrize(
  'change, reason',
  [
    (_cache_only, 'workbook of the chart differs'),
    (_no_workbook, 'no workbook'),
    (_other_cells, 'workbook of the chart differs'),
    (_no_drawing, 'not drawn'),
    (lambda d: _axis(d, 'max', 5), 'ends below'),
    (lambda d: _axis(d, 'min', 800), 'begins above'),
    (lambda d: _axis(d, 'logBase', 10), 'logarithmic'),
    (lambda d: _axis(d, 'orientation', 'maxMin'), 'reversed'),
    (lambda d: _axis_ends(d, 'crosses', 'max'), 'reversed'),
    (lambda d: _axis_ends(d, 'crossesAt', 500), 'reversed'),
    (_in_thousands, 'other units'),
    (lambda d: _titled(d, 'Up by 40 %'), 'has a number'),
    (lambda d: _titled(d, f'{NAMES[0]} leads'), f'says {NAMES[0]}'),
    (lambda d: _axis_titled(d, 'in units of ①'), 'has a number'),
    (lambda d: _named(d, f'not {NAMES[1].upper()}'), f'says {NAMES[1]}'),
    (_label, 'labels'),
    (_tiny, 'small'),
    (lambda d: _summary(d, f'{TOTAL} {BEST} {MOST} or 7'), 'other numbers'),
    (lambda d: _summary(d, *(str(i) for i in range(60)), TOTAL, BEST, MOST), 'other'),
    (lambda d: _summary(d, TOTAL, f'{OTHERS[0]} or {BEST}', MOST), f'says {OTHERS[0]}'),
    (lambda d: _summary(d, TOTAL, OTHERS[0].upper(), BEST, MOST), 'says'),
    (lambda d: _summary(d, MOST, BEST, TOTAL), 'in its place'),
    (lambda d: _summary(d, TOTAL, BEST.replace('e', '\u0435'), MOST), 'in its place'),
    (lambda d: _summary(d, '\u200b'.join(TOTAL), BEST, MOST), 'in its place'),
    (lambda d: _summary(d, f'=SUM(1,{TOTAL})', BEST, MOST), 'in its place'),
    (lambda d: _coloured(d, 'FFFFFF'), 'cannot be read'),
    (lambda d: _coloured(d, '101010', '000000'), 'cannot be read'),
    (_dark_background, 'cannot be read'),
    (_inherited, 'points'),
    (_master, 'points'),
    (_shrunk, 'points'),
    (_field, 'points'),
    (_hidden_shape, 'hidden'),
    (_table, 'only charts'),
    (_animated, 'animations'),
    (lambda d: setattr(d.slides[1].shapes[1], 'rotation', 180), 'rotated'),
    (_two_titles, 'one title'),
    (_body_as_title, 'one title'),
    (_filled('FFFFFF'), 'not drawn'),
    (_filled('FF0000', '<a:alpha val="0"/>'), 'not drawn'),
    (_line, 'not drawn'),
    (_formatted, 'not its values'),
    (_axis_formatted, 'not its values'),
    (_set('bodyPr', 'rot', 10800000), 'moved or changed'),
    (_set('bodyPr', 'vert', 'vert270'), 'moved or changed'),
    (_set('bodyPr', 'lIns', Inches(20)), 'moved or changed'),
    (_set('bodyPr', 'tIns', Inches(8)), 'moved or changed'),
    (_set('pPr', 'marL', Inches(30)), 'moved or changed'),
    (_set('pPr', 'indent', -Inches(30)), 'moved or changed'),
    (_set('rPr', 'spc', -4000), 'moved or changed'),
    (_set('rPr', 'strike', 'sngStrike'), 'moved or changed'),
    (_set('rPr', 'baseline', -900000), 'moved or changed'),
    (_spaced, 'moved or changed'),
    (_indented_style, 'moved or changed'),
    (_chart_in_summary, 'more than text'),
    (_picture_in_summary, 'more than text'),
    (_layout, 'the layout'),
    (_connector_text, 'more than text'),
  ],
)
def test_what_is_not_seen_does_not_count(grade, solved, change, reason):
  """Text and charts that a parser finds and a reader does not, and lists of guesses."""
  deck = pptx.Presentation(str(solved))
  change(deck)
  reward, why = grade.judge(_bytes(deck), SPEC)
  assert reward == 0 and reason in why, why


@pytest.mark.parametrize(
  'change',
  [
    lambda d: _coloured(d, '1F3864'),
    lambda d: _coloured(d, 'FFFFFF', '1F3864'),
    lambda d: setattr(_run(d, 1).font, 'size', Pt(20)),
    lambda d: _summary(d, f'Total: {TOTAL}.', f'The highest is {BEST} ({MOST}).'),
    lambda d: _axis(d, 'min', 0),
    _bars,
    lambda d: _titled(d, 'Everything at a glance'),
    lambda d: _axis_titled(d, 'Count'),
    lambda d: _named(d, 'Count'),
    lambda d: setattr(d.slides[1].shapes[1], 'name', 'Facts'),
    _filled('1F3864'),
    _set('bodyPr', 'lIns', Inches(0.1)),
    _set('pPr', 'marL', Inches(0.5)),
    _set('rPr', 'spc', 100),
    _set('rPr', 'strike', 'noStrike'),
  ],
)
def test_other_right_decks_pass(grade, solved, change):
  deck = pptx.Presentation(str(solved))
  change(deck)
  assert grade.judge(_bytes(deck), SPEC) == (1, '')


@pytest.mark.parametrize(
  'name', ['ppt/embeddings/o.bin', 'ppt/vbaProject.bin', '../x.xml', 'a.rels']
)
def test_a_hostile_deck_is_refused(grade, solved, name):
  data = io.BytesIO(solved.read_bytes())
  with zipfile.ZipFile(data, 'a') as archive:
    archive.writestr(name, '<R TargetMode="External"/>')
  reward, why = grade.judge(data.getvalue(), SPEC)
  assert reward == 0 and why.startswith('refused')


@pytest.mark.long
@pytest.mark.skipif(bool(render.unavailable()), reason=render.unavailable())
def test_slides_are_rendered(solved, tmp_path):
  pages = render.render(solved, tmp_path)
  assert len(pages) == 3 and all(p.stat().st_size > 1000 for p in pages)


@pytest.mark.long
def test_tasks_are_admitted(tmp_path):
  assert asyncio.run(pipelines.run(slides.Config(count=1), tmp_path, show=False)).tasks
