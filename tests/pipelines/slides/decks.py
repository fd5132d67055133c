"""The deck that is right, and edits of it for the tests of slides."""

from __future__ import annotations

import io
import json
import random
import zipfile

import pytest

from m2jax_pipelines import slides

pptx = pytest.importorskip('pptx', reason='pip install -e ./m2jax_pipelines')
from pptx.oxml import parse_xml  # noqa: E402
from pptx.util import Inches, Pt  # noqa: E402

DRAFT = slides.drafted('Orders', random.Random(3), 'orders/0')
SPEC = json.loads(DRAFT.tests['spec.json'])
PLACE = Inches(0.5), Inches(1.8), Inches(9), Inches(5)
VALUES, NAMES = SPEC['chart']['values'], SPEC['chart']['categories']
TOTAL, BEST, MOST = SPEC['slides'][1]['texts']
OTHERS = SPEC['slides'][1]['others']
A = '{http://schemas.openxmlformats.org/drawingml/2006/main}'
P = '{http://schemas.openxmlformats.org/presentationml/2006/main}'
C = '{http://schemas.openxmlformats.org/drawingml/2006/chart}'


def saved(deck) -> bytes:
  file = io.BytesIO()
  deck.save(file)
  return file.getvalue()


def add_box(slide, text, *place, points=None):
  box = slide.shapes.add_textbox(*place)
  box.text_frame.text = text
  if points:
    box.text_frame.paragraphs[0].runs[0].font.size = Pt(points)


def drop(deck, slide, index):
  shape = deck.slides[slide].shapes[index]
  shape._element.getparent().remove(shape._element)


def run_of(deck, slide, paragraph=1):
  """A run of text of a slide's second shape."""
  return deck.slides[slide].shapes[1].text_frame.paragraphs[paragraph].runs[0]


def summary(deck, *lines):
  frame = deck.slides[1].shapes[1].text_frame
  frame.text = '\n'.join(lines)
  for paragraph in frame.paragraphs:
    for run in paragraph.runs:
      run.font.size = Pt(14)


def coloured(deck, colour, fill=None):
  from pptx.dml.color import RGBColor

  for paragraph in deck.slides[1].shapes[1].text_frame.paragraphs:
    for run in paragraph.runs:
      run.font.color.rgb = RGBColor.from_string(colour)
  if fill:
    shape = deck.slides[1].shapes[1]
    shape.fill.solid()
    shape.fill.fore_color.rgb = RGBColor.from_string(fill)


def made(deck):
  """(chart's shape, its XML)"""
  shape = next(s for s in deck.slides[2].shapes if s.has_chart)
  return shape, shape.chart._chartSpace


def xml(text):
  """An element of DrawingML, PresentationML or a chart."""
  names = (
    f'xmlns:a="{A[1:-1]}" xmlns:c="{C[1:-1]}" xmlns:p="{P[1:-1]}" xmlns:r="http://'
    'schemas.openxmlformats.org/officeDocument/2006/relationships" xmlns:mc="http://'
    'schemas.openxmlformats.org/markup-compatibility/2006"'
  )
  end = min(text.index(c) for c in ' />' if c in text)
  return parse_xml(f'{text[:end]} {names}{text[end:]}')


def facts(deck):
  """The box of the summary's facts."""
  return deck.slides[1].shapes[1]


def rewritten(data, change):
  """A zip archive whose parts are those that `change(name, bytes)` returns."""
  target = io.BytesIO()
  with (
    zipfile.ZipFile(io.BytesIO(data)) as old,
    zipfile.ZipFile(target, 'w', zipfile.ZIP_DEFLATED) as new,
  ):
    for one in old.namelist():
      new.writestr(one, change(one, old.read(one)))
  return target.getvalue()
