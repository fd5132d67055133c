"""Edits of a deck's text and layout: attempts that must fail, and what is right."""

from __future__ import annotations

import io

from pptx.chart.data import CategoryChartData
from pptx.util import Inches, Pt

from tests.pipelines.slides.decks import (
  BEST,
  MOST,
  NAMES,
  OTHERS,
  PLACE,
  TOTAL,
  VALUES,
  A,
  P,
  add_box,
  coloured,
  drop,
  made,
  run_of,
  summary,
)


def last(deck):
  ids = deck.slides._sldIdLst
  ids.remove(ids[2])


def inherited(deck):
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


def master(deck):
  """Titles get one point from the master's style."""
  style = deck.slide_master._element.find(f'{P}txStyles/{P}titleStyle/{A}lvl1pPr')
  style.find(A + 'defRPr').set('sz', '100')
  for slide in deck.slides:
    for run in slide.shapes.title.text_frame.paragraphs[0].runs:
      run.font.size = None


def shrunk(deck):
  body = deck.slides[1].shapes[1]._element.find(f'{P}txBody/{A}bodyPr')
  for old in list(body):
    body.remove(old)
  body.append(body.makeelement(A + 'normAutofit', {'fontScale': '10000'}))


def field(deck):
  """A fact in a field of one point."""
  run = run_of(deck, 1)._r
  field = run.makeelement(A + 'fld', {'id': '{0}', 'type': 'slidenum'})
  for part in list(run):
    field.append(part)
  field.find(A + 'rPr').set('sz', '100')
  run.getparent().replace(run, field)


def hidden_shape(deck):
  deck.slides[1].shapes[1]._element.find(f'{P}nvSpPr/{P}cNvPr').set('hidden', '1')


def table(deck):
  shape = deck.slides[0].shapes.add_table(1, 1, *PLACE)
  shape.table.cell(0, 0).text = 'x'


def animated(deck):
  element = deck.slides[1]._element
  element.append(element.makeelement(P + 'timing', {}))


def two_titles(deck):
  from copy import deepcopy

  tree = deck.slides[0].shapes._spTree
  tree.append(deepcopy(deck.slides[0].shapes.title._element))
  other = deck.slides[0].shapes[-1]
  other.left, other.top, other.width, other.height = PLACE


def body_as_title(deck):
  """python-pptx takes any placeholder of index 0 for the title."""
  next(deck.slides[0]._element.iter(P + 'ph')).set('type', 'body')


def dark_background(deck):
  from pptx.dml.color import RGBColor

  fill = deck.slides[1].background.fill
  fill.solid()
  fill.fore_color.rgb = RGBColor(0, 0, 0)


def setting(tag, name, value):
  """Sets an attribute of all elements of a kind in the summary's text."""

  def change(deck):
    body = deck.slides[1].shapes[1]._element.find(f'{P}txBody')
    for paragraph in body.findall(A + 'p'):
      paragraph.get_or_add_pPr()
    for one in body.iter(A + tag):
      one.set(name, str(value))

  return change


def spaced(deck):
  for paragraph in deck.slides[1].shapes[1].text_frame.paragraphs:
    paragraph.space_before = Pt(900)


def indented_style(deck):
  """The same by the list style of the shape."""
  body = deck.slides[1].shapes[1]._element.find(f'{P}txBody')
  style = body.find(A + 'lstStyle')
  if style is None:
    style = body.makeelement(A + 'lstStyle', {})
    body.insert(1, style)
  style.append(style.makeelement(A + 'lvl1pPr', {'marL': '27432000'}))


def chart_in_summary(deck):
  data = CategoryChartData()
  data.categories = NAMES
  data.add_series('v', VALUES)
  shapes = deck.slides[1].shapes
  shapes[1].height = Inches(2)
  box = Inches(0.5), Inches(4), Inches(9), Inches(3)
  shapes.add_chart(made(deck)[0].chart.chart_type, *box, data)


def picture_in_summary(deck):
  from PIL import Image

  image = io.BytesIO()
  Image.new('RGB', (400, 100), 'white').save(image, 'PNG')
  image.seek(0)
  deck.slides[1].shapes[1].height = Inches(2)
  deck.slides[1].shapes.add_picture(image, Inches(0.5), Inches(4))


def layout(deck):
  """What is shown on a slide, and is no part of it."""
  from copy import deepcopy

  box = deepcopy(deck.slides[1].shapes[1]._element)
  deck.slides[1].slide_layout.shapes._spTree.append(box)
  for text in box.iter(A + 't'):
    text.text = f'{OTHERS[0]} 12345'


def connector_text(deck):
  """A line that is as wide as the summary and lies over it."""
  from pptx.enum.shapes import MSO_CONNECTOR

  left, top, width, height = PLACE
  line = deck.slides[1].shapes.add_connector(
    MSO_CONNECTOR.STRAIGHT, left, top + Inches(0.3), left + width, top + Inches(0.3)
  )
  line.line.width = Pt(1500)


