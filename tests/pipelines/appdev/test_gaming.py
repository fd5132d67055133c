"""Attempts to game the verifier of apps; all in one sandbox, with one Chromium."""

from __future__ import annotations

import pytest

from tests.pipelines.appdev import batch, gaming

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def reports(sites):
  """Reports on the honest app, on the attempts, and on the honest app once more."""
  jobs = {'honest': (gaming.page(), gaming.SPEC)}
  jobs |= {name: (a.files, gaming.SPEC) for name, a in gaming.ATTEMPTS.items()}
  jobs['honest again'] = jobs['honest']
  return batch.judged(jobs, sites, timeout_s=500.0)


@pytest.mark.parametrize('name', ['honest', 'honest again'])
def test_an_honest_app_passes(reports, name):
  """Also after all attempts: none of them harms the browser of the next."""
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
