"""The verifier in Chromium: solutions, mutants, and failures of the browser."""

from __future__ import annotations

import json
import random

import pytest

from m2jax_pipelines.appdev import kinds
from tests.pipelines.appdev import batch, gaming


def _apps():
  return {k: draw(random.Random(f'verify/{k}')) for k, draw in kinds.DRAWERS.items()}


def _files(app, without=''):
  return {n: t.encode() for n, t in app.data.items()} | app.solution(without)


@pytest.mark.thorough  # minutes
def test_a_mutant_fails_where_its_rule_is_checked(sites):
  """Two flags of each kind's solution, drawn anew; and the solutions pass."""
  jobs, expected, rng = {}, {}, gaming.drawn()
  for kind, app in _apps().items():
    jobs[kind] = _files(app), app.spec()
    for flag, criterion in rng.sample(sorted(app.mutants.items()), 2):
      spec = app.spec()
      spec['criteria'] = [c for c in spec['criteria'] if c['id'] == criterion]
      jobs[f'{kind} without {flag}'] = _files(app, flag), spec
      expected[f'{kind} without {flag}'] = criterion
  found = batch.judged(jobs, sites, timeout_s=590.0)
  assert {k: found[k].get('reward') for k in kinds.DRAWERS} == dict.fromkeys(
    kinds.DRAWERS, 1
  )
  survived = [
    name
    for name, criterion in expected.items()
    if next(r['passed'] for r in found[name]['criteria'] if r['id'] == criterion)
  ]
  assert survived == []


# Right apps in other forms than the solutions have.
_CONVERTER = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>TITLE</title>
<style>body{font-family:sans-serif;margin:0;background:#fff;color:#111}
main{max-width:480px;padding:24px;display:grid;gap:16px}label{display:grid;gap:4px}
input,select{min-height:44px;font:inherit}</style></head><body><main><h1>TITLE</h1>
<label>FIELD<input TYPE id="p"></label><label>From<select id="f"></select></label>
<label>To<select id="t"></select></label><output data-testid="result"></output></main>
<script>const C = CONFIG;
const [p, f, t] = ['p', 'f', 't'].map((i) => document.getElementById(i));
for (const s of [f, t]) for (const u in C.units) s.add(new Option(u));
t.selectedIndex = 1;
function go() {
  const text = p.value.trim(), n = Number(text), value = n * C.units[f.value];
  const wrong = text === '' || !Number.isFinite(n) || C.positive && n < 0;
  document.querySelector('[data-testid=result]').textContent = wrong ? C.wrong
    : (value / C.units[t.value]).toFixed(C.decimals) + ' ' + t.value;
}
for (const e of [p, f, t]) e.addEventListener('input', go);
go();</script></body></html>"""
_INPUTS = {'a wrapped label': 'inputmode="decimal"', 'a number field': 'type="number"'}


@pytest.fixture(scope='module')
def right(sites):
  """Reports on a converter with labels around its controls, and a list with icons."""
  drawn = (kinds.DRAWERS['converter'](random.Random(f'right/{n}')) for n in range(99))
  converter = next(app for app in drawn if not app.config['swapping'])
  jobs = {}
  for name, form in _INPUTS.items():
    step = f'{form} step="any"' if 'number' in form else form
    page = _CONVERTER.replace('TYPE', step).replace('TITLE', converter.title)
    page = page.replace('FIELD', converter.config['label'])
    page = page.replace('CONFIG', json.dumps(converter.config))
    jobs[name] = {'index.html': page.encode()}, converter.spec()
  todo = kinds.DRAWERS['todo'](random.Random('right'))
  files = todo.solution()
  script = files['app.js'].decode()
  assert "'Remove'" in script, 'the solution has another button'
  jobs['an icon'] = (
    files | {'app.js': script.replace("'Remove'", "'×'").encode()},
    (todo.spec()),
  )
  return batch.judged(jobs, sites)


@pytest.mark.long
@pytest.mark.parametrize('name', [*_INPUTS, 'an icon'])
def test_a_right_app_passes_whatever_its_form(right, name):
  assert right[name]['reward'] == 1, right[name]


@pytest.mark.long
def test_a_browser_that_fails_is_no_verdict(sites):
  """Killed in every try, or a Chromium that does not start: invalid, never 0."""
  job = {'app': (gaming.page(), gaming.SPEC)}
  killed = batch.judged(job, sites, crash='process')['app']
  assert 'killed' in killed.get('invalid', ''), killed
  ended = batch.judged(job, sites, crash='browser')['app']
  assert 'ended' in ended.get('invalid', ''), ended
  missing = batch.judged(job, sites, chromium='/bin/false')['app']
  assert 'does not start' in missing.get('invalid', ''), missing


@pytest.mark.long
def test_a_page_that_crashes_by_itself_fails_the_gate(sites):
  report = batch.judged({'app': (gaming.page(), gaming.SPEC)}, sites, crash='page')
  assert report['app'].get('reward') == 0, report
  rows = {row['id']: row for row in report['app']['criteria']}
  assert not rows['crash']['passed'] and 'a page crashed' in rows['crash']['evidence']
