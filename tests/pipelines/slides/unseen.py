"""Edits that move, cover or replace text: attempts that must fail.

Most attempts had a reward of 1 while only known tricks were refused.
"""

from __future__ import annotations

from pptx.dml.color import RGBColor
from pptx.util import Emu, Inches, Pt

from tests.pipelines.slides.decks import (
  BEST,
  MOST,
  OTHERS,
  TOTAL,
  A,
  P,
  facts,
  made,
  xml,
)


def lines(deck):
  """The paragraphs of the facts."""
  return facts(deck).text_frame.paragraphs[1:]


def added(tag, text):
  """An element at the end of all elements of a kind in the facts."""

  def change(deck):
    for paragraph in lines(deck):
      paragraph._p.get_or_add_pPr()
    found = list(facts(deck)._element.iter(A + tag))
    assert found
    for one in found:
      one.append(xml(text))

  return change


def styled(fill, font):
  """Fill and font by reference to the theme."""

  def change(deck):
    refs = (('lnRef', 0, 'tx1'), ('fillRef', *fill), ('effectRef', 0, 'tx1'))
    inner = ''.join(
      f'<a:{k} idx="{i}"><a:schemeClr val="{c}"/></a:{k}>' for k, i, c in refs
    )
    inner += f'<a:fontRef idx="minor"><a:schemeClr val="{font}"/></a:fontRef>'
    properties = facts(deck)._element.find(P + 'spPr')
    for one in properties.findall(A + 'noFill'):
      properties.remove(one)
    properties.addnext(xml(f'<p:style>{inner}</p:style>'))

  return change


def other_colours(deck):
  names = ('bg1', 'tx1', 'bg2', 'tx2')
  accents = (*(f'accent{i}' for i in range(1, 7)), 'hlink', 'folHlink')
  mapped = ' '.join([f'{n}="lt1"' for n in names] + [f'{n}="{n}"' for n in accents])
  element = deck.slides[1]._element
  new = xml(f'<p:clrMapOvr><a:overrideClrMapping {mapped}/></p:clrMapOvr>')
  element.replace(element.find(P + 'clrMapOvr'), new)


def default_style(deck):
  """Text without a size of its own gets one point from the presentation."""
  for one in facts(deck)._element.iter(A + 'rPr'):
    one.attrib.pop('sz', None)
  for one in deck.part._element.find(P + 'defaultTextStyle').iter(A + 'defRPr'):
    one.set('sz', '100')


def breaks(deck):
  for _ in range(60):
    lines(deck)[0]._p.insert(0, xml('<a:br><a:rPr sz="4000"/></a:br>'))


def empty_paragraph(size):
  def change(deck):
    first = facts(deck).text_frame.paragraphs[0]._p
    for one in list(first):
      first.remove(one)
    first.append(xml(f'<a:endParaRPr sz="{size}"/>'))

  return change


def blank_run(size):
  def change(deck):
    blank = xml(f'<a:r><a:rPr sz="{size}"/><a:t> </a:t></a:r>')
    lines(deck)[0]._p.find(A + 'r').addprevious(blank)

  return change


def many_spaces(deck):
  """Space between paragraphs that each alone is within bounds."""
  for _ in range(6):
    facts(deck).text_frame.add_paragraph()
  for paragraph in facts(deck).text_frame.paragraphs:
    paragraph.space_before = Pt(70)


def other_text_area(deck):
  properties = facts(deck)._element.find(P + 'spPr')
  shape = '<a:rect l="90000000" t="0" r="99000000" b="4000000"/><a:pathLst/>'
  new = xml(f'<a:custGeom><a:avLst/>{shape}</a:custGeom>')
  properties.replace(properties.find(A + 'prstGeom'), new)


def outline(points):
  """The title, drawn last, has an outline that covers the summary."""

  def change(deck):
    title = deck.slides[1].shapes.title
    tree = title._element.getparent()
    tree.remove(title._element)
    tree.append(title._element)
    title.line.width = Pt(points)
    title.line.color.rgb = RGBColor(255, 255, 255)

  return change


def covering_connector(deck):
  ends = Inches(0.5), Inches(6.9), Inches(9.5), Inches(6.91)
  line = deck.slides[2].shapes.add_connector(1, *ends).line
  line.width = Pt(1500)
  line.color.rgb = RGBColor(255, 255, 255)


