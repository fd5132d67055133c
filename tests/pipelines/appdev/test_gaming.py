"""Attempts to game the verifier of apps; many in one sandbox, with one Chromium."""

from __future__ import annotations

import pytest

from tests.pipelines.appdev import batch, gaming

pytestmark = pytest.mark.long
PER_SANDBOX = 30


@pytest.fixture(scope='module')
def reports(sites):
  """Reports on honest apps, on the attempts, and on an honest app once more."""
  jobs = {f'honest {k}': (files, gaming.SPEC) for k, files in gaming.HONEST.items()}
  jobs |= {name: (a.files, gaming.SPEC) for name, a in gaming.ATTEMPTS.items()}
  jobs['honest again'] = jobs['honest plain']
  names, found = list(jobs), {}
  for start in range(0, len(names), PER_SANDBOX):
    part = {name: jobs[name] for name in names[start : start + PER_SANDBOX]}
    found |= batch.judged(part, sites, timeout_s=500.0)
  return found


@pytest.mark.parametrize(
  'name', [*(f'honest {k}' for k in gaming.HONEST), 'honest again']
)
def test_an_honest_app_passes(reports, name):
  """In all looks. Also after all attempts: none harms the browser of the next."""
  assert reports[name]['reward'] == 1, reports[name]


@pytest.mark.parametrize('name', gaming.ATTEMPTS)
def test_an_attempt_is_not_rewarded(reports, name):
  attempt, report = gaming.ATTEMPTS[name], reports[name]
  assert report.get('reward') == 0, report
  if not attempt.criterion:
    return
  row = next(
    r
    for r in report['criteria']
    if (r['layer'], r['id']) == (attempt.layer, attempt.criterion)
  )
  assert not row['passed'] and attempt.evidence in row['evidence'], row
