"""Edits of what a chart shows: attempts that must fail, and what is right.

Most attempts had a reward of 1 while only known tricks were refused.
"""

from __future__ import annotations

import re

from pptx.chart.data import CategoryChartData
from pptx.dml.color import RGBColor
from pptx.enum.chart import XL_CHART_TYPE, XL_LABEL_POSITION, XL_LEGEND_POSITION
from pptx.enum.dml import MSO_THEME_COLOR
from pptx.util import Inches, Pt

from tests.pipelines.slides.charts import axis, filled, named
from tests.pipelines.slides.decks import (
  NAMES,
  PLACE,
  VALUES,
  A,
  C,
  drop,
  made,
  rewritten,
  xml,
)


def series(deck):
  return next(made(deck)[1].iter(C + 'ser'))


def to(path, value):
  """Sets `val` of all elements of a kind in the chart."""

  def change(deck):
    found = list(made(deck)[1].iter(C + path))
    assert found
    for one in found:
      one.set('val', value)

  return change


def limits(**ends):
  """Ends of the axis of values."""

  def change(deck):
    for tag in ('max', 'min'):
      if tag in ends:
        axis(deck, tag, ends[tag])

  return change


def labelled(*inner, val='1', cat='0', percent='0', end=''):
  """Labels of the series."""

  def change(deck):
    shown = {
      **{'LegendKey': '0', 'Val': val, 'CatName': cat, 'SerName': '0'},
      **{'Percent': percent, 'BubbleSize': '0'},
    }
    flags = ''.join(f'<c:show{k} val="{v}"/>' for k, v in shown.items())
    element = xml(f'<c:dLbls>{"".join(inner)}{flags}{end}</c:dLbls>')
    series(deck).find(C + 'cat').addprevious(element)

  return change


def number_format(code):
  return f'<c:numFmt formatCode="{code}" sourceLinked="0"/>'


def before(path, text):
  """Adds an element before another of the series."""
  return lambda deck: series(deck).find(C + path).addprevious(xml(text))


def tiny_white(deck):
  own = made(deck)[1].find(f'{C}txPr//{A}defRPr')
  own.set('sz', '100')
  own.append(xml('<a:solidFill><a:srgbClr val="FFFFFF"/></a:solidFill>'))


def text_of(size=None, colour=None):
  """Size and colour of the chart's text."""

  def change(deck):
    font = made(deck)[0].chart.font
    if size:
      font.size = Pt(size)
    if colour:
      font.color.rgb = RGBColor.from_string(colour)

  return change


def moved_out(deck):
  inner = ''.join(f'<c:{k} val="0.97"/>' for k in 'xy')
  inner += ''.join(f'<c:{k} val="0.8"/>' for k in 'wh')
  layout = xml(f'<c:layout><c:manualLayout>{inner}</c:manualLayout></c:layout>')
  next(made(deck)[1].iter(C + 'plotArea')).insert(0, layout)


def covering_legend(deck):
  fill = '<c:spPr><a:solidFill><a:srgbClr val="FFFFFF"/></a:solidFill></c:spPr>'
  legend = f'<c:legend><c:legendPos val="r"/><c:overlay val="1"/>{fill}</c:legend>'
  next(made(deck)[1].iter(C + 'plotArea')).addnext(xml(legend))


def white_accent(deck):
  """The theme's colour of first series."""
  parts = [r.target_part for r in deck.slide_master.part.rels.values()]
  theme = next(p for p in parts if p.content_type.endswith('theme+xml'))
  white = rb'<a:accent1><a:srgbClr val="FFFFFF"/></a:accent1>'
  theme._blob, count = re.subn(
    rb'<a:accent1>.*?</a:accent1>', white, theme.blob, flags=re.S
  )
  assert count


def other_colours(deck):
  names = ('bg1', 'tx1', 'bg2', 'tx2', *(f'accent{i}' for i in range(1, 7)))
  mapped = ' '.join(f'{name}="lt1"' for name in (*names, 'hlink', 'folHlink'))
  made(deck)[1].find(C + 'chart').addprevious(xml(f'<c:clrMapOvr {mapped}/>'))


def points_twice(deck):
  cache = series(deck).find(f'.//{C}numCache')
  for one in cache.findall(C + 'pt'):
    idx = one.get('idx')
    cache.append(xml(f'<c:pt idx="{idx}"><c:v>7</c:v></c:pt>'))


def two_caches(deck):
  points = ''.join(f'<c:pt idx="{i}"><c:v>7</c:v></c:pt>' for i in range(len(VALUES)))
  count = f'<c:ptCount val="{len(VALUES)}"/>'
  series(deck).find(C + 'val').append(xml(f'<c:numLit>{count}{points}</c:numLit>'))


