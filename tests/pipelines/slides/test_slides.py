"""Slides: a deck that follows the rules passes; each broken rule fails."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path

import pytest

from m2jax_pipelines import slides, spreadsheets
from m2jax_pipelines.slides import render

pytest.importorskip('openpyxl', reason='pip install -e ./m2jax_pipelines')
pptx = pytest.importorskip('pptx', reason='pip install -e ./m2jax_pipelines')
from tests.pipelines.slides import charts, drawn, right, texts, unseen  # noqa: E402
from tests.pipelines.slides.decks import DRAFT, SPEC, saved  # noqa: E402

MODULES = 'allowed', 'charts', 'fit', 'look', 'parts'


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
    for name in ('grade', 'guard', 'contrast', *MODULES):
      sys.modules.pop(name, None)


@pytest.fixture(scope='module')
def solved(tmp_path_factory):
  from m2jax_pipelines.slides import solve

  path = tmp_path_factory.mktemp('deck') / 'deck.pptx'
  rows = [line.split(',') for line in DRAFT.overlay['data.csv'].decode().split()[1:]]
  solve.write(rows, json.loads(DRAFT.solution['plan.json'])['titles'], path)
  return path


@pytest.mark.parametrize('change, reason', texts.RULES + charts.RULES)
def test_an_attempt_to_game_it_fails(grade, solved, change, reason):
  deck = pptx.Presentation(str(solved))
  change(deck)
  reward, why = grade.judge(saved(deck), SPEC)
  assert reward == 0 and reason in why, why


def test_the_solution_passes(grade, solved):
  assert grade.judge(solved.read_bytes(), SPEC) == (1, '')
  assert grade.judge(None, SPEC)[0] == 0


@pytest.mark.parametrize(
  'change, reason', [*texts.UNSEEN, *unseen.UNSEEN, *charts.UNSEEN, *drawn.UNSEEN]
)
def test_what_is_not_seen_does_not_count(grade, solved, change, reason):
  """Text and charts that a parser finds and a reader does not, and lists of guesses."""
  deck = pptx.Presentation(str(solved))
  change(deck)
  reward, why = grade.judge(saved(deck), SPEC)
  assert reward == 0 and reason in why, why


RIGHT = [*texts.RIGHT, *right.RIGHT, *charts.RIGHT, *drawn.RIGHT]


@pytest.mark.parametrize('change', RIGHT)
def test_other_right_decks_pass(grade, solved, change):
  deck = pptx.Presentation(str(solved))
  change(deck)
  assert grade.judge(saved(deck), SPEC) == (1, '')


@pytest.mark.parametrize(
  'name',
  ['ppt/embeddings/o.bin', 'ppt/vbaProject.bin', '../x.xml', 'a.rels', 'ppt/x.xml'],
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
