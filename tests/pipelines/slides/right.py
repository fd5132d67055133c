"""Edits of text after which a deck is still right."""

from __future__ import annotations

from pptx.dml.color import RGBColor
from pptx.enum.dml import MSO_THEME_COLOR
from pptx.enum.shapes import MSO_SHAPE
from pptx.enum.text import MSO_ANCHOR, MSO_AUTO_SIZE, PP_ALIGN
from pptx.util import Inches, Pt

from tests.pipelines.slides.decks import BEST, MOST, TOTAL, facts, xml
from tests.pipelines.slides.unseen import (
  added,
  by_place,
  empty_paragraph,
  lines,
  outline,
  said,
  side_by_side,
  sized,
)


def in_placeholder(deck):
  """The summary is the body of the layout "Title and Content"."""
  slide = deck.slides[1]
  kinds = slide.part.rels.values()
  layout = deck.slide_layouts[1].part
  next(r for r in kinds if r.reltype.endswith('/slideLayout'))._target = layout
  old = facts(deck)._element
  names = '<p:cNvPr id="9" name="b"/><p:cNvSpPr><a:spLocks noGrp="1"/></p:cNvSpPr>'
  mark = '<p:nvPr><p:ph idx="1"/></p:nvPr>'
  body = '<p:txBody><a:bodyPr/><a:lstStyle/><a:p/></p:txBody>'
  new = xml(f'<p:sp><p:nvSpPr>{names}{mark}</p:nvSpPr><p:spPr/>{body}</p:sp>')
  old.getparent().replace(old, new)
  frame = slide.placeholders[1].text_frame
  frame.text = f'Total of all values: {TOTAL}'
  paragraph = frame.add_paragraph()
  paragraph.text = f'Highest: {BEST}'
  paragraph = frame.add_paragraph()
  paragraph.text, paragraph.level = f'Its value is {MOST}', 1


def formatted(deck):
  """What python-pptx offers for text."""
  shape = facts(deck)
  frame = shape.text_frame
  frame.word_wrap, frame.auto_size = True, MSO_AUTO_SIZE.TEXT_TO_FIT_SHAPE
  frame.vertical_anchor = MSO_ANCHOR.MIDDLE
  frame.margin_left = frame.margin_top = Inches(0.2)
  shape.line.color.rgb, shape.line.width = RGBColor(0x1F, 0x38, 0x64), Pt(1.5)
  shape.fill.solid()
  shape.fill.fore_color.theme_color = MSO_THEME_COLOR.BACKGROUND_2
  shape.shadow.inherit = False
  for paragraph in frame.paragraphs:
    paragraph.alignment, paragraph.line_spacing = PP_ALIGN.CENTER, 1.2
    paragraph.space_before, paragraph.space_after = Pt(6), Pt(12)
    for run in paragraph.runs:
      font = run.font
      font.bold, font.italic, font.underline = True, False, True
      font.name = 'Calibri'
      font.color.theme_color = MSO_THEME_COLOR.TEXT_1
      font.color.brightness = 0.25
  title = deck.slides[1].shapes.title.text_frame.paragraphs[0].runs[0]
  title.font.color.rgb, title.font.name = RGBColor(0x1F, 0x38, 0x64), 'Arial'


def bulleted(deck):
  for paragraph in lines(deck):
    properties = paragraph._p.get_or_add_pPr()
    properties.set('marL', '342900')
    properties.set('indent', '-342900')
    for text in ('<a:buFont typeface="Arial"/>', '<a:buChar char="\u2022"/>'):
      properties.append(xml(text))


def rectangle(deck):
  """An AutoShape with colours of its own instead of a text box."""
  old = facts(deck)
  texts = [p.text for p in lines(deck)]
  place = old.left, old.top, old.width, old.height
  old._element.getparent().remove(old._element)
  shape = deck.slides[1].shapes.add_shape(MSO_SHAPE.ROUNDED_RECTANGLE, *place)
  shape.fill.solid()
  shape.fill.fore_color.rgb = RGBColor(0x1F, 0x38, 0x64)
  shape.line.fill.background()
  shape.text_frame.text = '\n'.join(texts)


def noted(deck):
  """Notes of the speaker are on no slide."""
  for slide in deck.slides:
    slide.notes_slide.notes_text_frame.text = 'Say hello 1 time'


def wide(deck):
  """16:9, and everything moved."""
  deck.slide_width, deck.slide_height = Inches(13.333), Inches(7.5)
  for slide in deck.slides:
    title = slide.shapes.title
    title.left, title.top = Inches(0.6), Inches(0.4)
    title.width, title.height = Inches(12.1), Inches(1.1)


def subtitled(deck):
  """The layout "Title Slide" with its subtitle."""
  slide = deck.slides.add_slide(deck.slide_layouts[0])
  slide.shapes.title.text = deck.slides[0].shapes.title.text
  slide.placeholders[1].text = 'From the table of the data'
  ids = deck.slides._sldIdLst
  first = ids[0]
  ids.insert(0, ids[-1])
  deck.part.drop_rel(first.rId)
  ids.remove(first)


def broken(deck):
  """Lines of one paragraph."""
  frame = facts(deck).text_frame
  frame.text = f'Total: {TOTAL}\vHighest: {BEST}\vValue: {MOST}'
  frame.paragraphs[0].font.size = Pt(24)


RIGHT = [
  in_placeholder,
  formatted,
  bulleted,
  added('rPr', '<a:latin typeface="+mn-lt"/>'),
  rectangle,
  noted,
  wide,
  sized(10972800, 8229600, points=20),
  subtitled,
  broken,
  by_place((0, 1, 2)),
  side_by_side((0, 1, 2)),
  outline(2),
  empty_paragraph(600),
  said(lambda text: f'\u2022 {text} \u2013 \u201cd\xe9j\xe0\u201d, it\u2019s'),
  said(lambda text: text.replace(TOTAL, f'{int(TOTAL):,}') + '.'),
  said(lambda text: text.replace(BEST, f'\u201c{BEST}\u201d,')),
]
