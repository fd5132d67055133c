"""Drawn apps, their texts, and the parts of the verifier that need no browser."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from fractions import Fraction
from pathlib import Path
from unittest import mock

import pytest

from m2jax import sandbox
from m2jax.tasks.harbor import directory, verifier
from m2jax_pipelines import appdev, duplicates, evidence, installed, llm
from m2jax_pipelines.appdev import kinds, looks, query
from m2jax_pipelines.appdev.app import label
from m2jax_pipelines.appdev.kinds import calculator, cart
from m2jax_pipelines.appdev.verifier import browser, grade, visual
from tests.pipelines import model_server

PNG = b'\x89PNG\r\n\x1a\n' + bytes(16)


def drawn(kind, seed=0):
  return kinds.DRAWERS[kind](random.Random(f'test/{kind}/{seed}'))


def test_there_are_more_than_60_distinct_tasks():
  """By the pipeline's own threshold, over all kinds."""
  pytest.importorskip('datasketch', reason='pip install -e ./m2jax_pipelines')
  near = duplicates.NearDuplicates(appdev.Config().near_duplicate)
  distinct = 0
  for kind in kinds.DRAWERS:
    for seed in range(14):
      app = drawn(kind, seed)
      features = duplicates.runs('\n'.join([app.title, *app.rules]))
      if near.find(features) is None:
        near.add(f'{kind}/{seed}', features)
        distinct += 1
  assert distinct > 60


@pytest.mark.parametrize('kind', kinds.DRAWERS)
def test_an_instruction_names_what_the_verifier_looks_for(kind):
  for seed in range(8):
    app = drawn(kind, seed)
    assert query.unnamed(app) == []
    # And it is noticed if it does not: some requirement is in one place only.
    fewer = [
      query.unnamed(
        type(app)(**{**vars(app), 'rules': app.rules[:i] + app.rules[i + 1 :]})
      )
      for i in range(len(app.rules))
    ]
    assert any(fewer)


@pytest.mark.parametrize('kind', kinds.DRAWERS)
def test_what_the_verifier_types_is_not_in_the_task(kind):
  """Long inputs and data files of criteria are unknown to the agent."""
  for seed in range(8):
    app = drawn(kind, seed)
    known = app.instruction() + ''.join(app.data.values())
    for criterion in app.criteria:
      for name, text in criterion.files.items():
        assert app.data[name] != text
      for operation, _, *values in criterion.steps:
        if operation == 'fill' and len(values[0].strip()) > 7 and 'code' not in known:
          assert values[0].strip() not in known


@pytest.mark.parametrize('kind', kinds.DRAWERS)
def test_mutants_differ_in_one_flag(kind):
  app = drawn(kind)
  criteria = {criterion.id for criterion in app.criteria}
  assert len(app.mutants) >= 3 and set(app.mutants.values()) <= criteria
  for flag in app.mutants:
    assert app.solution(flag) != app.solution()


@pytest.mark.parametrize(
  'numbers, signs, precedence, value',
  [
    (['2', '3', '4'], '+×', True, 14),
    (['2', '3', '4'], '+×', False, 20),
    (['9', '3', '2'], '−÷', True, Fraction(15, 2)),
    (['9', '3', '2'], '−÷', False, 3),
    (['1.5', '2'], '×', True, 3),
  ],
)
def test_the_calculators_oracle(numbers, signs, precedence, value):
  assert calculator.evaluate(numbers, signs, precedence) == value


def test_the_carts_oracle():
  """10 % off from 20.00, then a coupon of 20 %, then 7 % of tax; halves go up."""
  rules = {'from': 2000, 'percent': 10, 'coupon': 20, 'tax': 7}
  products = [{'cents': 1005}, {'cents': 333}]
  assert cart.amounts(rules, products, [1, 0]) == (1005, 0, 1075)
  # 2,010: 201 off; a fifth of 1,809 is 362 (361.8); 1,447 and 101 (101.29) of tax.
  assert cart.amounts(rules, products, [2, 0], coupon=True) == (2010, 563, 1548)
  assert cart.amounts(rules, products, [0, 1]) == (333, 0, 356)


def _text(text='Total', box=(10, 10, 60, 20), **changes):
  fields = dict(color=[0, 0, 0, 1], back=[255, 255, 255], opacity=1, size=16)
  fields |= dict(bold=False, visible=True, shown=True, disabled=False, editable=False)
  return {'text': text, 'box': list(box), **fields, **changes}


