"""How benchmarks.optimizer_plan adds up; it compiles for minutes itself."""

from __future__ import annotations

import pytest

from benchmarks import optimizer_plan


def row(name, seconds):
  figures = dict(state_gib=1.0, temporaries_gib=2.0, tflop=seconds, hbm_gb=1.0)
  return (
    dict(name=name, chips=8, sent={'all-to-all': 3.0}, seconds=seconds, rest_s=6.0)
    | figures
  )


def test_evaluations_are_on_a_line():
  """One is MuonSphere's, two the compiled program's of SSO."""
  sphere, sso = row('muon_sphere', 1.0), row('sso', 1.5)
  for evaluations, seconds in ((1, 1.0), (2, 1.5), (5, 3.0)):
    found = optimizer_plan.at(sphere, sso, evaluations)
    assert found['seconds'] == found['tflop'] == pytest.approx(seconds)
  text = optimizer_plan.table([sphere, optimizer_plan.at(sphere, sso, 5)])
  assert '\n| 8 | sso, 5 evaluations | 1.0 | 2.0 | 3.0 |' in text
  assert text.splitlines()[-1].endswith('| 3.0 | 3,000 | 33.3% |')
