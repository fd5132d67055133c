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
    for name in ('grade', 'guard'):
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
    (lambda d: d.slides[0].shapes.add_group_shape(), 'grouped'),
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


@pytest.mark.parametrize('name', ['ppt/vbaProject.bin', '../x.xml', 'a.rels'])
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