def test_contrast_is_that_of_wcag():
  assert visual.contrast(_text()) == pytest.approx(21)
  grey = _text(
    color=[118, 118, 118, 1]
  )  # the darkest grey that WCAG lets pass: #767676
  assert visual.contrast(grey) == pytest.approx(4.54, abs=0.01)
  assert visual.contrast(_text(color=[255, 255, 255, 1])) == pytest.approx(1)
  assert visual.contrast(_text(opacity=0.5)) == pytest.approx(3.98, abs=0.05)
  assert visual.contrast(_text(back=None)) == 0


@pytest.mark.parametrize(
  'proxy, texts, changes',
  [
    ('contrast', [_text(color=[200, 200, 200, 1])], {}),
    ('contrast', [_text(back=None)], {}),
    ('size', [_text(size=11)], {}),
    ('overflow', [_text(box=(1250, 0, 60, 20))], {}),
    ('overflow', [_text(box=(-30, 0, 60, 20))], {}),
    ('overflow', [_text()], {'scroll': 1400}),
    ('overlap', [_text(), _text('Other', (30, 15, 60, 20))], {}),
    ('targets', [_text()], {'controls': [('button', 'Go', '', (0, 0, 20, 20))]}),
    ('names', [_text()], {'controls': [('button', 'Go', 'Stop', (0, 0, 40, 40))]}),
  ],
)
def test_each_proxy_finds_its_flaw_and_no_other(monkeypatch, proxy, texts, changes):
  monkeypatch.setattr(visual, 'pixels', lambda png: '')
  controls = [
    dict(zip(('tag', 'text', 'label', 'box'), control, strict=True))
    for control in changes.pop('controls', ())
  ]
  page = dict(texts=texts, controls=controls, scroll=1280, width=1280) | changes
  failed = [name for name, fine, _ in visual.judge([page], b'') if not fine]
  assert failed == [proxy]
  hidden = _text(size=1, box=(-9000, 0, 1, 1), visible=False)  # for screen readers
  good = dict(page, texts=[_text(), hidden], controls=[], scroll=1280)
  assert all(fine for _, fine, _ in visual.judge([good], b''))


@pytest.mark.parametrize('icon', ['×', '✕', '🗑️', 'x', '+', '↑'])
def test_an_icon_may_have_any_name(monkeypatch, icon):
  """Symbols are no text that a person would say (WCAG 2.5.3); words are."""
  monkeypatch.setattr(visual, 'pixels', lambda png: '')
  control = dict(tag='button', label='Remove olive 12', box=(0, 0, 40, 40))
  page = dict(texts=[_text()], scroll=1280, width=1280)
  for text, fine in (icon, True), ('Delete', False), (f'{icon} Delete', False):
    judged = visual.judge([page | {'controls': [control | {'text': text}]}], b'')
    assert {n: ok for n, ok, _ in judged}['names'] is fine, text


def test_what_is_no_number_is_none_in_a_number_field():
  """Which keeps digits, signs and the letter e of what is typed."""
  for seed in range(60):
    criteria = drawn('converter', seed).spec()['criteria']
    (steps,) = [c['steps'] for c in criteria if c['id'] == 'wrong']
    word = [values[0] for operation, _, *values in steps if operation == 'fill'][1]
    with pytest.raises(ValueError):
      float(re.sub('[^0-9e.+-]', '', word))


_LABELS = """
<label>A <input id="input"></label>
<label>B <select id="select"><option>one</option><option>two</option></select></label>
<label>C <textarea id="textarea">text</textarea></label>
<label><input id="checkbox" type="checkbox"> D</label>
<label for="number">E</label><input id="number" type="number" value="3">
<span id="f">F</span><input id="search" type="search" aria-labelledby="f">
<input id="range" type="range" aria-label="G">
"""


def test_a_label_names_its_control_whatever_its_form(monkeypatch):
  """Around it, before it, or by reference: what is in the control is no part of it."""
  if reason := appdev.unavailable():
    pytest.skip(reason)
  from playwright.async_api import async_playwright

  monkeypatch.syspath_prepend(Path(grade.__file__).parent)  # as in a task's tests/
  with mock.patch.dict(sys.modules):  # other verifiers have modules of the same names
    import steps

  async def found():
    async with async_playwright() as driver:
      program = next(path for path in browser.CHROMIUM if os.path.exists(path))
      chromium = await driver.chromium.launch(
        executable_path=program, args=browser.ARGUMENTS
      )
      page = await chromium.new_page()
      await page.set_content(_LABELS)
      controls = [steps.locate(page, label(name)) for name in 'ABCDEFG']
      ids = [await one.get_attribute('id', timeout=3000) for one in controls]
      await chromium.close()
      return ids

  assert asyncio.run(found()) == (
    'input select textarea checkbox number search range'.split()
  )