def counted(deck):
  """Fewer points are announced than there are."""
  series(deck).find(f'{C}val//{C}ptCount').set('val', '2')


def commented(deck):
  """A comment in a value, after which a parser stops reading."""
  from lxml import etree

  value = next(series(deck).find(C + 'val').iter(C + 'v'))
  comment = etree.Comment('x')
  comment.tail = '99'
  value.append(comment)


def point_formats(deck):
  for one in series(deck).find(C + 'val').iter(C + 'pt'):
    one.set('formatCode', '"9999"')
  labelled()(deck)


def levels(deck):
  found = series(deck).find(C + 'cat')
  area, count = found.find(f'.//{C}f').text, f'<c:ptCount val="{len(NAMES)}"/>'
  rows = ''
  for texts in (NAMES, ['99999'] * len(NAMES)):
    points = (f'<c:pt idx="{i}"><c:v>{t}</c:v></c:pt>' for i, t in enumerate(texts))
    rows += f'<c:lvl>{"".join(points)}</c:lvl>'
  for one in list(found):
    found.remove(one)
  cache = f'<c:multiLvlStrCache>{count}{rows}</c:multiLvlStrCache>'
  found.append(xml(f'<c:multiLvlStrRef><c:f>{area}</c:f>{cache}</c:multiLvlStrRef>'))


def long_title(deck):
  chart = made(deck)[0].chart
  chart.has_title = True
  chart.chart_title.text_frame.text = 'x' + '\n' * 20


def other_axes(deck):
  """A plot whose axes are not those of the chart."""
  for one in series(deck).getparent().findall(C + 'axId'):
    one.set('val', '7')


def both_fills(deck):
  filled('1F3864')(deck)
  series(deck).find(C + 'spPr').insert(0, xml('<a:noFill/>'))


def flat(deck):
  """A chart that is as high as its labels."""
  rich(made(deck)[0].chart)
  made(deck)[0].height = Inches(1.7)


def long_legend(deck):
  named(deck, 'Values of all the rows in the order of the table that is given')
  made(deck)[0].chart.has_legend = True


def exact_end(deck):
  """An end of the axis as floating-point arithmetic gives it."""
  made(deck)[0].chart.value_axis.maximum_scale = max(VALUES) * 1.1 + 0.1


def of_type(kind, change=None):
  """A new chart in the place of the old."""

  def edit(deck):
    data = CategoryChartData()
    data.categories = NAMES
    data.add_series('Value', VALUES)
    drop(deck, 2, 1)
    frame = deck.slides[2].shapes.add_chart(kind, *PLACE, data)
    if change:
      change(frame.chart)

  return edit


def formula(deck):
  part = made(deck)[0].chart.part.chart_workbook.xlsx_part

  def change(name, data):
    if name == 'xl/worksheets/sheet1.xml':
      data = re.sub(rb'(<c r="B2"[^>]*>)<v>', rb'\1<f>RAND()*9</f><v>', data)
      assert b'RAND' in data
    return data

  part._blob = rewritten(part.blob, change)


def on_dark(deck):
  """Black text of the chart on a dark slide."""
  fill = deck.slides[2].background.fill
  fill.solid()
  fill.fore_color.rgb = RGBColor(0, 0, 0)
  run = deck.slides[2].shapes.title.text_frame.paragraphs[0].runs[0]
  run.font.color.rgb = RGBColor(255, 255, 255)


def on_accent(deck):
  """Columns in the colour that the slide has behind them."""
  fill = deck.slides[2].background.fill
  fill.solid()
  fill.fore_color.theme_color = MSO_THEME_COLOR.ACCENT_1


def rich(chart):
  """A chart with what python-pptx offers for it."""
  chart.has_legend = True
  chart.legend.position = XL_LEGEND_POSITION.BOTTOM
  chart.legend.include_in_layout = False
  chart.legend.font.size = Pt(12)
  chart.has_title = True
  chart.chart_title.text_frame.text = 'Values by name'
  run = chart.chart_title.text_frame.paragraphs[0].runs[0]
  run.font.size, run.font.bold = Pt(16), True
  run.font.color.rgb = RGBColor(0x1F, 0x38, 0x64)
  values, names = chart.value_axis, chart.category_axis
  values.has_major_gridlines = True
  values.major_gridlines.format.line.color.rgb = RGBColor(0xD9, 0xD9, 0xD9)
  values.minimum_scale, values.maximum_scale, values.major_unit = 0, 1000, 200
  values.tick_labels.number_format = '#,##0'
  values.tick_labels.number_format_is_linked = False
  values.format.line.fill.background()
  names.tick_labels.font.size = Pt(12)
  names.has_title = values.has_title = True
  names.axis_title.text_frame.text = 'Name'
  values.axis_title.text_frame.text = 'Value'
  plot = chart.plots[0]
  plot.vary_by_categories = False
  plot.has_data_labels = True
  labels = plot.data_labels
  labels.show_value, labels.number_format = True, '0'
  labels.number_format_is_linked = False
  labels.font.size = Pt(12)


