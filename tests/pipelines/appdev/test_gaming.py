"""Attempts to game the verifier of apps; many in one sandbox, with one Chromium.

An app takes seconds of a processor. `make test-long` judges one attempt of each kind;
`make test-thorough` some of the others, drawn anew each time. A failure prints the
seed; with APP_ATTEMPTS_SEED set to it the same are judged again.
"""

from __future__ import annotations

import pytest

from tests.pipelines.appdev import batch, gaming

PER_SANDBOX, DRAWN = 30, 20
LONG = (
  *('a fixed answer', 'text getters of the page', 'a frame', 'white on white'),
  *('covered', 'masked', 'zoomed out', 'reversed', 'a font of the page'),
  *('right at first', 'a selector that crashes at a click'),
  *('an error that is prevented', 'reloads without end', 'the tests by their path'),
  'only for drivers',
)
OTHERS = tuple(name for name in gaming.ATTEMPTS if name not in LONG)
HONEST = tuple(gaming.HONEST)


def judged(honest, names, sites):
  """Reports on honest apps, on attempts, and on an honest app once more."""
  jobs = {f'honest {k}': (gaming.HONEST[k], gaming.SPEC) for k in honest}
  jobs |= {name: (gaming.ATTEMPTS[name].files, gaming.SPEC) for name in names}
  jobs['honest again'] = gaming.HONEST['plain'], gaming.SPEC
  names, found = list(jobs), {}
  for start in range(0, len(names), PER_SANDBOX):
    part = {name: jobs[name] for name in names[start : start + PER_SANDBOX]}
    found |= batch.judged(part, sites, timeout_s=900.0)
  return found


@pytest.fixture(scope='module')
def reports(sites):
  return judged(HONEST[::2], LONG, sites)


@pytest.mark.long
@pytest.mark.parametrize(
  'name', [*(f'honest {k}' for k in HONEST[::2]), 'honest again']
)
def test_an_honest_app_passes(reports, name):
  """In all looks. Also after all attempts: none harms the browser of the next."""
  assert reports[name]['reward'] == 1, reports[name]


@pytest.mark.long
@pytest.mark.parametrize('name', LONG)
def test_an_attempt_is_not_rewarded(reports, name):
  check(gaming.ATTEMPTS[name], reports[name])


@pytest.mark.thorough
def test_other_apps(sites):
  """Of each sort: honest ones pass, attempts do not."""
  names = gaming.drawn().sample(OTHERS, DRAWN)
  reports = judged(HONEST[1::2], names, sites)
  for name in names:
    check(gaming.ATTEMPTS[name], reports.pop(name))
  wrong = {name: report for name, report in reports.items() if report['reward'] != 1}
  assert not wrong


def check(attempt, report):
  assert report.get('reward') == 0, report
  if not attempt.criterion:
    return
  row = next(
    r
    for r in report['criteria']
    if (r['layer'], r['id']) == (attempt.layer, attempt.criterion)
  )
  assert not row['passed'] and attempt.evidence in row['evidence'], row