def test_a_reward_needs_the_gate_and_something_that_works():
  def reward(gate, interaction, looks_):
    report = grade.Report()
    for layer, row in zip(
      ('execution', 'interaction', 'visual'), (gate, interaction, looks_), strict=True
    ):
      for number, passed in enumerate(row):
        report.add(layer, str(number), 'text', passed, 'evidence')
    return report.reward()

  assert reward([1, 1], [1, 1], [1, 1]) == 1
  assert reward([1, 0], [1, 1], [1, 1]) == 0
  assert reward([1, 1], [0, 0], [1, 1]) == 0
  assert reward([1, 1], [1, 0], [1, 0]) == 0.5


def test_a_late_verdict_is_the_machines(monkeypatch):
  monkeypatch.setattr(grade, 'DEADLINE_S', 0.01)
  reward, details = asyncio.run(grade.bounded(asyncio.sleep(5)))
  assert reward == 0 and details['invalid'].startswith('infrastructure')


def test_links_and_large_apps_are_not_read(tmp_path):
  place = tmp_path / 'app'
  place.mkdir()
  (tmp_path / 'secret').write_text('secret')
  (place / 'index.html').symlink_to(tmp_path / 'secret')
  assert grade.read_app(tmp_path)[1].startswith('no app/index.html')
  (place / 'index.html').unlink()
  (place / 'index.html').write_bytes(b'x' * (grade.MAX_BYTES + 1))
  assert 'more than' in grade.read_app(tmp_path)[1]


def test_evidence_is_text_and_images_alone(tmp_path):
  import base64

  image = base64.b64encode(PNG).decode()
  files = {'a.txt': 'seen', 'b.png': image, 'c.png': 'no image', 'd.html': '<p>'}
  evidence.save(tmp_path, 'task', {**files, '../e.txt': 'outside', 'f.txt': 7})
  kept = sorted(path.name for path in tmp_path.rglob('*') if path.is_file())
  assert kept == ['a.txt', 'b.png']
  assert evidence.texts(tmp_path, 'task') == {'a': 'seen'}
  assert evidence.images(tmp_path, 'task')['b'].startswith('data:image/png;base64,')


def test_a_verifier_gets_at_least_what_it_needs(tmp_path):
  needs = {'processes': 512, 'memory_bytes': 1 << 20}
  metadata = directory.Metadata('p', 'f', verifier_needs=needs)
  task = directory.Directory(tmp_path, '', metadata, 77.0)
  limits = verifier._limits(task, sandbox.Limits())
  assert (limits.processes, limits.wall_s) == (512, 77.0)
  assert limits.memory_bytes == sandbox.Limits().memory_bytes


def test_programs_of_a_site_stay_programs(tmp_path, monkeypatch):
  program = tmp_path / 'dist' / 'program'
  program.parent.mkdir()
  program.write_text('#!/bin/sh')
  program.chmod(0o755)

  class Found:
    files = [type(program)('dist/program')]
    locate_file = staticmethod(lambda file: tmp_path / file)

  monkeypatch.setattr(installed, 'distribution', lambda name: Found)
  site = installed.site(tmp_path / 'sites', 'key', ['any'])
  assert (site / 'dist' / 'program').stat().st_mode & 0o111


def test_looks_are_judged_only_by_a_model(tmp_path):
  """And only if it answers every question with yes or no."""
  off = llm.LLMClient(llm.LLMConfig(), 'judge')
  assert asyncio.run(looks.judge(off, [PNG])) == looks.Looks({}, llm.SCRIPTED)
  answer = dict.fromkeys(looks.ITEMS, True) | {'grouping': False}
  with model_server.Server(lambda body: json.dumps(answer)) as server:
    judge = llm.LLMClient(llm.LLMConfig(server.url, 'm'), 'judge', tmp_path / 'calls')
    assert asyncio.run(looks.judge(judge, [PNG])) == looks.Looks(answer, 'm')
    content = server.bodies[0]['messages'][0]['content']
    assert content[1]['image_url']['url'].startswith('data:image/png;base64,')
    server.answer = lambda body: '{"grouping": "perhaps"}'
    assert asyncio.run(looks.judge(judge, [PNG])).by == llm.SCRIPTED


def test_a_quotient_that_is_rounded_is_asked_for():
  """21 ÷ 3 would not tell whether a calculator rounds."""
  for seed in range(60):
    criteria = kinds.DRAWERS['calculator'](random.Random(seed)).spec()['criteria']
    steps = next(c['steps'] for c in criteria if c['id'] == 'rounding')
    assert '.' in steps[-1][-1], steps