def rich_bars(chart):
  rich(chart)
  plot, one = chart.plots[0], chart.plots[0].series[0]
  plot.gap_width, plot.overlap = 60, 0
  plot.data_labels.position = XL_LABEL_POSITION.INSIDE_END
  plot.data_labels.font.color.rgb = RGBColor(255, 255, 255)
  one.format.fill.solid()
  one.format.fill.fore_color.theme_color = MSO_THEME_COLOR.TEXT_2
  one.invert_if_negative = False
  point = one.points[VALUES.index(max(VALUES))]
  point.format.fill.solid()
  point.format.fill.fore_color.rgb = RGBColor(0xC0, 0x39, 0x2B)


def rich_line(chart):
  rich(chart)
  one = chart.plots[0].series[0]
  chart.plots[0].data_labels.position = XL_LABEL_POSITION.ABOVE
  one.format.line.width, one.smooth = Pt(2.5), False
  one.format.line.color.rgb = RGBColor(0x1F, 0x38, 0x64)
  one.marker.format.fill.solid()
  one.marker.format.fill.fore_color.rgb = RGBColor(0xC0, 0x39, 0x2B)


def light_on_dark(deck):
  """A dark slide, whose chart has light text and columns."""
  on_dark(deck)
  text_of(colour='FFFFFF')(deck)
  filled('FFC000')(deck)


UNSEEN = [
  (to('grouping', 'percentStacked'), 'c:grouping val="percentStacked"'),
  (limits(max=10**7), 'three times'),
  (limits(max=1000, min=-(10**8)), 'begin at 0'),
  (limits(min=min(VALUES)), 'begin at 0'),
  (to('delete', '1'), 'c:delete val="1"'),
  (to('tickLblPos', 'none'), 'c:tickLblPos val="none"'),
  (tiny_white, 'points'),
  (text_of(size=9), 'points'),
  (text_of(colour='FFFFFF'), 'cannot be read'),
  (on_dark, 'cannot be read'),
  (on_accent, 'not drawn'),
  (moved_out, 'c:manualLayout in c:layout'),
  (covering_legend, 'c:overlay val="1"'),
  (white_accent, 'default template'),
  (other_colours, 'c:clrMapOvr in c:chartSpace'),
  (before('cat', '<mc:AlternateContent/>'), 'AlternateContent in c:ser'),
  (points_twice, 'points of the chart'),
  (counted, 'values of the chart'),
  (commented, 'a comment'),
  (two_caches, 'c:numLit in c:val'),
  (point_formats, 'c:pt formatCode'),
  (labelled(cat='1', end='<c:separator> 99</c:separator>'), 'c:separator in c:dLbls'),
  (labelled(number_format('[$9-409]0')), 'c:numFmt formatCode'),
  (labelled(number_format('770')), 'c:numFmt formatCode'),
  (labelled(number_format('0%')), 'c:numFmt formatCode'),
  (labelled(val='0', percent='1'), 'c:showPercent val="1"'),
  (labelled(end='<c:extLst/>'), 'c:extLst in c:dLbls'),
  (levels, 'c:multiLvlStrRef in c:cat'),
  (before('cat', '<c:trendline/>'), 'c:trendline in c:ser'),
  (before('cat', '<c:errBars/>'), 'c:errBars in c:ser'),
  (of_type(XL_CHART_TYPE.PIE), 'c:pieChart in c:plotArea'),
  (formula, 'formula'),
  (long_title, 'is long'),
  (lambda d: named(d, 'x' * 200), 'is long'),
  (other_axes, 'axes of the chart'),
  (flat, 'too small'),
  (long_legend, 'too long'),
  (both_fills, 'a:noFill and a:solidFill'),
]
RIGHT = [
  of_type(XL_CHART_TYPE.BAR_CLUSTERED, rich_bars),
  of_type(XL_CHART_TYPE.COLUMN_CLUSTERED, rich_bars),
  of_type(XL_CHART_TYPE.LINE, rich_line),
  of_type(XL_CHART_TYPE.LINE_MARKERS, rich_line),
  of_type(XL_CHART_TYPE.BAR_CLUSTERED),
  of_type(XL_CHART_TYPE.COLUMN_STACKED),
  of_type(XL_CHART_TYPE.LINE),
  of_type(XL_CHART_TYPE.LINE_MARKERS),
  labelled(),
  text_of(size=14, colour='404040'),
  light_on_dark,
  limits(min=0, max=1000),
  exact_end,
]