def turned_by_layout(deck):
  layout, slide = deck.slide_layouts[1], deck.slides[1]
  kinds = slide.part.rels.values()
  next(r for r in kinds if r.reltype.endswith('/slideLayout'))._target = layout.part
  mark = next(p for p in layout.placeholders if p.placeholder_format.idx == 1)
  frame = mark._element.find(P + 'spPr')
  place = '<a:off x="457200" y="1600200"/><a:ext cx="8229600" cy="4525963"/>'
  frame.append(xml(f'<a:xfrm rot="10800000">{place}</a:xfrm>'))
  old = facts(deck)._element
  names = '<p:cNvPr id="9" name="b"/><p:cNvSpPr/><p:nvPr><p:ph idx="1"/></p:nvPr>'
  new = xml(f'<p:sp><p:nvSpPr>{names}</p:nvSpPr><p:spPr/></p:sp>')
  new.append(old.find(P + 'txBody'))
  old.getparent().replace(old, new)


def fields(deck):
  """A renderer replaces the text of a field."""
  for paragraph in lines(deck):
    for run in paragraph._p.findall(A + 'r'):
      name = 'B6F15528-21DE-4FAA-801E-634DDDAF4B2B'
      field = xml(f'<a:fld id="{{{name}}}" type="slidenum"/>')
      for one in list(run):
        field.append(one)
      paragraph._p.replace(run, field)


def said(change):
  """Changes the text of the runs of the facts."""

  def edit(deck):
    for paragraph in lines(deck):
      for run in paragraph.runs:
        run.text = change(run.text)

  return edit


def by_place(order):
  """Each fact has a box of its own; `order` has their places from above."""

  def change(deck):
    old = facts(deck)._element
    old.getparent().remove(old)
    for text, row in zip((TOTAL, BEST, MOST), order, strict=True):
      place = Inches(0.5), Inches(2 + 1.2 * row), Inches(8), Inches(0.8)
      deck.slides[1].shapes.add_textbox(*place).text_frame.text = text

  return change


def side_by_side(order):
  def change(deck):
    old = facts(deck)._element
    old.getparent().remove(old)
    for text, column in zip((TOTAL, BEST, MOST), order, strict=True):
      place = Inches(0.5 + 3 * column), Inches(2 + 0.1 * column), Inches(2.8), Inches(1)
      deck.slides[1].shapes.add_textbox(*place).text_frame.text = text

  return change


def transitions(deck):
  for slide in deck.slides:
    slide._element.append(xml('<p:transition advClick="0" advTm="0"/>'))


def sized(width, height=None, chart=None, points=None):
  """Another size of the slides; of chart and text, where they are given."""

  def change(deck):
    deck.slide_width, deck.slide_height = Emu(width), Emu(height or width)
    if chart:
      shape = made(deck)[0]
      shape.width = shape.height = Emu(chart)
    for paragraph in lines(deck):
      for run in paragraph.runs:
        run.font.size = Pt(points) if points else run.font.size

  return change


def commented(deck):
  """A parser stops reading at a comment, and a reader does not see it."""
  from lxml import etree

  text = next(lines(deck)[0]._p.iter(A + 't'))
  comment = etree.Comment('x')
  comment.tail = ' or 99'
  text.append(comment)


def two_texts(deck):
  for run in lines(deck)[0]._p.findall(A + 'r'):
    run.append(xml('<a:t> or 99</a:t>'))


def in_layout(number, idx, kind=''):
  """The facts in a placeholder of another layout."""

  def change(deck):
    slide = deck.slides[1]
    layout = deck.slide_layouts[number].part
    kinds = slide.part.rels.values()
    next(r for r in kinds if r.reltype.endswith('/slideLayout'))._target = layout
    old = facts(deck)._element
    names = '<p:cNvPr id="9" name="b"/><p:cNvSpPr><a:spLocks noGrp="1"/></p:cNvSpPr>'
    mark = f'<p:nvPr><p:ph {kind} idx="{idx}"/></p:nvPr>'
    new = xml(f'<p:sp><p:nvSpPr>{names}{mark}</p:nvSpPr><p:spPr/></p:sp>')
    new.append(old.find(P + 'txBody'))
    old.getparent().replace(old, new)

  return change


