"""Edits of a deck's chart: attempts that must fail, and what is right."""

from __future__ import annotations

import io

import openpyxl
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE
from pptx.oxml import parse_xml
from pptx.util import Inches

from tests.pipelines.slides.decks import (
  NAMES,
  PLACE,
  SPEC,
  VALUES,
  A,
  C,
  add_box,
  drop,
  made,
)


def with_data(deck, categories=None, values=None, series=1):
  chart = next(s.chart for s in deck.slides[2].shapes if s.has_chart)
  data = CategoryChartData()
  data.categories = categories or SPEC['chart']['categories']
  for number in range(series):
    data.add_series(f's{number}', values or SPEC['chart']['values'])
  chart.replace_data(data)


def cache_only(deck):
  """The chart shows the data, and its workbook has others."""
  _, root = made(deck)
  kept = [(v, v.text) for v in root.iter(C + 'v')]
  other = io.BytesIO()
  book = openpyxl.load_workbook(
    io.BytesIO(made(deck)[0].chart.part.chart_workbook.xlsx_part.blob)
  )
  book.active['B2'] = 1
  book.save(other)
  made(deck)[0].chart.part.chart_workbook.xlsx_part._blob = other.getvalue()
  assert all(v.text == text for v, text in kept)


def no_workbook(deck):
  _, root = made(deck)
  root.remove(root.find(C + 'externalData'))


def other_cells(deck):
  _, root = made(deck)
  next(f for f in root.iter(C + 'f') if '$B$2' in f.text).text = 'Sheet1!$B$3:$B$9'


def no_drawing(deck):
  series = next(made(deck)[1].iter(C + 'ser'))
  for old in series.findall(C + 'spPr'):
    series.remove(old)
  names = f'xmlns:c="{C[1:-1]}" xmlns:a="{A[1:-1]}"'
  series.insert(3, parse_xml(f'<c:spPr {names}><a:noFill/></c:spPr>'))


def axis(deck, tag, value):
  scaling = list(made(deck)[1].iter(C + 'scaling'))[-1]
  scaling.append(parse_xml(f'<c:{tag} xmlns:c="{C[1:-1]}" val="{value}"/>'))


def axis_ends(deck, tag, value):
  """The axis of categories crosses the other somewhere else."""
  axis = next(made(deck)[1].iter(C + 'catAx'))
  old = axis.find(C + 'crosses')
  axis.replace(old, parse_xml(f'<c:{tag} xmlns:c="{C[1:-1]}" val="{value}"/>'))


def bars(deck):
  """Horizontal bars, whose categories run downwards."""
  root = made(deck)[1]
  next(root.iter(C + 'barDir')).set('val', 'bar')
  scaling = next(root.iter(C + 'catAx')).find(C + 'scaling')
  scaling.replace(
    scaling.find(C + 'orientation'),
    parse_xml(f'<c:orientation xmlns:c="{C[1:-1]}" val="maxMin"/>'),
  )


def in_thousands(deck):
  unit = (
    f'<c:dispUnits xmlns:c="{C[1:-1]}"><c:builtInUnit val="thousands"/></c:dispUnits>'
  )
  next(made(deck)[1].iter(C + 'valAx')).append(parse_xml(unit))


def titled(deck, text):
  chart = made(deck)[0].chart
  chart.has_title = True
  chart.chart_title.text_frame.text = text


def axis_titled(deck, text):
  axis = made(deck)[0].chart.value_axis
  axis.has_title = True
  axis.axis_title.text_frame.text = text


def named(deck, text):
  """The series, and with it the legend."""
  next(next(made(deck)[1].iter(C + 'tx')).iter(C + 'v')).text = text


def label(deck):
  chart = made(deck)[0].chart
  frame = chart.plots[0].series[0].points[0].data_label.text_frame
  frame.text = '9999'


def tiny(deck):
  shape = made(deck)[0]
  shape.width, shape.height = Inches(0.2), Inches(0.2)


def filled(colour, alpha=''):
  def change(deck):
    series = next(made(deck)[1].iter(C + 'ser'))
    for old in series.findall(C + 'spPr'):
      series.remove(old)
    names = f'xmlns:c="{C[1:-1]}" xmlns:a="{A[1:-1]}"'
    inner = f'<a:srgbClr val="{colour}">{alpha}</a:srgbClr>'
    xml = f'<c:spPr {names}><a:solidFill>{inner}</a:solidFill></c:spPr>'
    series.insert(3, parse_xml(xml))

  return change


def line(deck):
  """A line chart whose line is not drawn."""
  data = CategoryChartData()
  data.categories = NAMES
  data.add_series('Value', VALUES)
  drop(deck, 2, 1)
  frame = deck.slides[2].shapes.add_chart(XL_CHART_TYPE.LINE, *PLACE, data)
  frame.chart.plots[0].series[0].format.line.fill.background()


def formatted(deck):
  plot = made(deck)[0].chart.plots[0]
  plot.has_data_labels = True
  plot.data_labels.show_value = True
  plot.data_labels.number_format = '"9999"'
  plot.data_labels.number_format_is_linked = False


def axis_formatted(deck):
  labels = made(deck)[0].chart.value_axis.tick_labels
  labels.number_format, labels.number_format_is_linked = '"77"0', False


RULES = [
  (lambda d: add_box(d.slides[0], 'tiny', *PLACE, points=4), 'points'),
  (lambda d: with_data(d, values=[v + 1 for v in VALUES]), 'values'),
  (lambda d: with_data(d, values=VALUES[::-1]), 'values'),
  (lambda d: with_data(d, categories=NAMES[::-1]), 'categories'),
  (lambda d: with_data(d, categories=NAMES[:-1], values=VALUES[:-1]), 'categories'),
  (lambda d: with_data(d, series=2), 'one series'),
]
UNSEEN = [
  (cache_only, 'workbook of the chart differs'),
  (no_workbook, 'no workbook'),
  (other_cells, 'workbook of the chart differs'),
  (no_drawing, 'not drawn'),
  (lambda d: axis(d, 'max', 5), 'ends below'),
  (lambda d: axis(d, 'min', 800), 'begin at 0'),
  (lambda d: axis(d, 'logBase', 10), 'c:logBase in c:scaling'),
  (lambda d: axis(d, 'orientation', 'maxMin'), 'reversed'),
  (lambda d: axis_ends(d, 'crosses', 'max'), 'reversed'),
  (lambda d: axis_ends(d, 'crossesAt', 500), 'c:crossesAt in c:catAx'),
  (in_thousands, 'c:dispUnits in c:valAx'),
  (lambda d: titled(d, 'Up by 40 %'), 'has a number'),
  (lambda d: titled(d, f'{NAMES[0]} leads'), f'says {NAMES[0]}'),
  (lambda d: axis_titled(d, 'in units of ①'), 'has a number'),
  (lambda d: named(d, f'not {NAMES[1].upper()}'), f'says {NAMES[1]}'),
  (label, 'c:tx in c:dLbl'),
  (tiny, 'small'),
  (filled('FFFFFF'), 'not drawn'),
  (filled('FF0000', '<a:alpha val="0"/>'), 'a:alpha in a:srgbClr'),
  (line, 'not drawn'),
  (formatted, 'c:numFmt formatCode'),
  (axis_formatted, 'c:numFmt formatCode'),
]
RIGHT = [
  lambda d: axis(d, 'min', 0),
  bars,
  lambda d: titled(d, 'Everything at a glance'),
  lambda d: axis_titled(d, 'Count'),
  lambda d: named(d, 'Count'),
  filled('1F3864'),
]
