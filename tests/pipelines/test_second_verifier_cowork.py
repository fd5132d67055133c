"""The second verifier of Cowork tasks agrees with what is drawn, and finds errors."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks import second_verifier_cowork
from m2jax.tasks import harbor
from m2jax_pipelines import slides, spreadsheets
from m2jax_pipelines.spreadsheets import models, tables

pytest.importorskip('openpyxl', reason='pip install -e ./m2jax_pipelines')


_DRAWERS = [*models.GENERATORS, *tables.drawers()]


def _written(number, directory):
  draw, rng = _DRAWERS[number % len(_DRAWERS)], random.Random(number)
  model, config = draw(rng), spreadsheets.Config()
  own = f'{draw.__name__}/{number}'
  draft = spreadsheets.drafted(config, model, rng, ('formulas',), own)
  return harbor.write(draft, directory)


def test_it_agrees_with_workbooks(tmp_path):
  """Oracle and solution, by a reader and an evaluator of its own."""
  for number in range(len(_DRAWERS)):
    assert second_verifier_cowork.spreadsheets(_written(number, tmp_path), {}) == ''


def test_it_finds_a_wrong_value(tmp_path):
  path = _written(2, tmp_path)
  spec = json.loads((path / 'tests' / 'cases.json').read_text())
  spec['cases'][1]['values']['Answer!B3'] += 1
  (path / 'tests' / 'cases.json').write_text(json.dumps(spec))
  assert 'case 1: Answer!B3' in second_verifier_cowork.spreadsheets(path, {})


def _deck(number, directory):
  topic = list(slides._TOPICS)[number % len(slides._TOPICS)]
  own = f'{topic.lower().replace(" ", "-")}/{number}'
  return harbor.write(slides.drafted(topic, random.Random(number), own), directory)


def test_it_agrees_with_decks(tmp_path):
  """On right decks, and on those that an edit of their XML makes wrong."""
  pytest.importorskip('pptx', reason='pip install -e ./m2jax_pipelines')
  assert second_verifier_cowork.slides(_deck(0, tmp_path), {}) == ''


@pytest.mark.parametrize(
  'part, old, new, reason',
  [
    ('spec.json', '"values": [', '"values": [1, ', 'rows'),
    ('spec.json', '"title": "', '"title": "x', 'titles'),
    ('grade.py', '  check_layout(deck)', '  pass', 'deck "'),
    ('grade.py', "source[1], chart['values'])", "chart['values'], [])", 'deck "none"'),
  ],
)
def test_it_finds_a_wrong_spec_or_verifier_of_decks(
  tmp_path, monkeypatch, part, old, new, reason
):
  pytest.importorskip('pptx', reason='pip install -e ./m2jax_pipelines')
  monkeypatch.setattr(random.Random, 'sample', lambda self, names, k: list(names)[-k:])
  path = _deck(0, tmp_path)
  text = (path / 'tests' / part).read_text()
  assert old in text
  (path / 'tests' / part).write_text(text.replace(old, new))
  assert second_verifier_cowork.slides(path, {}).startswith(reason)