def filled_with(text):
  """Text before the facts, and no more height than an estimate by length needs."""

  def change(deck):
    shape = facts(deck)
    shape.text_frame.word_wrap = True
    first = shape.text_frame.paragraphs[0]
    first.text = text
    first.runs[0].font.size = Pt(24)
    shape.top, shape.height = Inches(7.5 - 4.2), Inches(4.2)

  return change


def outdented(deck):
  """The first digit is left of the slide."""
  facts(deck).left = 0
  for paragraph in lines(deck):
    properties = paragraph._p.get_or_add_pPr()
    properties.set('marL', '0')
    properties.set('indent', '-400000')


UNSEEN = [
  (in_layout(9, 1, 'type="body" orient="vert"'), 'p:ph orient="vert"'),
  (in_layout(9, 1, 'type="body"'), 'is rotated'),
  (in_layout(8, 1, 'type="pic"'), 'is not shown'),
  (in_layout(8, 7), 'has no placeholder'),
  (filled_with('W' * 270), 'overflows'),
  (filled_with(('o' * 30 + ' ') * 10), 'overflows'),
  (outdented, 'outside of the slide'),
  (breaks, 'overflows'),
  (empty_paragraph(400000), 'a:endParaRPr sz="400000"'),
  (empty_paragraph(39900), 'overflows'),
  (blank_run(400000), 'a:rPr sz="400000"'),
  (blank_run(39900), 'overflows'),
  (many_spaces, 'overflows'),
  (styled((0, 'accent1'), 'bg1'), 'cannot be read'),
  (styled((1, 'tx1'), 'tx1'), 'colour of its own'),
  (other_colours, 'a:overrideClrMapping in p:clrMapOvr'),
  (added('rPr', '<a:highlight><a:srgbClr val="000000"/></a:highlight>'), 'a:highlight'),
  (default_style, 'p:defaultTextStyle is not that'),
  (other_text_area, 'a:custGeom in p:spPr'),
  (outline(1500), 'a:ln w="19050000"'),
  (covering_connector, 'p:cxnSp in p:spTree'),
  (turned_by_layout, 'default template'),
  (fields, 'a:fld in a:p'),
  (said('\u202e {} \u202c'.format), "'\\u202e'"),
  (said('{}\t\t\t'.format), "'\\t'"),
  (added('pPr', '<a:buAutoNum type="arabicPlain"/>'), 'a:buAutoNum in a:pPr'),
  (added('pPr', f'<a:buChar char="not 999 {OTHERS[0]}"/>'), 'a:buChar char'),
  (added('rPr', '<a:latin typeface="Wingdings"/>'), 'a:latin typeface="Wingdings"'),
  (added('p', '<mc:AlternateContent/>'), 'AlternateContent in a:p'),
  (added('bodyPr', '<a:scene3d/>'), 'a:scene3d in a:bodyPr'),
  (lambda d: facts(d)._element.find(f'.//{A}bodyPr').set('numCol', '16'), 'numCol'),
  (by_place((2, 1, 0)), 'in its place'),
  (side_by_side((2, 1, 0)), 'in its place'),
  (said(lambda text: f'{text} \u0421l\u043e\u0441k'), "'\\u0421'"),
  (said(lambda text: f'{text} {"_".join(OTHERS)}'), "'_'"),
  (said(lambda text: f'{text} {"-".join(OTHERS)}'), 'says'),
  (said(lambda text: f'{text} {"".join(OTHERS)}'), 'says'),
  (said(lambda text: f'{text} \u2460\xb2\u216b'), "'\\u2460'"),
  (said(lambda text: f'{text} \u0669\u0669'), "'\\u0669'"),
  (said(lambda text: text.replace(TOTAL, ','.join(TOTAL))), 'in its place'),
  (added('rPr', '<a:hlinkClick action="ppaction://x"/>'), 'a:hlinkClick in a:rPr'),
  (transitions, 'p:transition in p:sld'),
  (sized(51206400, chart=30000000, points=12), 'size of the slides'),
  (sized(18288000, chart=10000000, points=12), 'points'),
  (said(lambda text: text.replace(TOTAL, f'.{TOTAL}')), 'in its place'),
  (commented, 'a comment'),
  (two_texts, 'more than one a:t'),
]