RULES = [
  (lambda d: setattr(d.slides[0].shapes.title, 'text', 'Other'), 'the title'),
  (lambda d: setattr(d.slides[0].shapes.title, 'text', ''), 'the title'),
  (lambda d: drop(d, 0, 0), 'one title'),
  (last, 'slides'),
  (lambda d: d.slides.add_slide(d.slide_layouts[6]), 'slides'),
  (lambda d: d.slides[1]._element.set('show', '0'), 'p:sld show'),
  (lambda d: drop(d, 1, 1), 'does not say'),
  (lambda d: add_box(d.slides[0], 'x', Inches(9), Inches(7), *PLACE[2:]), 'within'),
  (lambda d: add_box(d.slides[0], 'x', -Inches(5), *PLACE[1:]), 'within'),
  (lambda d: add_box(d.slides[2], 'cover', *PLACE), 'on top'),
  (lambda d: add_box(d.slides[0], 'word ' * 2000, *PLACE), 'overflows'),
  (lambda d: add_box(d.slides[0], 'x' * 90, *PLACE[:3], Inches(0.2)), 'overflows'),
  (lambda d: d.slides[0].shapes.add_group_shape(), 'p:grpSp in p:spTree'),
  (lambda d: add_box(d.slides[0], 'x', *PLACE[:2], 0, 0), 'no place'),
  (lambda d: drop(d, 2, 1), '0 charts'),
]
UNSEEN = [
  (lambda d: summary(d, f'{TOTAL} {BEST} {MOST} or 7'), 'other numbers'),
  (lambda d: summary(d, *(str(i) for i in range(60)), TOTAL, BEST, MOST), 'other'),
  (lambda d: summary(d, TOTAL, f'{OTHERS[0]} or {BEST}', MOST), f'says {OTHERS[0]}'),
  (lambda d: summary(d, TOTAL, OTHERS[0].upper(), BEST, MOST), 'says'),
  (lambda d: summary(d, MOST, BEST, TOTAL), 'in its place'),
  (lambda d: summary(d, TOTAL, BEST.replace('e', '\u0435'), MOST), 'u0435'),
  (lambda d: summary(d, '\u200b'.join(TOTAL), BEST, MOST), 'u200b'),
  (lambda d: summary(d, f'=SUM(1,{TOTAL})', BEST, MOST), 'in its place'),
  (lambda d: coloured(d, 'FFFFFF'), 'cannot be read'),
  (lambda d: coloured(d, '101010', '000000'), 'cannot be read'),
  (dark_background, 'cannot be read'),
  (inherited, 'points'),
  (master, 'default template'),
  (shrunk, 'points'),
  (field, 'a:fld in a:p'),
  (hidden_shape, 'hidden'),
  (table, 'a:graphicData'),
  (animated, 'p:timing in p:sld'),
  (lambda d: setattr(d.slides[1].shapes[1], 'rotation', 180), 'a:xfrm rot'),
  (two_titles, 'one title'),
  (body_as_title, 'one title'),
  (setting('bodyPr', 'rot', 10800000), 'is not allowed'),
  (setting('bodyPr', 'vert', 'vert270'), 'is not allowed'),
  (setting('bodyPr', 'lIns', Inches(20)), 'is not allowed'),
  (setting('bodyPr', 'tIns', Inches(8)), 'is not allowed'),
  (setting('pPr', 'marL', Inches(30)), 'is not allowed'),
  (setting('pPr', 'indent', -Inches(30)), 'is not allowed'),
  (setting('rPr', 'spc', -4000), 'is not allowed'),
  (setting('rPr', 'strike', 'sngStrike'), 'is not allowed'),
  (setting('rPr', 'baseline', -900000), 'is not allowed'),
  (spaced, 'is not allowed'),
  (indented_style, 'is not allowed'),
  (chart_in_summary, 'more than text'),
  (picture_in_summary, 'more than text'),
  (layout, 'default template'),
  (connector_text, 'p:cxnSp in p:spTree'),
]
RIGHT = [
  lambda d: coloured(d, '1F3864'),
  lambda d: coloured(d, 'FFFFFF', '1F3864'),
  lambda d: setattr(run_of(d, 1).font, 'size', Pt(20)),
  lambda d: summary(d, f'Total: {TOTAL}.', f'The highest is {BEST} ({MOST}).'),
  lambda d: setattr(d.slides[1].shapes[1], 'name', 'Facts'),
  setting('bodyPr', 'lIns', Inches(0.1)),
  setting('pPr', 'marL', Inches(0.5)),
  setting('rPr', 'spc', 100),
  setting('rPr', 'strike', 'noStrike'),
]
