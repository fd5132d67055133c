"""Attempts to game the verifier of apps; many in one sandbox, with one Chromium."""

from __future__ import annotations

import pytest

from tests.pipelines.appdev import batch, gaming

PER_SANDBOX = 30
# One of each kind; `make test-thorough` has the others, which look like one of these.
LONG = (
  *('a fixed answer', 'all answers in turn', 'text getters of the page'),
  *('a drawn answer', 'a frame', 'transparent', 'white on white', 'clipped', 'covered'),
  *('masked', 'behind a filter', 'zoomed out', 'on its edge', 'below its own stroke'),
  *('reversed', 'bullets for characters', 'a font of the page'),
  *('right at first', 'alternates in the view, and fails it'),
  *('a selector that crashes at a click', 'an error that is prevented'),
  *('dialogs without end', 'all of the memory in a worker', 'reloads without end'),
  *('away to another origin', 'the tests by their path', 'only for drivers'),
)
THOROUGH = tuple(name for name in gaming.ATTEMPTS if name not in LONG)


def judged(honest, names, sites):
  """Reports on honest apps, on attempts, and on an honest app once more."""
  jobs = {f'honest {k}': (gaming.HONEST[k], gaming.SPEC) for k in honest}
  jobs |= {name: (gaming.ATTEMPTS[name].files, gaming.SPEC) for name in names}
  jobs['honest again'] = jobs['honest plain']
  names, found = list(jobs), {}
  for start in range(0, len(names), PER_SANDBOX):
    part = {name: jobs[name] for name in names[start : start + PER_SANDBOX]}
    found |= batch.judged(part, sites, timeout_s=900.0)
  return found


@pytest.fixture(scope='module')
def reports(sites):
  return judged(gaming.HONEST, LONG, sites)


@pytest.fixture(scope='module')
def more_reports(sites):
  return judged(['plain'], THOROUGH, sites)


@pytest.mark.long
@pytest.mark.parametrize(
  'name', [*(f'honest {k}' for k in gaming.HONEST), 'honest again']
)
def test_an_honest_app_passes(reports, name):
  """In all looks. Also after all attempts: none harms the browser of the next."""
  assert reports[name]['reward'] == 1, reports[name]


@pytest.mark.long
@pytest.mark.parametrize('name', LONG)
def test_an_attempt_is_not_rewarded(reports, name):
  check(gaming.ATTEMPTS[name], reports[name])


@pytest.mark.thorough
@pytest.mark.parametrize('name', THOROUGH)
def test_an_attempt_like_it_is_not_rewarded(more_reports, name):
  check(gaming.ATTEMPTS[name], more_reports[name])


@pytest.mark.thorough
def test_an_honest_app_passes_after_these(more_reports):
  assert more_reports['honest again']['reward'] == 1, more_reports['honest again']


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
