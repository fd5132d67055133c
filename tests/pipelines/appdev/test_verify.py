"""The verifier in Chromium: solutions, mutants, and failures of the browser."""

from __future__ import annotations

import random

import pytest

from m2jax.pipelines.appdev import kinds
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
